"""A checkpoint's safetensors files: where each tensor stands in them, and its bytes read from there.

The files are seen to be whole before anything else: a file that a download left short would else be found out hours later, when its
block's turn comes. Format: eight bytes of length, so many bytes of JSON, then the tensors end to end, each by its offsets in that part
(the safetensors README).
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harvest.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The safetensors library takes no longer header.
_LONGEST_HEADER = 100_000_000
# Where memory of a card begins, and, as far as any kernel looks, a page of a file in memory.
_ALIGNMENT = 512


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: n_bytes from byte `start` of its file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    n_bytes: int


@dataclass(frozen=True)
class Slot:
    """Where a tensor's bytes go in a buffer for several."""

    tensor: StoredTensor
    at: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, once its bytes stand in the buffer, uint8 [n]."""
        return buffer[self.at : self.at + self.tensor.n_bytes].view(self.tensor.dtype).view(self.tensor.shape)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host, uint8 [n]."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def find_tensors(paths: Iterable[str | Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, by name. Raises ModelError that names the file where one is not whole, or is none."""
    found: dict[str, StoredTensor] = {}
    for path in map(Path, paths):
        found |= _read_header(path)
    return found


def lay_out(tensors: Iterable[StoredTensor], device: torch.device) -> tuple[list[Slot], int]:
    """Places for tensors in one buffer of `new_buffer`, in the order of the files; and the buffer's bytes.

    A tensor begins as it does where a whole model is loaded: on a CPU that is in the file itself, mapped into memory, and on a card in
    memory of its own. Kernels choose their way by it, and may round otherwise: seen with mixtures of experts on a CPU. Only where its
    place in the file does not suit its type, as other writers than safetensors' own may leave it, it begins as on a card.
    """
    slots, at = [], 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.path, tensor.start)):
        is_as_mapped = device.type == "cpu" and tensor.start % tensor.dtype.itemsize == 0
        begin = at + (tensor.start % _ALIGNMENT if is_as_mapped else 0)
        slots.append(Slot(tensor, begin))
        at = -(-(begin + tensor.n_bytes) // _ALIGNMENT) * _ALIGNMENT
    return slots, at


def lay_out_copies(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Places for copies of tensors in one buffer of `new_buffer`, each aligned as it is now; and the buffer's bytes."""
    places, at = [], 0
    for tensor in tensors:
        places.append(at + tensor.data_ptr() % _ALIGNMENT)
        at = -(-(places[-1] + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return places, at


def new_buffer(n_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory for so many bytes, uint8 [n], that begins where a page could."""
    memory = torch.empty(n_bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    skipped = -memory.data_ptr() % _ALIGNMENT
    return memory[skipped : skipped + n_bytes]


def read_into(descriptor: int, start: int, into: memoryview) -> int:
    """Fill a piece of memory from byte `start` of an open file; answers how many bytes there were. Raises OSError."""
    n_read = 0
    while n_read < len(into) and (step := os.preadv(descriptor, [into[n_read:]], start + n_read)):
        n_read += step
    return n_read


class OpenFiles:
    """Files held open for reading at any place, from several threads. A context manager."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        """Raises ModelError where a file is gone."""
        self._descriptors: dict[Path, int] = {}
        for path in sorted({tensor.path for tensor in tensors}):
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                self.close()
                raise _unreadable(path, error) from error

    def read(self, path: Path, start: int, into: memoryview) -> None:
        """Fill a piece of memory from byte `start` of a file. Raises ModelError where the file ends before, or the disk fails."""
        try:
            n_read = read_into(self._descriptors[path], start, into)
        except OSError as error:
            raise _unreadable(path, error) from error
        if n_read < len(into):
            raise ModelError(f"model: {path} has become shorter while it was read; fetch it anew and run the same command again")

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_now(tensors: Sequence[StoredTensor]) -> dict[str, torch.Tensor]:
    """The tensors themselves, in host memory, by name."""
    cpu = torch.device("cpu")
    slots, n_bytes = lay_out(tensors, cpu)
    buffer = new_buffer(n_bytes, cpu)
    memory = memory_of(buffer)
    files = OpenFiles(tensors)
    try:
        for slot in slots:
            files.read(slot.tensor.path, slot.tensor.start, memory[slot.at : slot.at + slot.tensor.n_bytes])
    finally:
        files.close()
    return {slot.tensor.name: slot.view(buffer) for slot in slots}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            n_header = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 2 <= n_header <= min(_LONGEST_HEADER, size - 8):
                raise ModelError(f"model: {path}, of {size:,} bytes, is no safetensors file, or not a whole one; fetch it anew")
            header = json.loads(file.read(n_header))
            if not isinstance(header, dict):
                raise ValueError(f"it is a {type(header).__name__}, where an object was expected")
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model: the header of {path} cannot be read ({error}); fetch the file anew") from error
    begin = 8 + n_header
    found = {name: _entry(name, entry, path, begin) for name, entry in header.items() if name != "__metadata__"}
    end = begin
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.start, tensor.n_bytes)):
        if tensor.start != end:
            raise ModelError(
                f"model: the header of {path} puts its tensor {tensor.name} at byte {tensor.start:,}, where the one before ends at "
                f"{end:,}; fetch the file anew"
            )
        end += tensor.n_bytes
    if end != size:
        raise ModelError(
            f"model: {path} has {size:,} bytes, where its header says {end:,}; it is not whole, or was changed: fetch it anew, "
            "and run the same command again"
        )
    return found


def _entry(name: str, entry: Mapping[str, Any], path: Path, begin: int) -> StoredTensor:
    try:
        dtype, shape, (first, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, end)):
            raise ValueError("sizes and places are whole numbers from 0")
        tensor = StoredTensor(name, path, dtype, shape, begin + first, end - first)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"model: {path} says of its tensor {name} {entry}, which harvest cannot read a block at a time; fetch the file anew where it "
            f"is damaged, and else leave out --weights stream. Types that can be read: {', '.join(_DTYPES)}"
        ) from error
    if tensor.n_bytes != math.prod(shape) * dtype.itemsize:
        raise ModelError(f"model: {path} gives {tensor.n_bytes:,} bytes to its tensor {name} of shape {list(shape)}; fetch it anew")
    return tensor


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"model: {path} cannot be read: {error.strerror}; see that it is there and whole, then run the same command again")
