"""Where one layer's chunks stand in a shard's file, so that each is read without a look at the file's directory, nor at Zarr's documents.

Opening a shard takes about as long as decoding one chunk, and longer the more entries it has: who reads chunks in random order keeps these
places instead, 24 bytes a chunk.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import NotARunError

# A ZIP entry's local header ends with the lengths of two fields that stand between it and the data.
_HEADER_BYTES = 30
_BLOSC = numcodecs.Blosc()


@dataclass(frozen=True)
class StoredLayer:
    """The places of one layer's chunks in the file at `path`.

    headers, sizes, checksums: int64 [chunk], of the ZIP entries: where the local header begins, the bytes of the data, their CRC-32.
    ids_header: the local header of the ids of all tokens, int32, which stand there as they are.
    chunk_tokens: rows of a chunk, the last one filled up.
    is_blosc: whether the chunks are compressed, all by blosc, or none is.
    """

    path: Path
    headers: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.int64]
    ids_header: int
    chunk_tokens: int
    is_blosc: bool

    def read(self, number: int, rows_TW: torch.Tensor) -> None:
        """Read a chunk into `rows_TW`, [chunk_tokens, W]. Raises NotARunError where the file is damaged."""
        into = _bytes_of(rows_TW)
        data: Any = np.empty(int(self.sizes[number]), dtype=np.uint8) if self.is_blosc else into
        self._fill(int(self.headers[number]), 0, data)
        if len(data) != self.sizes[number] or zlib.crc32(data) != self.checksums[number]:
            raise NotARunError(f"{self.path}: is damaged: the checksum of chunk {number} of a layer differs; see harvest verify")
        if self.is_blosc:
            try:
                _BLOSC.decode(data, out=into)
            except (RuntimeError, ValueError) as error:
                raise NotARunError(f"{self.path}: chunk {number} of a layer cannot be decoded ({error}); see harvest verify") from error

    def read_ids(self, start: int, ids_T: torch.Tensor) -> None:
        """Read the ids of the tokens from `start` on into `ids_T`, int32 [T]. Raises NotARunError where the file is damaged."""
        self._fill(self.ids_header, start * ids_T.element_size(), _bytes_of(ids_T))

    def _fill(self, header: int, skipped: int, into: Any) -> None:
        """Fill `into` with the data after a local header, without the first `skipped` bytes."""
        try:
            with open(self.path, "rb") as file:
                file.seek(header)
                fields = file.read(_HEADER_BYTES)
                between = int.from_bytes(fields[26:28], "little") + int.from_bytes(fields[28:30], "little")
                file.seek(between + skipped, 1)
                n_read = file.readinto(into)
        except OSError as error:
            raise NotARunError(f"{self.path}: cannot be read ({error})") from error
        if n_read != len(into):
            raise NotARunError(f"{self.path}: is damaged: it ends too early; see harvest verify")


def find_stored(path: Path, rows: Any, position: int) -> StoredLayer | None:
    """The places of a layer's chunks, or None in a file that another tool packed in a way of its own.

    rows: the shard's Zarr array [layer, token, value]. Raises KeyError where the file lacks a chunk, and what zipfile raises.
    """
    with zipfile.ZipFile(path) as archive:
        entries = [archive.getinfo(f"{rows.basename}/c/{position}/{number}/0") for number in range(rows.cdata_shape[1])]
        ids = archive.getinfo("token_ids/c/0")
    codecs: Sequence[str] = [codec.to_dict()["name"] for codec in rows.compressors]
    if codecs not in ([], ["blosc"]) or any(entry.compress_type != zipfile.ZIP_STORED for entry in (ids, *entries)):
        return None
    headers, sizes, checksums = np.array([(entry.header_offset, entry.file_size, entry.CRC) for entry in entries], dtype=np.int64).T
    return StoredLayer(path, headers, sizes, checksums, ids.header_offset, rows.chunks[1], bool(codecs))


def _bytes_of(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's memory, as a numpy array of bytes."""
    return tensor.view(torch.uint8).reshape(-1).numpy()
