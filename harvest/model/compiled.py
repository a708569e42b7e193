"""Decoder blocks compiled with torch.compile, and checked against the same blocks uncompiled.

A compiler fuses elementwise operations and so rounds differently. What it may not do is compute something else, so the run's own prompts
are read before and after, and compared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import HarvestError, StreamError
from harvest.model.blocks import LoadedDecoder
from harvest.model.capture import Capture
from harvest.model.device import is_failure, is_out_of_memory
from harvest.model.plain import mean_error

# Blocks share their code, and each shape class of a batch (one prompt or several, with or without a mask) is compiled for itself. torch
# silently runs what exceeds its limit of 8 uncompiled, so that values would depend on the order of the batches. Here that is an error.
_MOST_VARIANTS = 64
# Where the errors of compilers come from once other errors are possible too.
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")


@contextmanager
def compiled_blocks(
    decoder: LoadedDecoder,
    capture: Capture,
    layers: Sequence[int],
    batches: Sequence[Sequence[npt.NDArray[np.int32]]],
    allowed: float,
) -> Iterator[float]:
    """Compile a decoder's blocks while the context lasts. Yields the worst mean relative error of a layer of a batch.

    batches: token ids, each int32 [token], to read before and after. allowed: the mean relative error of a token's values, see
    `plain.tolerance`. Raises StreamError if torch cannot compile the blocks here, or the values are further apart.
    """
    before = [_read(capture, batch) for batch in batches]
    limits: dict[str, Any] = {
        "recompile_limit": _MOST_VARIANTS,
        "accumulated_recompile_limit": 16 * _MOST_VARIANTS,
        "fail_on_recompile_limit_hit": True,
    }
    with torch._dynamo.config.patch(**limits):
        try:
            with _naming_compilers():
                for block in decoder.blocks:
                    block.forward = torch.compile(block.forward, dynamic=True)
                # Compiled while they are read: a block's code depends on what it is given.
                after = [_read(capture, batch) for batch in batches]
            worst = max(_compare(one, other, layers, allowed) for one, other in zip(before, after, strict=True))
            with _naming_compilers(_COMPILERS):
                yield worst
        finally:
            for block in decoder.blocks:
                block.__dict__.pop("forward", None)


def _read(capture: Capture, batch: Sequence[npt.NDArray[np.int32]]) -> torch.Tensor:
    return capture.read(batch).rows_LTW.cpu().double()


@contextmanager
def _naming_compilers(modules: tuple[str, ...] = ("",)) -> Iterator[None]:
    """Raise StreamError in place of the errors of the compilers that torch calls, which have no class in common.

    modules: what the names of the modules of their classes begin with.
    """
    try:
        yield
    except HarvestError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or is_failure(error) or not type(error).__module__.startswith(modules):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise StreamError(f"compile: torch cannot compile the decoder blocks here ({lines[0]}). Leave --compile out.") from error


def _compare(before_LTW: torch.Tensor, after_LTW: torch.Tensor, layers: Sequence[int], allowed: float) -> float:
    worst = 0.0
    for layer, before_TW, after_TW in zip(layers, before_LTW, after_LTW, strict=True):
        finite_T = before_TW.isfinite().all(dim=1)
        # A token that is not finite uncompiled either is left out: reading it names the layer and the place.
        error = mean_error(after_TW[finite_T], before_TW[finite_T]) if finite_T.any() else 0.0
        if not error <= allowed:
            raise StreamError(
                f"compile: layer {layer} is {error:.2g} of its norm away from the uncompiled model, and {allowed:.2g} is allowed. "
                "Leave --compile out."
            )
        worst = max(worst, error)
    return worst
