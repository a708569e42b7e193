"""Whether copies to pinned memory ever arrive torn: the engine's rows against those of a synchronous run, bit for bit, many times."""

from typing import Any

import numpy as np
from engine import read_synchronously

from harvest.model.blocks import LoadedDecoder
from harvest.output.writers import WindowBuffer
from harvest.prepare import Prepared
from harvest.progress import Silent
from harvest.stop import StopFlag
from harvest.window import WindowReader


def check_copies(prepared: Prepared, decoder: LoadedDecoder, runs: int) -> dict[str, Any]:
    """Read everything so many times through pinned copies that run beside the passes, and count the values that differ.

    sync_repeats: whether two synchronous runs agree with each other; where they do not, the device itself is not repeatable.
    """
    truth_LTW = read_synchronously(prepared, decoder)
    repeats = np.array_equal(_bits(truth_LTW), _bits(read_synchronously(prepared, decoder)))
    rows_LTW = np.empty_like(truth_LTW)
    differing = []
    for _ in range(runs):
        # A value that nobody wrote shows: no stream has these bits.
        rows_LTW.view(np.uint8).fill(0xFF)
        _read(prepared, decoder, rows_LTW)
        differing.append(int((_bits(rows_LTW) != _bits(truth_LTW)).sum()))
    return {
        "runs": runs,
        "values": int(truth_LTW.size),
        "batches": sum(len(prepared.plan.batches(window)) for window in prepared.plan.windows),
        "differing_values": differing,
        "sync_repeats": bool(repeats),
        "is_sound": bool(repeats) and not any(differing),
    }


def _read(prepared: Prepared, decoder: LoadedDecoder, rows_LTW: Any) -> None:
    """The engine's own way, window by window, into rows for the whole run."""
    offsets = prepared.tokens.offsets
    with WindowReader(prepared, decoder, Silent(), StopFlag(), lambda *_: None) as reader:
        for window in prepared.plan.windows:
            place = rows_LTW[:, int(offsets[window.first]) : int(offsets[window.end])]
            reader.read(window, WindowBuffer(place, lambda: None))
        reader.finish()


def _bits(rows_LTW: Any) -> Any:
    """The rows' bits: two NaN are equal where their bits are."""
    return rows_LTW.view(np.uint32) if rows_LTW.dtype == np.float32 else rows_LTW.view(np.uint16)
