"""The stream of one prompt read as plainly as can be, to hold harvest's own way against.

One prompt a pass, nothing padded, nothing stopped early, and another place to look: layer k is what block k + 1 is given, and only the
last one what its block answers. So a fault of the batches or of the hooks does not repeat here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import StreamError
from harvest.model.blocks import LoadedDecoder, stream_of
from harvest.model.capture import Capture

# The relative error of a token's values that is allowed on average, by the type that they were stored in, and by the one that they were
# computed in: batches of another shape round otherwise. 0.03 is a cosine of 0.9996; the service's makers measured 0.9997 between two.
_STORED = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
_COMPUTED = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def tolerance(store_dtype: str, compute_dtype: str) -> float:
    """The mean relative error of a token's values that these types explain."""
    return max(_STORED[store_dtype], _COMPUTED[compute_dtype])


def check_values(
    decoder: LoadedDecoder, capture: Capture, layers: Sequence[int], prompts: Sequence[npt.NDArray[np.int32]], allowed: float
) -> float:
    """Read prompts in one padded batch, as a run does, and each alone; answers the worst mean relative error of a layer of a prompt.

    prompts: token ids, int32 [token]. Raises StreamError where it is above what is allowed.
    """
    rows_LTH = capture.read(prompts).rows_LTW.cpu().double()
    worst, start = 0.0, 0
    for number, ids in enumerate(prompts):
        ours_LTH = rows_LTH[:, start : start + len(ids)]
        errors: dict[int, float] = {}

        def compare(position: int, plain_TH: torch.Tensor, ours_LTH: torch.Tensor = ours_LTH, errors: dict[int, float] = errors) -> None:
            errors[position] = mean_error(ours_LTH[position], plain_TH)

        read_plain(decoder, torch.from_numpy(ids), layers, compare)
        for position, error in errors.items():
            worst = max(worst, check_error(error, allowed, layers[position], number, len(ids)))
        start += len(ids)
    return worst


def mean_error(ours_TH: torch.Tensor, plain_TH: torch.Tensor) -> float:
    """How far tokens' streams are from those read plainly, relative to their norms, on average."""
    return float(((ours_TH - plain_TH).norm(dim=1) / plain_TH.norm(dim=1)).mean())


def check_error(error: float, allowed: float, layer: int, number: int, n_tokens: int) -> float:
    """The error of a layer of a prompt of the check, 0 where a stream is not finite, which is no matter of it. Raises StreamError."""
    if not np.isfinite(error):
        return 0.0
    if error > allowed:
        raise StreamError(
            f"layer {layer} of the prompt of {n_tokens} tokens is {error:.2g} of its norm away from what the model computes for it alone, "
            f"where {allowed:.2g} is allowed; this model cannot be read in padded batches (prompt {number} of the check)"
        )
    return error


@torch.inference_mode()
def read_plain(decoder: LoadedDecoder, ids_T: torch.Tensor, layers: Sequence[int], visit: Callable[[int, torch.Tensor], None]) -> None:
    """Run one prompt and hand over the stream after each block of `layers`, by its place there: float64 [T, H], on the CPU."""
    with _hooks(decoder.blocks, layers, visit):
        decoder.module(input_ids=ids_T.long()[None].to(decoder.device), use_cache=False)


@contextmanager
def _hooks(blocks: Sequence[torch.nn.Module], layers: Sequence[int], visit: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    def give(position: int, stream_BTH: Any) -> None:
        visit(position, stream_BTH[0].cpu().double())

    handles = []
    for position, layer in enumerate(layers):
        if layer + 1 < len(blocks):
            handles.append(
                blocks[layer + 1].register_forward_pre_hook(
                    lambda _block, args, kwargs, position=position: give(position, args[0] if args else kwargs["hidden_states"]),
                    with_kwargs=True,
                )
            )
        else:
            handles.append(
                blocks[layer].register_forward_hook(lambda _block, _args, output, position=position: give(position, stream_of(output)))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
