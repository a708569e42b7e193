"""Streams that wait between two blocks: on the device, in host memory and in a file, in the order in which a run puts and gets them."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from harvest.errors import StorageError
from harvest.model.waiting import InFile, InMemory, OnDevice, Waiting
from harvest.scratch import map_scratch

CPU = torch.device("cpu")
Shapes = Sequence[tuple[int, ...]]
Make = Callable[[Path, Shapes, torch.dtype], Waiting]
MAKERS: dict[str, Make] = {
    "device": lambda _folder, _shapes, _dtype: OnDevice(),
    "memory": lambda _folder, _shapes, _dtype: InMemory(CPU),
    "file": lambda folder, shapes, dtype: InFile(folder, shapes, dtype, CPU),
}
SHAPES = [(2, 5, 8), (1, 7, 8), (3, 2, 8), (1, 1, 8)]


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def stream_of(block: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * block + number)
    return torch.randn(shape, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:2], SHAPES[:1]], ids=["four", "two", "alone"])
def test_each_block_is_given_what_the_one_before_put(make: Make, shapes: Shapes, dtype: torch.dtype, tmp_path: Path) -> None:
    with make(tmp_path, shapes, dtype) as waiting:
        for block in range(5):
            for number, shape in enumerate(shapes):
                if block:
                    got = waiting.get(number, (number + 1) % len(shapes))
                    assert got.dtype == dtype
                    assert torch.equal(got, stream_of(block - 1, number, shape, dtype)), (block, number)
                waiting.put(number, stream_of(block, number, shape, dtype))


@pytest.mark.parametrize("at_block", [0, 1, 2])
@pytest.mark.parametrize("split_number", [0, 2])
def test_a_batch_is_made_two_of_at_any_block(make: Make, at_block: int, split_number: int, tmp_path: Path) -> None:
    shapes, order = list(SHAPES), list(range(len(SHAPES)))
    kept = {number: slice(None) for number in order}
    whose = {number: number for number in order}
    with make(tmp_path, shapes, torch.float32) as waiting:
        for block in range(4):
            place = 0
            while place < len(order):
                number = order[place]
                if block:
                    got = waiting.get(number, order[(place + 1) % len(order)])
                    before = stream_of(block - 1, whose[number], SHAPES[whose[number]], torch.float32)[kept[number]]
                    assert torch.equal(got, before), (block, number)
                if (block, number) == (at_block, split_number) and len(order) == len(SHAPES):
                    # It did not fit: its halves are asked for in its place.
                    waiting.split(number, 1, len(SHAPES))
                    order[place : place + 1] = [number, len(SHAPES)]
                    kept |= {number: slice(0, 1), len(SHAPES): slice(1, None)}
                    whose[len(SHAPES)] = number
                    continue
                waiting.put(number, stream_of(block, whose[number], SHAPES[whose[number]], torch.float32)[kept[number]])
                place += 1
        assert len(order) == len(SHAPES) + 1


def test_a_half_is_halved_again(make: Make, tmp_path: Path) -> None:
    shape = (5, 3, 8)
    stream = stream_of(0, 0, shape, torch.float32)
    with make(tmp_path, [shape], torch.float32) as waiting:
        waiting.put(0, stream)
        waiting.split(0, 3, 1)
        waiting.split(0, 2, 2)
        waiting.split(1, 1, 3)
        parts = [waiting.get(number, None) for number in (0, 2, 1, 3)]
    assert [len(part) for part in parts] == [2, 1, 1, 1]
    assert torch.equal(torch.cat(parts), stream)


@pytest.mark.parametrize("where", ["device", "file"])
def test_a_block_may_write_into_what_it_is_given(where: str, tmp_path: Path) -> None:
    stream = stream_of(0, 0, SHAPES[0], torch.float32)
    with MAKERS[where](tmp_path, SHAPES, torch.float32) as waiting:
        waiting.put(0, stream.clone())
        waiting.get(0, None).zero_()
        assert torch.equal(waiting.get(0, None), stream)


def test_a_stream_that_is_not_contiguous(tmp_path: Path) -> None:
    stream = torch.arange(80.0).reshape(8, 5, 2).transpose(0, 2)
    assert not stream.is_contiguous()
    with InFile(tmp_path, [(2, 5, 8)], torch.float32, CPU) as waiting:
        waiting.put(0, stream)
        assert torch.equal(waiting.get(0, None), stream)


def test_more_than_the_cache_is_let_forget_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 256 MiB in a run; here after every second stream.
    monkeypatch.setattr("harvest.model.waiting._DROPPED", 1 << 20)
    shapes = [(1, 1 << 13, 16)] * 5
    with InFile(tmp_path, shapes, torch.float32, CPU) as waiting:
        for block in range(3):
            for number, shape in enumerate(shapes):
                if block:
                    assert torch.equal(waiting.get(number, (number + 1) % 5), stream_of(block - 1, number, shape, torch.float32))
                waiting.put(number, stream_of(block, number, shape, torch.float32))


def test_no_thread_and_no_file_is_left(tmp_path: Path) -> None:
    opened = set(os.listdir("/proc/self/fd"))
    with contextlib.suppress(KeyError), InFile(tmp_path, SHAPES, torch.float32, CPU) as waiting:
        waiting.put(0, stream_of(0, 0, SHAPES[0], torch.float32))
        waiting.get(0, 1)
        assert any(thread.name.startswith("harvest-") for thread in threading.enumerate())
        raise KeyError
    assert not any(thread.name.startswith("harvest-") for thread in threading.enumerate())
    assert set(os.listdir("/proc/self/fd")) == opened
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """The system takes no file of this process that is larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


LARGE = [(4, 1 << 10, 64)] * 2
NO_ROOM = r"scratch: .* cannot take 2,097,152 bytes \({}\); free some space, name another folder, or lower --window-tokens"


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(StorageError, match=NO_ROOM.format("No space left on device")):
        InFile(small_disk, LARGE, torch.float32, CPU)
    with pytest.raises(StorageError, match=NO_ROOM.format("No space left on device")):
        map_scratch(small_disk, 2 << 20)
    assert not list(small_disk.iterdir())
    # What was set aside is free again.
    with InFile(small_disk, [(1, 1 << 10, 128)], torch.float32, CPU):
        pass


def test_a_file_that_may_not_be_so_large(tmp_path: Path) -> None:
    opened, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    with largest_file(1 << 20), pytest.raises(StorageError, match=NO_ROOM.format("File too large")):
        InFile(tmp_path, LARGE, torch.float32, CPU)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == (opened, threads)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"scratch: .*/gone cannot take .* \(No such file or directory\); free some space, name another"):
        InFile(tmp_path / "gone", SHAPES, torch.float32, CPU)


def test_a_disk_that_fails_later_is_said_where_the_stream_is_asked_for(tmp_path: Path) -> None:
    with InFile(tmp_path, LARGE, torch.float32, CPU) as waiting, largest_file(1 << 10):
        waiting.put(0, torch.zeros(LARGE[0]))
        with pytest.raises(StorageError, match=r"scratch: the disk fails \(File too large\); see to it, then run the same command again"):
            waiting.get(0, None)


KILLED = """
import sys, torch
from pathlib import Path
from harvest.model.waiting import InFile
waiting = InFile(Path(sys.argv[1]), [(1, 1024, 1024)], torch.float32, torch.device("cpu"))
waiting.put(0, torch.ones(1, 1024, 1024))
waiting.get(0, None)
print("there", flush=True)
sys.stdin.read()
"""


def test_the_file_is_gone_with_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        held = [entry for entry in Path(f"/proc/{process.pid}/fd").iterdir() if str(tmp_path) in os.readlink(entry)]
        assert [entry.stat().st_size for entry in held] == [4 << 20]
        assert all(entry.stat().st_nlink == 0 for entry in held)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not list(tmp_path.iterdir())


def test_memory_that_is_a_file(tmp_path: Path) -> None:
    memory = map_scratch(tmp_path, 3 << 20)
    assert (memory.dtype, memory.shape, bool(memory.any())) == (np.uint8, (3 << 20,), False)
    memory[:] = 7
    assert int(memory.sum(dtype=np.int64)) == 7 * (3 << 20)
    assert not list(tmp_path.iterdir())
    assert map_scratch(tmp_path, 0).shape == (0,)
