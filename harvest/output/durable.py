"""Every rename and fsync of harvest: a file is either not there, or there as a whole and on the disk.

Written beside its place under a temporary name, flushed to the disk, renamed, and the folder's entry flushed too. A reader, and a run
that goes on after a power cut, never meets half a file under a final name.
"""

import errno
import hashlib
import itertools
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from harvest.errors import StorageError
from harvest.output.process import owner_id

_TEMPORARY = ".tmp-"
_count = itertools.count()
# Large enough that a small entry costs no system call of its own; a chunk goes through as it is.
_BUFFER_BYTES = 1 << 20


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a StorageError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "free some space, or choose another folder",
            errno.EDQUOT: "your quota is used up; free some space, or choose another folder",
            errno.EFBIG: "the file is larger than the system allows; raise the limit (ulimit -f), or lower --shard-size",
            errno.EACCES: "choose a folder that you may write to",
            errno.EPERM: "choose a folder that you may write to",
            errno.EROFS: "choose a folder that you may write to",
            errno.EMFILE: "raise the limit of open files (ulimit -n), then run the same command again",
            errno.ENFILE: "close other programs, or ask who runs this machine for more open files",
            errno.ENOENT: "check that the disk is there, then run the same command again",
            errno.ESTALE: "check that the disk is there, then run the same command again",
            errno.ENAMETOOLONG: "choose a shorter name",
        }.get(error.errno or 0, "check the path, then run the same command again")
        raise StorageError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing."""
    with storing(path):
        path.mkdir(parents=True, exist_ok=True)


def temporary_name(path: Path) -> Path:
    """A name beside `path` to write it under, which no other process of any machine and no other thread uses."""
    return path.with_name(f"{path.name.split('.')[0]}{_TEMPORARY}{owner_id()}-{next(_count)}{''.join(path.suffixes)}")


def partial_name(path: Path) -> Path:
    """The name beside `path` under which it grows over several processes, one after the other: what one left, the next goes on with."""
    return path.with_name(f"{path.name.split('.')[0]}{_TEMPORARY}part{''.join(path.suffixes)}")


def is_temporary(path: Path) -> bool:
    """Whether a file is being written, or a leftover of a process that ended while it wrote."""
    return _TEMPORARY in path.name


def is_temporary_of(path: Path, owners: Collection[str]) -> bool:
    """Whether a file is being written by one of these processes, by `harvest.output.process.owner_id`."""
    return any(f"{_TEMPORARY}{owner}-" in path.name for owner in owners)


def open_new(temporary: Path) -> BinaryIO:
    """Open a new file to be published later."""
    return open(temporary, "xb", buffering=_BUFFER_BYTES)


def open_grown(partial: Path) -> BinaryIO:
    """Open what there is of a file to add to it, or a new one where there is nothing."""
    return open(partial, "a+b", buffering=_BUFFER_BYTES)


def flush(file: BinaryIO) -> None:
    """Have the disk take what was written."""
    file.flush()
    os.fsync(file.fileno())


def publish(file: BinaryIO, temporary: Path, final: Path) -> None:
    """Flush a written file to the disk, close it, and give it its final name."""
    flush(file)
    file.close()
    os.replace(temporary, final)
    _sync_folder(final.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a small file in one step."""
    temporary = temporary_name(path)
    try:
        with storing(path), open_new(temporary) as file:
            file.write(data)
            publish(file, temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A new file that is published as `path` when the context ends well, and else is gone. `storing` is the caller's, at each write."""
    temporary = temporary_name(path)
    with storing(path):
        file = open_new(temporary)
    try:
        yield file
        with storing(path):
            publish(file, temporary, path)
    except BaseException:
        _close(file)
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def growing(path: Path) -> Iterator[BinaryIO]:
    """What there is of a file that becomes `path`, to be added to; published when the context ends well, and else kept as it is.

    `storing` is the caller's, at each write. One process at a time.
    """
    partial = partial_name(path)
    with storing(path):
        file = open_grown(partial)
    try:
        yield file
        with storing(path):
            publish(file, partial, path)
    except BaseException:
        _close(file)
        raise


def write_new(path: Path, data: bytes) -> bool:
    """Write a small file in one step where there is none of that name; answers whether it did. Of two processes only one does."""
    temporary = temporary_name(path)
    try:
        with storing(path), open_new(temporary) as file:
            file.write(data)
            flush(file)
            if not _link(temporary, path, data):
                return False
            _sync_folder(path.parent)
            return True
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path, data: bytes) -> bool:
    """Give a written file a name that nobody has yet; answers whether it did."""
    try:
        # A link fails where the name is taken, over NFS too; a rename would replace what is there.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # Some file systems have no links. An exclusive creation is the next best: for a moment the file is there and empty.
        try:
            with open(path, "xb") as file:
                file.write(data)
                flush(file)
        except FileExistsError:
            return False
    return True


def remove(path: Path) -> None:
    """Remove a file, and see to it that it is gone after a power cut too."""
    with storing(path):
        path.unlink(missing_ok=True)
        _sync_folder(path.parent)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with storing(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _close(file: BinaryIO) -> None:
    """Close a file that something went wrong with: what the disk would not take before, it will not take now."""
    with suppress(OSError):
        file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
