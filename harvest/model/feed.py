"""The thread that fills a decoder's blocks in turn, one ahead of the one that computes, from the checkpoint's files.

    reader threads   a piece of a tensor at a time: file -> buffer, on a card through pinned memory and on a stream of their own
    feeding thread   a whole block: transformers' conversion, and the block is filled
    model thread     Feed.next: the block before is given back, the next in turn is there

Buffers for a block's bytes are used again and again, at most two. Where the conversion makes other tensors of most of them (experts put
together, another type), the buffer is free for the next block at once.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

import torch

from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.checkpoint import OpenFiles, Slot, lay_out, lay_out_copies, memory_of, new_buffer
from harvest.model.device import host_empty

# Enough reads at once for a fast disk to be busy, and pieces large enough that their number does not matter.
_READERS = 4
_PIECE = 16 << 20
# Pinned memory on a card: each reader has two pieces.
PREFETCH_PINNED = 2 * _READERS * _PIECE
_WAIT_S = 0.2
# Where a conversion leaves so little of a block as it was read, that is copied, and the buffer is free for the next block.
_COPIED_SHARE = 0.5
# That many blocks are filled at once: one computes, the next is read.
_FILLED = 2


class _StoppedError(Exception):
    """Ends the feeding thread before its last block."""


class Feed:
    """Fills the blocks of a decoder in order, over and over. A context manager: at its end the thread is gone, and the blocks are empty.

    n_bytes: read from the files so far. read_s: seconds in which they were read. wait_s: seconds in which `next` had to wait.
    """

    def __init__(self, weights: BlockwiseDecoder, n_passes: int) -> None:
        """n_passes: how often all blocks are asked for."""
        self.n_bytes, self.read_s, self.wait_s = 0, 0.0, 0.0
        self._weights, self._n_passes = weights, n_passes
        self._device = weights.decoder.device
        self._n_blocks = len(weights.tensors)
        self._files = OpenFiles([tensor for tensors in weights.tensors for tensor in tensors])
        layouts = [lay_out(tensors, self._device) for tensors in weights.tensors]
        self._slots = [slots for slots, _ in layouts]
        self._buffer_bytes = max(n_bytes for _, n_bytes in layouts)
        self._buffers: list[torch.Tensor] = []
        self._held: dict[int, torch.Tensor] = {}
        # A block that is given back comes with the event after which nothing on a card uses it any more.
        self._given_back: queue.SimpleQueue[tuple[int | None, Any]] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()
        for _ in range(_FILLED):
            self._given_back.put((None, None))
        self._stopped = threading.Event()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._local = threading.local()
        self._current: int | None = None
        self._thread = threading.Thread(target=self._feed, name="harvest-feed", daemon=True)

    def __enter__(self) -> Self:
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="harvest-read")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        self._readers.shutdown(cancel_futures=True)
        self._files.close()
        for block in range(self._n_blocks):
            self._weights.empty(block)

    def next(self, check: Callable[[], None]) -> int:
        """Give back the block before, and wait for the next in turn; answers its number.

        check: called now and then, and raises to give up waiting. Raises ModelError where the block cannot be read.
        """
        started = time.monotonic()
        self._give_back()
        while True:
            check()
            try:
                found = self._ready.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            break
        self.wait_s += time.monotonic() - started
        self._current, filled = found
        if filled is not None:
            # The block's memory belongs to the prefetcher's stream, which waits for the event of `_give_back` before it uses it again.
            torch.cuda.current_stream(self._device).wait_event(filled)
        return self._current

    def _give_back(self) -> None:
        if self._current is None:
            return
        used = None
        if self._stream is not None:
            used = torch.cuda.Event(blocking=True)
            used.record(torch.cuda.current_stream(self._device))
        self._given_back.put((self._current, used))
        self._current = None

    def _feed(self) -> None:
        try:
            for number in range(self._n_passes * self._n_blocks):
                self._make_room()
                self._ready.put(self._fill(number % self._n_blocks))
        except _StoppedError:
            pass
        except BaseException as error:
            # A thread has nobody to raise to.
            self._ready.put(error)

    def _make_room(self) -> None:
        """Wait until fewer blocks are filled than may be, and take the weights of the one that was given back."""
        while True:
            if self._stopped.is_set():
                raise _StoppedError
            try:
                block, used = self._given_back.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            break
        if block is None or self._n_blocks <= _FILLED:
            return
        if used is not None and self._stream is not None:
            self._stream.wait_event(used)
        self._weights.empty(block)
        held = self._held.pop(block, None)
        if held is not None and len(held) == self._buffer_bytes:
            self._buffers.append(held)

    def _fill(self, block: int) -> tuple[int, Any]:
        if self._n_blocks <= _FILLED and block in self._filled_once():
            # So few blocks stay where they are.
            return block, None
        with torch.cuda.stream(self._stream):
            buffer = self._buffers.pop() if self._buffers else new_buffer(self._buffer_bytes, self._device)
            started = time.monotonic()
            self._read(block, buffer)
            self.read_s += time.monotonic() - started
            self.n_bytes += self._weights.n_bytes(block)
            self._weights.fill(block, {slot.tensor.name: slot.view(buffer) for slot in self._slots[block]})
            kept, filled = self._keep(block, buffer), None
            if self._stream is not None:
                filled = torch.cuda.Event(blocking=True)
                filled.record(self._stream)
        if kept is not None:
            self._held[block] = kept
        if kept is not buffer:
            self._buffers.append(buffer)
        return block, filled

    def _keep(self, block: int, buffer: torch.Tensor) -> torch.Tensor | None:
        """The memory that a block's weights use as it was read: the buffer, or, where that is a small part of it, a copy of the part."""
        place = buffer.untyped_storage().data_ptr()
        used = [tensor for tensor in self._weights.weights(block) if tensor.untyped_storage().data_ptr() == place]
        slots, n_bytes = lay_out_copies(used)
        if not used or n_bytes > _COPIED_SHARE * len(buffer) or not all(tensor.is_contiguous() for tensor in used):
            return buffer if used else None
        copy = new_buffer(n_bytes, self._device)
        for tensor, at in zip(used, slots, strict=True):
            moved = copy[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = moved.copy_(tensor.data)
        return copy

    def _filled_once(self) -> set[int]:
        return {block for block in range(self._n_blocks) if not any(tensor.is_meta for tensor in self._weights.weights(block))}

    def _read(self, block: int, buffer: torch.Tensor) -> None:
        """Fill a buffer with a block's bytes, on a card once the work before it on the feed's stream is done."""
        pieces = [
            (slot, first, min(_PIECE, slot.tensor.n_bytes - first))
            for slot in self._slots[block]
            for first in range(0, slot.tensor.n_bytes, _PIECE)
        ]
        futures = [self._readers.submit(self._read_piece, *piece, buffer) for piece in pieces]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def _read_piece(self, slot: Slot, first: int, n_bytes: int, buffer: torch.Tensor) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        path, start = slot.tensor.path, slot.tensor.start + first
        into = buffer[slot.at + first : slot.at + first + n_bytes]
        if self._device.type == "cpu":
            self._files.read(path, start, memory_of(into))
            return
        pinned, copied = self._pinned()
        copied.synchronize()
        self._files.read(path, start, memory_of(pinned[:n_bytes]))
        with torch.cuda.stream(self._stream):
            into.copy_(pinned[:n_bytes], non_blocking=True)
            copied.record(self._stream)

    def _pinned(self) -> tuple[torch.Tensor, Any]:
        """The pinned memory whose turn it is in this reader thread, and the event after which it is free."""
        if not hasattr(self._local, "pieces"):
            self._local.pieces = [(host_empty([_PIECE], torch.uint8, pinned=True), torch.cuda.Event(blocking=True)) for _ in range(2)]
        self._local.pieces.reverse()
        return self._local.pieces[0]  # type: ignore[no-any-return]
