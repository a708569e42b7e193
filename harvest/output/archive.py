"""A ZIP file written from front to back: stored entries, no name twice, nothing rewritten.

Python's zipfile seeks back to each local header to fill in the checksum and computes that checksum itself, one entry after the other.
Here the checksum comes with the entry, from whichever thread encoded it, and the file is one stream whose SHA-256 grows as it is
written. Entries stay under 4 GiB (a chunk has 4 MiB); the file and the number of entries may be of any size (ZIP64).

Layout: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (ends) and 4.5.3 (ZIP64).
"""

import hashlib
import struct
import zlib
from typing import Any, BinaryIO

from harvest.errors import StorageError

_UTF8_NAME = 1 << 11
_VERSION, _VERSION_ZIP64 = 20, 45
_EARLIEST_DATE = (0 << 9) | (1 << 5) | 1  # 1980-01-01: a fixed time, so that equal data make equal files
_REGULAR_FILE = (0o100644 << 16) & 0xFFFFFFFF
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF


class Archive:
    """Appends entries to an open file. `close` writes the central directory; the file itself stays the caller's."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._names: set[str] = set()
        self._directory: list[bytes] = []
        self.n_bytes = 0

    @property
    def sha256(self) -> str:
        """The digest of all bytes written so far."""
        return self._hash.hexdigest()

    def add(self, name: str, data: Any, crc: int | None = None) -> None:
        """Append one entry of bytes-like `data`; `crc` is its CRC-32 where the caller has it already. Raises StorageError."""
        size = memoryview(data).nbytes
        if name in self._names or size >= _MAX_32:
            raise StorageError(f"the entry {name} ({size} bytes) is in the archive already, or over 4 GiB")
        self._names.add(name)
        raw_name = name.encode()
        crc = zlib.crc32(data) if crc is None else crc
        offset = self.n_bytes
        needs_zip64 = offset >= _MAX_32
        fields = (_UTF8_NAME, 0, 0, _EARLIEST_DATE, crc, size, size, len(raw_name))
        self._write(struct.pack("<4s5H3L2H", b"PK\x03\x04", _VERSION, *fields, 0) + raw_name)
        self._write(data)
        extra = struct.pack("<HHQ", 1, 8, offset) if needs_zip64 else b""
        version = _VERSION_ZIP64 if needs_zip64 else _VERSION
        made_by_unix = (3 << 8) | version
        tail = (len(extra), 0, 0, 0, _REGULAR_FILE, min(offset, _MAX_32))
        self._directory.append(struct.pack("<4s6H3L5H2L", b"PK\x01\x02", made_by_unix, version, *fields, *tail) + raw_name + extra)

    def close(self) -> None:
        """Append the central directory. Nothing may be added afterwards."""
        offset = self.n_bytes
        for entry in self._directory:
            self._write(entry)
        size, count = self.n_bytes - offset, len(self._directory)
        if offset >= _MAX_32 or size >= _MAX_32 or count >= _MAX_16:
            zip64_end = self.n_bytes
            versions = ((3 << 8) | _VERSION_ZIP64, _VERSION_ZIP64)
            self._write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, *versions, 0, 0, count, count, size, offset))
            self._write(struct.pack("<4sLQL", b"PK\x06\x07", 0, zip64_end, 1))
        counts = (min(count, _MAX_16),) * 2
        self._write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *counts, min(size, _MAX_32), min(offset, _MAX_32), 0))

    def _write(self, data: Any) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.n_bytes += memoryview(data).nbytes
