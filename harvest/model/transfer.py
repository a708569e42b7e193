"""Captured rows from the device to their places in host memory, while the device computes the next batch.

On a card each run of consecutive rows is one copy, straight into the window's buffer if that is pinned. If it is not, the batch is copied
to a pinned buffer first, and from there to its places.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.model.capture import Captured, Places
from harvest.model.device import host_empty


class Arrival:
    """Rows on their way to their places, or other work of a device. `wait` returns when it is done."""

    def __init__(self, done: Any, held: Captured | None, peaks_L: torch.Tensor, then: Callable[[], None] = lambda: None) -> None:
        """done: the event to wait for, or None. peaks_L: of the rows, float32, there after it. then: called once, after it."""
        # If the rows were freed before their copy is done, the allocator could give their memory to the next batch.
        self._done, self._held, self._peaks_L, self._then = done, held, peaks_L, then

    def wait(self) -> npt.NDArray[np.float32]:
        """Wait until the rows are in their places, and return their peaks, float32 [L]."""
        if self._done is not None:
            self._done.synchronize()
        self._then()
        self._held = None
        peaks_L: npt.NDArray[np.float32] = self._peaks_L.numpy()
        return peaks_L


class Transfer:
    """Starts copies to host memory. On a card they run on their own CUDA stream, so that the next batch computes meanwhile.

    At most two copies into memory that is not pinned may be under way: they use two pinned buffers in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: deque[torch.Tensor] = deque(torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def start(self, captured: Captured, target_LTW: torch.Tensor, places: Places) -> Arrival:
        """Start the copy of one batch to its places in a host tensor of the same layers, in the stored dtype."""
        rows_LTW = captured.rows_LTW
        if self._stream is None:
            _write(rows_LTW.cpu(), target_LTW, places)
            return Arrival(None, None, captured.peaks_L.cpu())
        if target_LTW.is_pinned():
            return self._start(captured, lambda: _copy(rows_LTW, target_LTW, places))
        host_LTW = self._buffer(rows_LTW)
        return self._start(captured, lambda: host_LTW.copy_(rows_LTW, non_blocking=True), partial(_write, host_LTW, target_LTW, places))

    def mark(self) -> Arrival:
        """Return an arrival, without peaks, that waits for all work that the device has been given so far."""
        done = None
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(self._device))
        return Arrival(done, None, torch.empty(0))

    def _start(self, captured: Captured, copy: Callable[[], object], then: Callable[[], None] = lambda: None) -> Arrival:
        assert self._stream is not None
        peaks_L = host_empty(captured.peaks_L.shape, torch.float32, pinned=True)
        # A thread that waits for a blocking event sleeps, and does not keep a core busy.
        done = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            peaks_L.copy_(captured.peaks_L, non_blocking=True)
            done.record(self._stream)
        return Arrival(done, captured, peaks_L, then)

    def _buffer(self, rows_LTW: torch.Tensor) -> torch.Tensor:
        """Return memory for rows in the next pinned buffer, enlarged if needed. It is pageable if no more can be pinned."""
        buffer = self._buffers.popleft()
        if buffer.numel() < rows_LTW.nbytes:
            del buffer
            buffer = host_empty([rows_LTW.nbytes], torch.uint8, pinned=True)
        self._buffers.append(buffer)
        return buffer[: rows_LTW.nbytes].view(rows_LTW.dtype).view(rows_LTW.shape)


def _write(host_LTW: torch.Tensor, target_LTW: torch.Tensor, places: Places) -> None:
    for host_TW, target_TW in zip(host_LTW, target_LTW, strict=True):
        places.write(host_TW, target_TW)


def _copy(rows_LTW: torch.Tensor, target_LTW: torch.Tensor, places: Places) -> None:
    """Copy rows from a card into pinned memory: in one copy if they are the whole target, else a run of a layer at a time."""
    if rows_LTW.shape == target_LTW.shape and target_LTW.is_contiguous() and len(places.runs) == 1:
        target_LTW.copy_(rows_LTW, non_blocking=True)
        return
    for rows_TW, target_TW in zip(rows_LTW, target_LTW, strict=True):
        for row, place, n_tokens in places.runs:
            # Both sides are contiguous, so this is one copy without a temporary.
            target_TW[place : place + n_tokens].copy_(rows_TW[row : row + n_tokens], non_blocking=True)


def from_bits(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return stored values as a tensor of `dtype`, without a copy. numpy has no bfloat16 and holds its bits as uint16."""
    return torch.from_numpy(array).view(dtype)
