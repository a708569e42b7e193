"""One tiny random model of each type that transformers has a model of text for, read by harvest and in another way.

python tests/model/sweep.py [TYPE ...]     a line for each type, and how many are covered, refused and not built
"""

import copy
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import transformers
from streamed import ON_CPU, described, rows_by_block
from tiny_configs import decoder_types, tiny_config

from harvest.errors import HarvestError
from harvest.input.plan import Plan, make_plan
from harvest.model.blocks import LoadedDecoder, cut_class, decoder_of, stream_of
from harvest.model.capture import Capture
from harvest.model.classes import check_architecture, config_for_class, model_class, n_decoder_layers
from harvest.model.describe import find_chosen_keys, find_length_switches
from harvest.model.load import load_decoder
from harvest.model.plain import read_plain
from harvest.model.soundness import check_stream, tried_tokens

# Of random weights; a wrong position or a leak from the padding is at least a hundred times larger.
BOUND = 1e-4
_MOST_PARAMETERS = 60e6
_LENGTHS = (41, 7, 70)
COVERED, REFUSED, UNBUILT, WRONG = "covered", "refused", "not built", "wrong"


@dataclass(frozen=True)
class Row:
    """What became of one type. is_cut: whether a model of its first two blocks gives the same bits. is_streamed: so block by block."""

    model_type: str
    state: str
    words: str
    is_cut: bool = False
    is_streamed: bool = False

    def __str__(self) -> str:
        return f"{self.model_type:28} {self.state:10} {self.words}"


def prompts(largest: int = 256) -> list[Any]:
    """Token ids of three lengths, so that two are padded in a batch: int32 [token]."""
    draw = np.random.default_rng(0)
    return [draw.integers(1, largest, length).astype(np.int32) for length in _LENGTHS]


def sweep(model_type: str, as_decoder: bool = False) -> Row:
    """Build one type's tiny model, and hold what harvest reads of it against each prompt alone, without padding.

    as_decoder: of a type whose models are encoders, or encoder and decoder, unless their config says otherwise, a decoder alone.
    """
    try:
        torch.manual_seed(0)
        config = tiny_config(decoder_types()[model_type])
        if as_decoder:
            config.is_decoder, config.is_encoder_decoder = True, False
    except Exception as error:
        return Row(model_type, UNBUILT, _first_line(error))
    try:
        check_architecture(model_type, config)
    except HarvestError as error:
        return Row(model_type, REFUSED, _first_line(error))
    try:
        model = build(config)
    except Exception as error:
        return Row(model_type, UNBUILT, _first_line(error))
    return hold(model_type, model, config)


def may_be_decoder(model_type: str) -> bool:
    """Whether a type has models that are a decoder alone: its class for text is one, whatever its config says by default."""
    return decoder_types()[model_type] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def build(config: Any) -> Any:
    """A model of random weights that are large enough to tell tokens apart, in float32. Raises what its class raises."""
    make, inner = model_class(config), config_for_class(config)
    with torch.device("meta"):
        n_parameters = sum(weights.numel() for weights in make(copy.deepcopy(inner)).parameters())
    if n_parameters > _MOST_PARAMETERS:
        raise ValueError(f"{n_parameters / 1e6:.0f} million parameters at the least sizes that its config takes")
    model = make(copy.deepcopy(inner)).to(torch.float32).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1 and weights.std() < 0.05:
                weights.normal_(0, 0.1)
    return model


def hold(model_type: str, model: Any, config: Any) -> Row:
    """Hold what harvest reads of a model against each prompt alone, without padding."""
    n_layers, hidden_size = n_decoder_layers(config), getattr(config.get_text_config(decoder=True), "hidden_size", None)
    if not isinstance(n_layers, int) or not isinstance(hidden_size, int):
        return Row(model_type, REFUSED, f"its config has num_hidden_layers {n_layers!r} and hidden_size {hidden_size!r}")
    try:
        loaded = decoder_of(model, n_layers)
        plan = _plan(config)
        check_stream(loaded, prompts()[2], tried_tokens(find_chosen_keys(config.get_text_config(decoder=True))), plan.length_switches)
        rows = _capture(loaded, plan, list(range(n_layers)), hidden_size)
    except HarvestError as error:
        is_streamed, streamed_words = _try_streamed(model, config, n_layers, hidden_size)
        if is_streamed or streamed_words == WRONG:
            return Row(model_type, WRONG, f"{_first_line(error)}; but streamed: {streamed_words}", is_streamed=is_streamed)
        return Row(model_type, REFUSED, _first_line(error))
    except Exception as error:
        return Row(model_type, UNBUILT, f"its forward pass fails: {_first_line(error)}")
    worst, how = _compare(loaded, rows, model)
    is_cut, cut_words = _try_cut(model, config, n_layers, rows, hidden_size)
    is_streamed, streamed_words = _try_streamed(model, config, n_layers, hidden_size)
    norm = _final_norm(loaded)
    state = COVERED if worst <= BOUND and WRONG not in (cut_words, streamed_words) else WRONG
    words = f"within {worst:.0e} of {how}; cut: {cut_words}; streamed: {streamed_words}; {norm or 'something else after the last block'}"
    return Row(model_type, state, words, is_cut, is_streamed)


def _plan(config: Any) -> Plan:
    """The three prompts in one batch, padded, or in one each where the attention chooses its keys."""
    text = config.get_text_config(decoder=True)
    return make_plan(np.array(_LENGTHS), 3, 1, 1 << 30, 1 << 20, find_length_switches(text), find_chosen_keys(text))


def _capture(loaded: LoadedDecoder, plan: Plan, layers: list[int], hidden_size: int) -> torch.Tensor:
    """harvest's own reading of the three prompts, in order: float32 [layer, token, hidden]."""
    rows: dict[int, torch.Tensor] = {}
    with Capture(loaded, layers, hidden_size, torch.float32) as capture:
        for batch in plan.batches(plan.windows[0]):
            read = capture.read([prompts()[number] for number in batch]).rows_LTW
            rows |= zip(batch, read.split([_LENGTHS[number] for number in batch], dim=1), strict=True)
    return torch.cat([rows[number] for number in range(len(_LENGTHS))], dim=1)


def _compare(loaded: LoadedDecoder, rows_LTH: torch.Tensor, model: Any) -> tuple[float, str]:
    """The worst relative error of a layer of a prompt against that prompt alone, and in what it was read.

    That is the whole model with its head, and not the decoder that harvest takes out of it, where the whole runs on text alone. Layers are
    taken where the next block takes them in.
    """
    try:
        return _worst_error(LoadedDecoder(model, loaded.blocks), rows_LTH), "the whole model"
    except (TypeError, ValueError, AttributeError) as error:
        return _worst_error(loaded, rows_LTH), f"the decoder alone ({_first_line(error)[:60]})"


def _worst_error(loaded: LoadedDecoder, rows_LTH: torch.Tensor) -> float:
    worst, start = 0.0, 0
    for ids in prompts():
        alone: dict[int, torch.Tensor] = {}
        read_plain(loaded, torch.from_numpy(ids), range(len(loaded.blocks)), alone.__setitem__)
        for layer, stream_TH in alone.items():
            ours = rows_LTH[layer, start : start + len(ids)].double()
            worst = max(worst, float((ours - stream_TH).norm() / stream_TH.norm()))
        start += len(ids)
    return worst


def _try_cut(model: Any, config: Any, n_layers: int, rows_LTH: torch.Tensor, hidden_size: int) -> tuple[bool, str]:
    """Whether the model without its upper blocks gives the same bits; or why it cannot be made, and is read whole instead."""
    n_kept = max(n_layers // 2, 1)
    try:
        cut = cut_class(type(model), n_layers, n_kept)(copy.deepcopy(config_for_class(config))).to(torch.float32).eval()
        missing, _ = cut.load_state_dict(model.state_dict(), strict=False)
        if missing:
            return False, f"lacks {missing[0]}"
        loaded = decoder_of(cut, n_layers)
        plan = _plan(config)
        check_stream(loaded, prompts()[2], length_switches=plan.length_switches)
        rows = _capture(loaded, plan, list(range(n_kept)), hidden_size)
    except Exception as error:
        return False, f"no ({_first_line(error)})"
    return (True, "same bits") if torch.equal(rows, rows_LTH[:n_kept]) else (False, WRONG)


def _try_streamed(model: Any, config: Any, n_layers: int, hidden_size: int) -> tuple[bool, str]:
    """Whether the model, saved, gives the same bits a block at a time as loaded whole; or why it is refused."""
    plan = _plan(config)
    with tempfile.TemporaryDirectory() as place:
        description = described(Path(place), config, n_layers, hidden_size)
        # Blocks in several files, and files with parts of several blocks.
        model.save_pretrained(place, max_shard_size="200KB")
        try:
            rows = rows_by_block(description, prompts(), plan)
        except HarvestError as error:
            return False, f"no ({_first_line(error)})"
        whole = load_decoder(description, ON_CPU, torch.float32, n_layers)
        return (True, "same bits") if torch.equal(rows, _capture(whole, plan, list(range(n_layers)), hidden_size)) else (False, WRONG)


@torch.inference_mode()
def _final_norm(loaded: LoadedDecoder) -> str | None:
    """Which module makes the model's last hidden state of the last block's output; None where none is found."""
    streams: list[torch.Tensor] = []
    ends: list[tuple[str, Any]] = []

    def after(name: str, args: Any, output: Any) -> None:
        if (
            streams
            and args
            and isinstance(args[0], torch.Tensor)
            and args[0].shape == streams[0].shape
            and torch.equal(args[0], streams[0])
        ):
            ends.append((name, output))

    hooks = [
        module.register_forward_hook(lambda _m, args, output, name=name: after(name, args, output))
        for name, module in loaded.module.named_modules()
        if name
    ]
    hooks.append(loaded.blocks[-1].register_forward_hook(lambda _m, _args, output: streams.append(stream_of(output).clone())))
    answer = loaded.module(input_ids=torch.from_numpy(prompts()[0].astype(np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    state = getattr(answer, "last_hidden_state", None)
    if state is None:
        return "a decoder that answers logits"
    if state.shape == streams[0].shape and torch.equal(state, streams[0]):
        return "no final norm"
    same = (name for name, output in ends if isinstance(output, torch.Tensor) and torch.equal(output, state))
    return next((f"final norm {name}" for name in same), None)


def _first_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:170]}" if words else type(error).__name__


def main(names: list[str]) -> int:
    """Sweep the named types, or all, and print the table."""
    rows = []
    for name in names or sorted(decoder_types()):
        try:
            rows.append(sweep(name))
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(name, WRONG, _first_line(error)))
        print(rows[-1], flush=True)
    alone = [row.model_type for row in rows if row.state == REFUSED and may_be_decoder(row.model_type)]
    alone = [name for name in alone if sweep(name, as_decoder=True).state == COVERED]
    print(f"{len(alone)} of the refused are read where their config says that the model is a decoder: {' '.join(alone)}")
    counts = {state: sum(row.state == state for row in rows) for state in (COVERED, REFUSED, UNBUILT, WRONG)}
    print(
        f"transformers {transformers.__version__}: {counts}; cut with the same bits: {sum(row.is_cut for row in rows)}, "
        f"streamed with the same bits: {sum(row.is_streamed for row in rows)}"
    )
    return counts[WRONG]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.exit(main(sys.argv[1:]))
