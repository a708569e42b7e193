"""Safetensors files as they are read without the library: all that it writes, and every way in which a file is not whole."""

import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from harvest.errors import ModelError
from harvest.model.checkpoint import OpenFiles, StoredTensor, find_tensors, lay_out, memory_of, new_buffer, read_now

CPU = torch.device("cpu")
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def tensors_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each type, of several shapes, some without a value or without a side."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (), (2, 0, 4), (2, 3, 4)]
    made = {}
    for number, dtype in enumerate(TYPES):
        shape = shapes[number % len(shapes)]
        values = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=draw)
        made[f"{seed}.{number}"] = values.view(dtype).reshape(shape)
    return made


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)}, path, metadata={"format": "pt"})
    return path


def write(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(first: Any, end: Any, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}


def test_every_type_and_shape_of_several_files_is_read_as_it_was_saved(tmp_path: Path) -> None:
    saved, paths = {}, [tmp_path / f"model-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        safetensors.torch.save_file(tensors_of(number), path)
        saved |= tensors_of(number)
    found = find_tensors(map(str, paths))
    assert set(found) == set(saved)
    for name, tensor in read_now(list(found.values())).items():
        assert (tensor.dtype, tensor.shape) == (saved[name].dtype, saved[name].shape)
        assert bytes_of(tensor) == bytes_of(saved[name]), name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file or directory; see that it is there and whole"),
        (lambda path: path.write_bytes(b""), "of 0 bytes, is no safetensors file, or not a whole one; fetch it anew"),
        (lambda path: path.write_bytes(b"abc"), "of 3 bytes, is no safetensors file"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "is no safetensors file"),
        (lambda path: torch.save({"a": torch.zeros(3)}, path), "is no safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has 19\d bytes, where its header says 19\d; it is not whole"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has \d+ bytes, where its header says \d+; it is not whole, or was"),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "of 60 bytes, is no safetensors file, or not a whole one"),
        (lambda path: (path.write_bytes(struct.pack("<Q", 100_000_001)), os.truncate(path, 100_000_100)), "is no safetensors file"),
        (lambda path: write(path, b'{"a": '), "the header of .* cannot be read"),
        (lambda path: write(path, b"\xff\xfe{}"), "the header of .* cannot be read"),
        (lambda path: write(path, b"[" * 100_000), "the header of .* cannot be read"),
        (lambda path: write(path, []), r"the header of .* cannot be read \(it is a list, where an object was expected\)"),
        (lambda path: write(path, {"a": 3}), "says of its tensor a 3, which harvest cannot read"),
        (lambda path: write(path, {"a": {}}), "says of its tensor a {}, which harvest cannot read"),
        (
            lambda path: write(path, {"a": entry(0, 8, dtype="F3")}, b"x" * 8),
            "tensor a .*'F3'.* leave out --weights stream. Types .* BF16,",
        ),
        (lambda path: write(path, {"a": entry(0, 12)}, b"x" * 12), r"gives 12 bytes to its tensor a of shape \[2\]; fetch it anew"),
        (lambda path: write(path, {"a": entry(0, 8, [-1, -2])}, b"x" * 8), "says of its tensor a .* fetch the file anew"),
        (lambda path: write(path, {"a": entry(0, 8, [2.0])}, b"x" * 8), "says of its tensor a"),
        (lambda path: write(path, {"a": entry(-8, 0)}), "says of its tensor a"),
        (lambda path: write(path, {"a": entry("0", "8")}, b"x" * 8), "says of its tensor a"),
        (lambda path: write(path, {"a": entry(8, 0)}, b"x" * 8), r"gives -8 bytes to its tensor a"),
        # Two tensors on one place, and a gap that no tensor fills: the sizes alone are right.
        (lambda path: write(path, {"a": entry(0, 8), "b": entry(0, 8)}, b"x" * 8), r"puts its tensor b at byte \d+, where the one before"),
        (
            lambda path: write(path, {"a": entry(0, 8), "b": entry(16, 24)}, b"x" * 24),
            r"puts its tensor b at byte \d+, where the one before",
        ),
        (lambda path: write(path, {"a": entry(0, 8), "b": entry(8, 16)}, b"x" * 8), "it is not whole, or was changed: fetch it anew"),
    ],
)
def test_a_file_that_is_not_whole_is_named(damage: Callable[[Path], Any], message: str, whole: Path) -> None:
    damage(whole)
    with pytest.raises(ModelError, match=message) as raised:
        find_tensors([whole])
    assert str(whole) in str(raised.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        find_tensors([tmp_path])


def test_a_file_that_shrinks_while_it_is_read(whole: Path) -> None:
    tensors = list(find_tensors([whole]).values())
    files = OpenFiles(tensors)
    os.truncate(whole, whole.stat().st_size - 1)
    with pytest.raises(ModelError, match=rf"{whole} has become shorter while it was read; fetch it anew") as raised:
        files.read(whole, tensors[-1].start, memoryview(bytearray(tensors[-1].n_bytes)))
    assert "run the same command again" in str(raised.value)
    files.close()
    with pytest.raises(ModelError, match="has become shorter"):
        read_now(tensors)


def test_a_file_that_disappears_is_read_where_it_was_open_and_named_where_it_was_not(whole: Path) -> None:
    tensors = list(find_tensors([whole]).values())
    saved = safetensors.torch.load_file(whole)
    files = OpenFiles(tensors)
    whole.unlink()
    for tensor in tensors:
        into = bytearray(tensor.n_bytes)
        files.read(whole, tensor.start, memoryview(into))
        assert bytes(into) == bytes_of(saved[tensor.name])
    files.close()
    with pytest.raises(ModelError, match=rf"{whole} cannot be read: No such file or directory; see that it is there"):
        OpenFiles(tensors)


def test_a_disk_that_fails_while_a_file_is_read(whole: Path) -> None:
    # This process's own memory, at an address where nothing lies.
    broken = StoredTensor("a", Path("/proc/self/mem"), torch.float32, (2,), 0, 8)
    files = OpenFiles([broken])
    with pytest.raises(ModelError, match="/proc/self/mem cannot be read: Input/output error; see that it is there and whole"):
        files.read(broken.path, 0, memoryview(bytearray(8)))
    files.close()


def test_open_files_are_closed_again_where_one_is_gone(whole: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"c": torch.zeros(3)}, tmp_path / "second.safetensors")
    tensors = list(find_tensors([whole, tmp_path / "second.safetensors"]).values())
    (tmp_path / "second.safetensors").unlink()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match=r"second\.safetensors cannot be read"):
        OpenFiles(tensors)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_tensor_begins_where_it_would_in_a_file_that_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors_of() | {f"w{n}": torch.zeros(n + 1, 33) for n in range(40)}, path)
    tensors = find_tensors([path])
    slots, n_bytes = lay_out(tensors.values(), CPU)
    buffer = new_buffer(n_bytes, CPU)
    assert buffer.data_ptr() % 512 == 0 == memory_of(buffer).nbytes - n_bytes
    with safetensors.safe_open(path, "pt", backend="mmap") as mapped:
        for slot in slots:
            if slot.tensor.n_bytes:
                assert slot.view(buffer).data_ptr() % 512 == mapped.get_slice(slot.tensor.name)[...].data_ptr() % 512, slot
    ends = [(slot.at, slot.at + slot.tensor.n_bytes) for slot in slots]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= n_bytes


def test_on_a_card_a_tensor_begins_as_in_memory_of_its_own(tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors_of(), tmp_path / "model.safetensors")
    slots, n_bytes = lay_out(find_tensors([tmp_path / "model.safetensors"]).values(), torch.device("cuda"))
    assert all(slot.at % 512 == 0 for slot in slots)
    assert slots[-1].at + slots[-1].tensor.n_bytes <= n_bytes


def test_values_that_do_not_begin_at_a_multiple_of_their_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = torch.arange(6.0)
    write(path, {"u": entry(0, 3, [3], "U8"), "w": entry(3, 27, [6])}, b"abc" + bytes_of(values))
    assert torch.equal(safetensors.torch.load_file(path)["w"], values)
    assert torch.equal(read_now(list(find_tensors([path]).values()))["w"], values)


def test_an_empty_file_of_tensors_holds_none(tmp_path: Path) -> None:
    safetensors.torch.save_file({}, tmp_path / "model.safetensors")
    assert find_tensors([tmp_path / "model.safetensors"]) == {}
    assert read_now([]) == {}
