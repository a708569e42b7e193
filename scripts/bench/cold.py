"""Files and the system's cache: their pages dropped from it, once or all the while, and counted in it. Linux only."""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

_EVERY_S = 0.05


def flush(paths: Sequence[Path]) -> None:
    """See files onto the disk: a page that is not there yet cannot be dropped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop(paths: Sequence[Path]) -> None:
    """Drop files' pages from the cache, but those that a process has mapped and touched."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(paths: Sequence[Path]) -> float:
    """How much of files, which are not empty, is in the cache: from 0 to 1. Raises OSError where the system does not say."""
    pages = np.concatenate([_cached_pages(path) for path in paths])
    return float(pages.mean())


def _cached_pages(path: Path) -> npt.NDArray[np.uint8]:
    """1 for each page of a file that is in the cache, and else 0. Mapping a file reads nothing of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        place = np.frombuffer(mapped, dtype=np.uint8)
        done = libc.mincore(ctypes.c_void_p(place.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data))
        # The mapping cannot be closed while an array stands on it.
        del place
    if done:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    # The other bits of each byte mean nothing.
    return pages & np.uint8(1)


class Dropping:
    """Drops files' pages every 50 ms until the end of the context: what a process has read, and mapped no longer, it reads anew."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._drop, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _drop(self) -> None:
        while not self._ended.wait(_EVERY_S):
            drop(self._paths)
