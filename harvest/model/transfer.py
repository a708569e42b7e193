"""Captured rows from the device to host memory, beside the computing."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from harvest.model.capture import Captured

# numpy has no bfloat16: its bits travel as uint16.
_BITS = {torch.bfloat16: torch.uint16}


@dataclass(frozen=True)
class HostRows:
    """Rows of one batch in host memory: rows_LTW in the stored type (bfloat16 as uint16), peaks_L float32.

    On a GPU they lie in a pinned buffer that is used again two batches later.
    """

    rows_LTW: npt.NDArray[np.generic]
    peaks_L: npt.NDArray[np.float32]


class Arrival:
    """Rows on their way. `wait` answers when they are in host memory."""

    def __init__(self, captured: Captured, rows: torch.Tensor, peaks: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        # The rows on the device are held here until their copy is done: freed before, their memory could be handed out and written to.
        self._captured = captured
        self._rows, self._peaks, self._copied = rows, peaks, copied

    def wait(self) -> HostRows:
        """The rows, once the copy has ended."""
        if self._copied is not None:
            self._copied.synchronize()
        bits = self._rows.view(_BITS.get(self._rows.dtype, self._rows.dtype))
        return HostRows(bits.numpy(), self._peaks.numpy())


class Transfer:
    """Starts copies to host memory: on a GPU into pinned buffers on a stream of their own, so that the next batch computes meanwhile.

    At most two copies may be under way: the buffers are used in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: deque[torch.Tensor] = deque(torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def start(self, captured: Captured) -> Arrival:
        """Start the copy of one batch."""
        rows, peaks = captured.rows_LTW, captured.peaks_L
        if self._stream is None:
            return Arrival(captured, rows.cpu(), peaks.cpu(), None)
        n_bytes = rows.numel() * rows.element_size()
        host_rows = self._buffer(n_bytes).view(rows.dtype).view(rows.shape)
        host_peaks = torch.empty(peaks.shape, dtype=peaks.dtype, pin_memory=True)
        copied = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            host_rows.copy_(rows, non_blocking=True)
            host_peaks.copy_(peaks, non_blocking=True)
            copied.record(self._stream)
        return Arrival(captured, host_rows, host_peaks, copied)

    def _buffer(self, n_bytes: int) -> torch.Tensor:
        """The pinned buffer whose turn it is, made larger where it must be."""
        buffer = self._buffers.popleft()
        if buffer.numel() < n_bytes:
            buffer = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        self._buffers.append(buffer)
        return buffer[:n_bytes]
