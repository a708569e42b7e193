"""Whether a model has a single residual stream that harvest's way of reading gets right: seen in three short passes before a run begins.

A name tells little: looped models call their blocks several times, and an encoder loaded as a language model looks at tokens to the
right, which padding would then change. Both would write wrong numbers without an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import ModelError
from harvest.model.blocks import LoadedDecoder, stream_of

# Tokens of the prompt that are tried: enough to look ahead, and a moment's work for any model.
TRIED_TOKENS = 64

# How far a prompt's stream may be from itself, relative to its norm and on average over tokens, when there are more tokens to its right.
# Kernels round otherwise for another shape, in the half types by a few thousandths; a model whose choice of keys hangs on the length of a
# batch, as sparse attention's may, is off by a tenth and more.
_PADDING_BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

# How far a token's stream may move, relative to its norm, when the tokens to its right are others. Both passes have the same shape, so a
# causal model gives the very same values on a CPU, in bfloat16 too; the bound leaves room for kernels of a GPU that are not repeatable.
# Encoders move by 1e-2 and more.
CAUSAL_BOUND = 1e-3


# So end classes that ask for a picture, or for what another part of their model computes.
UNRUNNABLE = (TypeError, ValueError, AttributeError, KeyError)


def tried_tokens(n_chosen_keys: int | None) -> int:
    """How many tokens of a prompt show whether a model is read right: more than its attention takes in whole, where it chooses keys."""
    return max(TRIED_TOKENS, 2 * (n_chosen_keys or 0))


@dataclass(frozen=True)
class Trials:
    """A prompt in up to three forms, each int32 [token]; the first n_kept tokens of all three are the same.

    whole: its first tokens. changed: the same with another second half. alone: the first half; None where halves are not compared.
    """

    whole: npt.NDArray[np.int32]
    changed: npt.NDArray[np.int32] | None
    alone: npt.NDArray[np.int32] | None
    n_kept: int

    def check_causal(self, decoder: LoadedDecoder, whole_BSH: torch.Tensor, changed_BSH: torch.Tensor) -> None:
        """Raise ModelError where a token's stream after some block depends on the tokens to its right."""
        before_TH, after_TH = whole_BSH[0, : self.n_kept].float(), changed_BSH[0, : self.n_kept].float()
        # The greatest move counts: in a model with short windows only the tokens beside the change see it.
        error = float(((before_TH - after_TH).norm(dim=1) / before_TH.norm(dim=1)).max())
        # A stream that is not finite is no question of causality; reading it names the layer and the place.
        if np.isfinite(error) and error > CAUSAL_BOUND:
            name = type(decoder.module).__name__
            raise ModelError(
                f"model: the stream of {name} changes by {error:.2g} of its norm when the tokens to its right are others, "
                f"{_why_not_causal(decoder)}"
            )

    def check_padding(self, decoder: LoadedDecoder, whole_BSH: torch.Tensor, alone_BSH: torch.Tensor) -> None:
        """Raise ModelError where a token's stream after some block depends on how many tokens stand to its right."""
        before_TH, alone_TH = whole_BSH[0, : self.n_kept].float(), alone_BSH[0].float()
        error = float(((before_TH - alone_TH).norm(dim=1) / alone_TH.norm(dim=1)).mean())
        if np.isfinite(error) and error > _PADDING_BOUNDS.get(whole_BSH.dtype, 1e-3):
            raise ModelError(
                f"model: the stream of {type(decoder.module).__name__} changes by {error:.2g} of its norm when more tokens stand to its "
                "right, whatever they are; it cannot be read in padded batches"
            )


def make_trials(ids: npt.NDArray[np.int32], max_tokens: int = TRIED_TOKENS, length_switches: Sequence[int] = ()) -> Trials:
    """The forms of a prompt that show whether a model is read right.

    max_tokens: of the prompt, the first so many are tried.
    length_switches: the model reads whole batches otherwise above these lengths, so halves are not compared across them.
    """
    ids = ids[:max_tokens]
    n_kept = (len(ids) + 1) // 2
    largest = int(ids.max())
    if n_kept == len(ids) or largest == 0:
        return Trials(ids, None, None, n_kept)
    # Another id in each later place, and none beyond those that the embedding is known to have.
    steps = 1 + 7 * np.arange(len(ids) - n_kept) % largest
    others = ((ids[n_kept:] + steps) % (largest + 1)).astype(ids.dtype)
    alone = None if any(n_kept <= switch < len(ids) for switch in length_switches) else ids[:n_kept]
    return Trials(ids, np.concatenate([ids[:n_kept], others]), alone, n_kept)


@torch.inference_mode()
def check_stream(
    decoder: LoadedDecoder, ids: npt.NDArray[np.int32], max_tokens: int = TRIED_TOKENS, length_switches: Sequence[int] = ()
) -> None:
    """Run a prompt, the same with another second half, and its first half alone, through all loaded blocks.

    Each block must be called once, in order, and take in what the one before it handed out; and no token's stream may depend on the
    tokens to its right, nor on how many there are, since prompts are padded there without a mask. Raises ModelError with what was seen.
    For max_tokens and length_switches see `make_trials`.
    """
    trials = make_trials(ids, max_tokens, length_switches)
    whole = _trace(decoder, trials.whole)
    if trials.changed is not None:
        trials.check_causal(decoder, whole, _trace(decoder, trials.changed))
    if trials.alone is not None:
        trials.check_padding(decoder, whole, _trace(decoder, trials.alone))


def _why_not_causal(decoder: LoadedDecoder) -> str:
    quantised = getattr(getattr(decoder.module, "config", None), "quantization_config", None)
    if quantised is not None:
        method = getattr(quantised, "quant_method", None) or "in this way"
        return (
            f"and its weights are quantised ({getattr(method, 'value', method)}): where matrix products take a scale or outliers from all "
            "tokens of a batch, a token's stream depends on those beside it; take weights of another kind"
        )
    return "so it is not causal without a mask; harvest reads decoders, whose tokens look to the left only"


def _trace(decoder: LoadedDecoder, ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """The last block's output [1, token, hidden], after a check of every block's call."""
    called: list[int] = []
    streams: list[torch.Tensor] = []
    broken: list[int] = []

    def before(block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs.get("hidden_states")
        if streams and isinstance(stream, torch.Tensor) and not same_stream(stream, streams[-1]):
            broken.append(block)

    def after(block: int, output: Any) -> None:
        called.append(block)
        stream = stream_of(output)
        if isinstance(stream, torch.Tensor):
            streams.append(stream)

    hooks = []
    for number, block in enumerate(decoder.blocks):
        hooks.append(block.register_forward_pre_hook(lambda _m, args, kwargs, n=number: before(n, args, kwargs), with_kwargs=True))
        hooks.append(block.register_forward_hook(lambda _m, _args, output, n=number: after(n, output)))
    try:
        decoder.module(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(decoder.device), use_cache=False)
    except UNRUNNABLE as error:
        if decoder.is_cut:
            # Perhaps for want of a block above; the caller reads the model whole then.
            raise
        raise not_on_text(decoder, error) from error
    finally:
        for hook in hooks:
            hook.remove()
    name, n_layers = type(decoder.module).__name__, len(decoder.blocks)
    if called != list(range(n_layers)):
        shown = ", ".join(map(str, called[:12])) + (", …" if len(called) > 12 else "")
        raise ModelError(
            f"model: {name} calls its {n_layers} decoder blocks as {shown or 'none at all'}; harvest needs each once, in order"
        )
    last = streams[-1] if streams else None
    if last is None or not is_single_stream(last, len(ids)):
        raise not_single_stream(f"the decoder blocks of {name} hand out", last, len(ids))
    if broken:
        raise not_handed_on(decoder, broken[0])
    return streams[-1]


def not_on_text(decoder: LoadedDecoder, error: BaseException) -> ModelError:
    """What to say of a model whose forward pass fails on token ids."""
    reason = " ".join(str(error).split())
    return ModelError(
        f"model: {type(decoder.module).__name__} cannot be run on token ids alone ({type(error).__name__}: {reason}); "
        "harvest reads models that take text and nothing else"
    )


def is_single_stream(stream: Any, n_tokens: int) -> bool:
    """Whether what a block hands out is one stream of a prompt of so many tokens."""
    return isinstance(stream, torch.Tensor) and stream.dim() == 3 and stream.shape[:2] == (1, n_tokens)


def not_single_stream(who: str, stream: Any, n_tokens: int) -> ModelError:
    """What to say of what is not. who: a block or several, with their verb."""
    found = list(stream.shape) if isinstance(stream, torch.Tensor) else "no tensor"
    return ModelError(
        f"model: {who} {found}, where one stream of shape [batch, token, hidden] = [1, {n_tokens}, …] was expected; harvest reads models "
        "with a single residual stream"
    )


def not_handed_on(decoder: LoadedDecoder, block: int) -> ModelError:
    """What to say of a block that is given another stream than the one before it hands out."""
    return ModelError(
        f"model: decoder block {block} of {type(decoder.module).__name__} does not take in what block {block - 1} hands out, "
        "so there is no single residual stream between them"
    )


def same_stream(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two streams are equal, wherever they lie."""
    return one.shape == other.shape and torch.allclose(one, other.to(one.device), rtol=0, atol=0, equal_nan=True)
