"""The threads that write shards while the model computes, and the window buffers that bound how far they may fall behind.

    model thread        WindowBuffers.acquire -> fill -> Writers.submit, a piece of a shard at a time
    publisher threads   take pieces in order: encode, append, and where the shard is whole publish it and its record
    encoder threads     encode chunks, and sum them for the stats

A window's buffer is free again when all its pieces are written. Two buffers share the byte budget, so one window fills while the one
before is written; where storage is slower than the model, the model waits for a buffer, and memory stays bounded.
"""

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from harvest.input.plan import Piece, Window
from harvest.input.tokens import Tokens
from harvest.model.device import host_empty
from harvest.output.folder import RunFolder
from harvest.output.layout import ShardLayout
from harvest.output.record import Fingerprint
from harvest.output.shard import ShardFile
from harvest.scratch import map_scratch

# While one publisher waits for the disk to flush a shard, the other writes the next.
_PUBLISHERS = 2
# A core encodes lz4 at over 1 GB/s, and a disk seldom takes more than a few of those.
_MAX_ENCODERS = 8
_WAIT_S = 0.2


def buffer_sizes(windows: Sequence[Window], layout: ShardLayout, window_bytes: int | None) -> tuple[int, int]:
    """How many buffers the rows of windows take, and the bytes of each. window_bytes: for all of them; None where two have room."""
    largest = max((window.n_tokens for window in windows), default=0) * layout.token_bytes
    return (2 if (window_bytes is None or 2 * largest <= window_bytes) and len(windows) > 1 else 1), largest


class WindowBuffers:
    """Memory for the captured rows of one window each; two where both fit the budget, else one."""

    def __init__(
        self,
        windows: Sequence[Window],
        layout: ShardLayout,
        window_bytes: int | None,
        scratch: Path | None = None,
        pinned: bool = False,
    ) -> None:
        """For window_bytes see `buffer_sizes`. scratch: a folder in which the buffers are files, mapped into memory; or None.

        pinned: pin the memory if the system allows it, so that a card copies into it without the host's help. `lacks_pinned` tells if it
        does not. Raises StorageError if the folder's disk has no room for the buffers.
        """
        count, largest = buffer_sizes(windows, layout, window_bytes)
        self._layout = layout
        self._free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        self.lacks_pinned = False
        for _ in range(count):
            if scratch is not None:
                self._free.put(map_scratch(scratch, largest))
                continue
            # Pageable memory is left untouched here: the system provides its pages as rows arrive.
            memory = host_empty([largest], torch.uint8, pinned)
            self.lacks_pinned = self.lacks_pinned or (pinned and not memory.is_pinned())
            self._free.put(memory.numpy())

    @property
    def has_free(self) -> bool:
        """Whether `acquire` would return at once."""
        return not self._free.empty()

    def acquire(self, n_tokens: int, check: Callable[[], None]) -> "WindowBuffer":
        """Wait for a free buffer; `check` is called now and then, and raises to give up waiting."""
        while True:
            check()
            try:
                memory = self._free.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            layout = self._layout
            rows = memory[: n_tokens * layout.token_bytes].view(layout.numpy_dtype)
            return WindowBuffer(rows.reshape(len(layout.layers), n_tokens, layout.width), functools.partial(self._free.put, memory))


class WindowBuffer:
    """The rows of one window, [layer, token, width] in the stored type; goes back when each of its pieces was released."""

    def __init__(self, rows_LTW: npt.NDArray[Any], give_back: Callable[[], None]) -> None:
        self.rows_LTW = rows_LTW
        self._give_back = give_back
        self._lock = threading.Lock()
        self._n_held = 1

    def hold(self) -> None:
        """Count one more user."""
        with self._lock:
            self._n_held += 1

    def release(self) -> None:
        """Count one user less; the last gives the memory back."""
        with self._lock:
            self._n_held -= 1
            is_last = self._n_held == 0
        if is_last:
            self._give_back()


@dataclass(frozen=True)
class _Job:
    piece: Piece
    buffer: WindowBuffer


class Writers:
    """Writes the pieces of shards in threads of its own. A context manager: at its end all that was submitted is written.

    busy_s: seconds that publishers spent, encoding included, added up over them.
    """

    def __init__(
        self,
        folder: RunFolder,
        layout: ShardLayout,
        tokens: Tokens,
        fingerprint: Fingerprint,
        on_published: Callable[[int], None],
    ) -> None:
        """`on_published` is called with a shard's bytes when it is whole, one call at a time."""
        self._folder = folder
        self._layout = layout
        self._tokens = tokens
        self._fingerprint = fingerprint
        self._on_published = on_published
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.busy_s = 0.0
        n_encoders = min(os.cpu_count() or 1, _MAX_ENCODERS)
        self._encoders = ThreadPoolExecutor(n_encoders, thread_name_prefix="harvest-encode")
        self._n_begun = 0
        self._lowered: dict[int, int] = {}
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in range(_PUBLISHERS)]
        self._threads = [
            threading.Thread(target=self._publish_all, args=(jobs,), name=f"harvest-publish-{number}", daemon=True)
            for number, jobs in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for jobs in self._queues:
            jobs.put(None)
        try:
            for thread in self._threads:
                thread.join()
        except BaseException as interruption:
            # A second Ctrl-C: what has not been begun is left undone.
            self._error = self._error or interruption
            raise
        self._encoders.shutdown()
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise the error that stopped the writers, where one did."""
        if self._error is not None:
            raise self._error

    def submit(self, window: Window, buffer: WindowBuffer, skip: Callable[[int], bool], lowered: int | None = None) -> None:
        """Hand over a window whose rows are all in place; pieces of shards that `skip` names are left out.

        lowered: the batch budget that the window came down to for lack of memory, which is kept in the records of its shards.
        """
        self.check()
        for piece in window.pieces:
            if not skip(piece.shard.index):
                if lowered is not None:
                    with self._lock:
                        self._lowered[piece.shard.index] = min(lowered, self._lowered.get(piece.shard.index, lowered))
                buffer.hold()
                # A shard's pieces follow one another, and all go to one publisher, which appends them in order.
                self._n_begun += piece.first == piece.shard.first
                self._queues[self._n_begun % _PUBLISHERS].put(_Job(piece, buffer))
        buffer.release()

    def _publish_all(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        shard: ShardFile | None = None
        while (job := jobs.get()) is not None:
            try:
                if self._error is None:
                    started = time.monotonic()
                    shard = self._write(job, shard)
                    with self._lock:
                        self.busy_s += time.monotonic() - started
            except BaseException as error:
                # A thread has nobody to raise to: the model thread finds the error at its next step.
                self._error = self._error or error
            finally:
                job.buffer.release()
        if shard is not None:
            shard.abandon()

    def _write(self, job: _Job, shard: ShardFile | None) -> ShardFile | None:
        """Append a piece to its shard, opened with its first piece; answers the shard where it is not whole yet."""
        piece = job.piece
        if shard is None:
            shard = self._open(piece)
        try:
            shard.append(job.buffer.rows_LTW[:, piece.row : piece.row + piece.n_tokens])
            if not piece.is_last:
                return shard
            shard.publish()
        except BaseException:
            shard.abandon()
            raise
        prompts = (piece.shard.first, piece.shard.end)
        with self._lock:
            lowered = self._lowered.pop(piece.shard.index, None)
        self._folder.write_record(
            piece.shard.index, self._fingerprint, prompts, piece.shard.n_tokens, shard.sha256, shard.nonfinite, lowered
        )
        with self._lock:
            self._on_published(shard.n_bytes)
        return None

    def _open(self, piece: Piece) -> ShardFile:
        first, end = piece.shard.first, piece.shard.end
        self._folder.make_room()
        return ShardFile(
            self._folder.shard(piece.shard.index),
            self._layout,
            token_ids=self._tokens.ids[self._tokens.offsets[first] : self._tokens.offsets[end]],
            prompt_lengths=self._tokens.lengths[first:end],
            first_prompt=first,
            encoders=self._encoders,
        )
