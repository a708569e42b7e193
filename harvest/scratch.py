"""Files for what does not fit in memory while a run works. They have no name, so they are gone with the process however it ends."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harvest.errors import StorageError


def make_scratch_file(folder: Path, n_bytes: int) -> Any:
    """A file of so many bytes, which the disk has set aside. Raises StorageError where it has no room for them."""
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            if n_bytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, n_bytes)
            else:
                file.truncate(n_bytes)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise StorageError(
            f"scratch: {folder} cannot take {n_bytes:,} bytes ({error.strerror}); free some space, name another folder, or lower "
            "--window-tokens"
        ) from error
    return file


def map_scratch(folder: Path, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of so many bytes that is such a file: uint8 [n]. Raises StorageError where the disk has no room for them."""
    with make_scratch_file(folder, max(n_bytes, 1)) as file:
        return np.memmap(file, dtype=np.uint8, mode="r+", shape=(max(n_bytes, 1),))[:n_bytes]


def drop_from_cache(file: Any) -> None:
    """See a file's bytes to the disk, and let the system's cache forget them: they are not wanted soon."""
    if hasattr(os, "posix_fadvise"):
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def scratch_failing() -> Iterator[None]:
    """An error of the disk while a scratch file is read or written becomes a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"scratch: the disk fails ({error.strerror}); see to it, then run the same command again") from error
