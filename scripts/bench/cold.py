"""Files and the system's cache: their pages counted in it, dropped from it, and kept to a share of it. Linux only."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from watch import Looking

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


class Short(Looking):
    """Keeps files from taking more than so many bytes of the cache, until the end of the context, as a machine with less memory would.

    Looked at every 50 ms; then what has longest taken in nothing new is dropped first, a whole file at a time. What a process has mapped
    and touched stays, as it does where memory is short and the process goes on using it.
    """

    def __init__(self, paths: Sequence[Path], most_bytes: int) -> None:
        super().__init__(_EVERY_S)
        self._most_pages = most_bytes // mmap.PAGESIZE
        self._pages = dict.fromkeys(paths, 0)
        self._grown_at = dict.fromkeys(paths, 0.0)

    def look(self) -> bool:
        """Count, and drop what is too much."""
        for path, before in self._pages.items():
            self._pages[path] = int(_cached_pages(path).sum())
            if self._pages[path] > before:
                self._grown_at[path] = time.monotonic()
        for path in sorted(self._pages, key=self._grown_at.__getitem__):
            if sum(self._pages.values()) <= self._most_pages:
                break
            drop([path])
            self._pages[path] = int(_cached_pages(path).sum())
        return True
