"""Whether copies to pinned memory ever arrive torn: the engine's rows against those of a synchronous run, bit for bit, many times.

Windows of several batches are put together on a card and copied as a whole; the rows of a window of one batch are copied as they leave
the model. Both are checked.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine import plan_figures, read_synchronously

from harvest.input.plan import Window
from harvest.model.blocks import LoadedDecoder
from harvest.model.device import host_empty
from harvest.output.writers import WindowBuffer
from harvest.prepare import Prepared
from harvest.progress import Silent
from harvest.stop import StopFlag
from harvest.window import WindowReader


def check_copies(prepared: Prepared, decoder: LoadedDecoder, runs: int, stop: StopFlag | None = None) -> dict[str, Any]:
    """Read everything `runs` times through copies that run while the next batch computes, and count the values that differ.

    sync_repeats: whether two synchronous runs agree with each other. If they do not, the device itself is not repeatable.
    """
    stop = stop or StopFlag()
    # Torn values may not be finite. They are counted here and must not end the run.
    prepared = replace(prepared, allow_nonfinite=True)
    truth = {prompt: _bits(rows_LTW) for prompt, rows_LTW in read_synchronously(prepared, decoder)}
    repeats = all(np.array_equal(truth[prompt], _bits(rows_LTW)) for prompt, rows_LTW in read_synchronously(prepared, decoder))
    host = host_empty([len(prepared.tokens.ids) * prepared.layout.token_bytes], torch.uint8, pinned=decoder.device.type == "cuda")
    memory = host.numpy()
    differing = []
    for _ in range(runs):
        # No stream has these bits, so a value that was not written shows.
        memory.fill(0xFF)
        with WindowReader(prepared, decoder, Silent(), stop, lambda *_: None) as reader:
            for window, rows_LTW in _windows(prepared, memory):
                reader.read(window, WindowBuffer(rows_LTW, lambda: None))
            reader.finish()
        differing.append(_count_differing(prepared, memory, truth))
    figures = plan_figures(prepared)
    return {
        "runs": runs,
        "values": sum(bits.size for bits in truth.values()),
        "windows": figures["windows"],
        "batches": figures["batches"],
        "is_pinned": host.is_pinned(),
        "differing_values": differing,
        "sync_repeats": repeats,
        "is_sound": repeats and not any(differing),
    }


def _windows(prepared: Prepared, memory: npt.NDArray[np.uint8]) -> Iterator[tuple[Window, npt.NDArray[Any]]]:
    """Yield each window with its rows [L, T, W] in memory for the whole run, each window in one piece, as in its own buffer."""
    layout, offsets = prepared.layout, prepared.tokens.offsets
    for window in prepared.plan.windows:
        first, end = (int(offsets[edge]) * layout.token_bytes for edge in (window.first, window.end))
        yield window, memory[first:end].view(layout.numpy_dtype).reshape(len(layout.layers), window.n_tokens, layout.width)


def _count_differing(prepared: Prepared, memory: npt.NDArray[np.uint8], truth: dict[int, npt.NDArray[Any]]) -> int:
    offsets, n_differing = prepared.tokens.offsets, 0
    for window, rows_LTW in _windows(prepared, memory):
        places = offsets[window.first : window.end + 1] - offsets[window.first]
        for prompt, read_LTW in zip(range(window.first, window.end), np.split(_bits(rows_LTW), places[1:-1], axis=1), strict=True):
            n_differing += int((read_LTW != truth[prompt]).sum())
    return n_differing


def _bits(rows_LTW: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows' bits: two NaN are equal if their bits are."""
    return rows_LTW.view(np.uint32) if rows_LTW.dtype == np.float32 else rows_LTW.view(np.uint16)
