"""Bytes on their way to an object store, and back: the digests of a file that goes up in parts, and an object read as a file."""

import hashlib
import io
from collections.abc import Callable
from typing import Any

# Read at once: from the end of a file, where a ZIP file's directory stands, less of one that is small.
_READ_BYTES = 4 << 20
_SHORTEST_TAIL = 64 << 10


class ObjectFile(io.RawIOBase):
    """An object as a file that is read from anywhere: its end comes with the first read, since what is asked for mostly stands there."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int) -> None:
        """read_range: answers the object's bytes from one place to another. size: of the whole object."""
        self._read_range, self._size = read_range, size
        self._at = 0
        self._start, self._data = size, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        if not self._start <= self._at < self._start + len(self._data):
            tail_bytes = min(max(self._size // 128, _SHORTEST_TAIL), _READ_BYTES)
            self._start = self._at if self._data else min(self._at, max(self._size - tail_bytes, 0))
            self._data = self._read_range(self._start, min(self._start + _READ_BYTES, self._size))
        piece = self._data[self._at - self._start :][: len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


class Digests:
    """Of bytes that go by in parts: the SHA-256 of all, and the ETags that S3 gives them, uploaded in one piece or in these parts."""

    def __init__(self) -> None:
        self._sha256, self._md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []

    def add(self, block: bytes) -> None:
        self._sha256.update(block)
        self._md5.update(block)
        self._parts.append(hashlib.md5(block, usedforsecurity=False).digest())

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def e_tags(self) -> tuple[str, str]:
        of_parts = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        return self._md5.hexdigest(), f"{of_parts}-{len(self._parts)}"
