"""Where the streams of a window's batches wait between two blocks: on the device, in host memory, or in a file.

A file is read one batch ahead and written behind, in two threads, and what was written is dropped from the system's cache: each byte is
wanted again only a whole block later.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from harvest.model.checkpoint import memory_of, read_into
from harvest.model.device import host_empty
from harvest.scratch import drop_from_cache, make_scratch_file, scratch_failing

# Batches that may be on their way to their place at once.
_WRITES = 2
# Written bytes are waited for and dropped from the cache this many at a time.
_DROPPED = 256 << 20


class Waiting(ABC):
    """The stream of each batch, [batch, token, hidden], by the batch's number. A context manager."""

    @abstractmethod
    def get(self, number: int, following: int | None) -> torch.Tensor:
        """The stream that was put there last, on the device. following: the number that is asked for next."""

    @abstractmethod
    def put(self, number: int, stream_BSH: torch.Tensor) -> None:
        """Keep a stream until it is asked for."""

    @abstractmethod
    def split(self, number: int, n_rows: int, other: int) -> None:
        """Make two batches of one: the first n_rows prompts keep the number, the rest take the other."""

    def close(self) -> None:  # noqa: B027
        """End the threads that move streams. A store without any has nothing to do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class OnDevice(Waiting):
    """Streams that stay where they are computed."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.Tensor] = {}

    def get(self, number: int, following: int | None = None) -> torch.Tensor:  # noqa: ARG002
        """A copy of the stream: a block may write into what it is given, and is given it again where a card's memory did not do."""
        return self._streams[number].clone()

    def put(self, number: int, stream_BSH: torch.Tensor) -> None:
        """Hold the stream."""
        self._streams[number] = stream_BSH

    @property
    def is_empty(self) -> bool:
        """Whether no stream is held."""
        return not self._streams

    def move_to(self, other: Waiting) -> Waiting:
        """Move all streams to another store, one at a time, and return that."""
        for number in list(self._streams):
            other.put(number, self._streams.pop(number))
        return other

    def split(self, number: int, n_rows: int, other: int) -> None:
        """Two parts of one tensor."""
        _split(self._streams, number, n_rows, other)


class _Moved(Waiting):
    """Streams that leave the device, and are fetched one batch ahead, each way in a thread and on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        # Without a card nothing is done on either.
        self._in: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._out: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._fetchers = ThreadPoolExecutor(1, thread_name_prefix="harvest-fetch")
        self._keepers = ThreadPoolExecutor(1, thread_name_prefix="harvest-keep")
        self._coming: dict[int, Future[tuple[torch.Tensor, Any]]] = {}
        self._going: dict[int, Future[None]] = {}
        self._order: deque[int] = deque()

    def close(self) -> None:
        self._fetchers.shutdown(cancel_futures=True)
        self._keepers.shutdown(cancel_futures=True)

    def get(self, number: int, following: int | None) -> torch.Tensor:
        """The stream, and the next one is fetched beside it."""
        coming = self._coming.pop(number, None) or self._fetchers.submit(self._fetch, number)
        # One that waits for this very one to be put is fetched when it is asked for.
        if following is not None and following != number and following not in self._coming:
            self._coming[following] = self._fetchers.submit(self._fetch, following)
        stream, fetched = coming.result()
        if fetched is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(fetched)
            stream.record_stream(now)
        return stream

    def put(self, number: int, stream_BSH: torch.Tensor) -> None:
        """Start the stream on its way out; where two are on their way already, the first is waited for."""
        while len(self._order) >= _WRITES:
            self._going[self._order.popleft()].result()
        host, event = stream_BSH, None
        if self._is_cuda:
            host = host_empty(stream_BSH.shape, stream_BSH.dtype, pinned=True)
            event = torch.cuda.Event(blocking=True)
            self._out.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._out):
                host.copy_(stream_BSH, non_blocking=True)
                stream_BSH.record_stream(self._out)
                event.record(self._out)
        self._going[number] = self._keepers.submit(self._keep_when_there, number, host, event)
        self._order.append(number)

    def split(self, number: int, n_rows: int, other: int) -> None:
        """After what is on its way has come to its place."""
        for going in self._going.values():
            going.result()
        # A stream that could not be fetched for want of memory is fetched again.
        wait(self._coming.values())
        self._coming.clear()
        self._halve(number, n_rows, other)
        if number in self._going:
            self._going[other] = self._going[number]

    def _fetch(self, number: int) -> tuple[torch.Tensor, Any]:
        if number in self._going:
            self._going[number].result()
        host = self._load(number)
        if not self._is_cuda:
            return host, None
        with torch.cuda.stream(self._in):
            stream, event = host.to(self._device, non_blocking=True), torch.cuda.Event(blocking=True)
            event.record(self._in)
        return stream, event

    def _keep_when_there(self, number: int, host: torch.Tensor, event: Any) -> None:
        if event is not None:
            event.synchronize()
        self._keep(number, host)

    @abstractmethod
    def _load(self, number: int) -> torch.Tensor: ...

    @abstractmethod
    def _keep(self, number: int, host: torch.Tensor) -> None: ...

    @abstractmethod
    def _halve(self, number: int, n_rows: int, other: int) -> None: ...


class InMemory(_Moved):
    """Streams in pinned host memory, for a card that has no room for them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams: dict[int, torch.Tensor] = {}

    def _load(self, number: int) -> torch.Tensor:
        return self._streams[number]

    def _keep(self, number: int, host: torch.Tensor) -> None:
        self._streams[number] = host

    def _halve(self, number: int, n_rows: int, other: int) -> None:
        _split(self._streams, number, n_rows, other)


class InFile(_Moved):
    """Streams in a file without a name, which is gone with the process however it ends."""

    def __init__(self, folder: Path, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """shapes: of the batches, in the order of their numbers. Raises StorageError where the disk has no room for them."""
        super().__init__(device)
        self._dtype = dtype
        self._places: dict[int, tuple[int, tuple[int, ...]]] = {}
        at = 0
        for number, shape in enumerate(shapes):
            self._places[number] = (at, shape)
            at += torch.Size(shape).numel() * dtype.itemsize
        self._file = make_scratch_file(folder, at)
        self._undropped = 0

    def close(self) -> None:
        super().close()
        self._file.close()

    def _load(self, number: int) -> torch.Tensor:
        at, shape = self._places[number]
        host = host_empty(shape, self._dtype, self._is_cuda)
        memory = _bytes_of(host)
        with scratch_failing():
            if read_into(self._file.fileno(), at, memory) < len(memory):
                raise OSError(errno.EIO, "a scratch file ends before what was written to it")
        return host

    def _keep(self, number: int, host: torch.Tensor) -> None:
        at, _ = self._places[number]
        memory, n_written = _bytes_of(host.contiguous()), 0
        with scratch_failing():
            while n_written < len(memory):
                n_written += os.pwritev(self._file.fileno(), [memory[n_written:]], at + n_written)
            self._undropped += len(memory)
            if self._undropped >= _DROPPED:
                drop_from_cache(self._file)
                self._undropped = 0

    def _halve(self, number: int, n_rows: int, other: int) -> None:
        at, (n_all, *rest) = self._places[number]
        row_bytes = torch.Size(rest).numel() * self._dtype.itemsize
        self._places[number] = (at, (n_rows, *rest))
        self._places[other] = (at + n_rows * row_bytes, (n_all - n_rows, *rest))


def _split(streams: dict[int, torch.Tensor], number: int, n_rows: int, other: int) -> None:
    if number in streams:
        stream = streams[number]
        streams[number], streams[other] = stream[:n_rows], stream[n_rows:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memory_of(tensor.view(-1).view(torch.uint8))
