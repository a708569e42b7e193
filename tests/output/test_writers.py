"""The threads that write: order, bounded memory while storage is slow, and errors that reach the model's thread."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harvest.errors import StorageError
from harvest.input.plan import Plan, make_plan
from harvest.input.tokens import Tokens
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.layout import ShardLayout
from harvest.output.record import Record
from harvest.output.shard import ShardFile
from harvest.output.writers import WindowBuffers, Writers
from harvest.reading.shard import open_shard

LAYOUT = ShardLayout("activations", (0, 3), 16, "float32", "none", {"model": "test"})
LENGTHS = np.array([5, 1, 9, 30, 2, 2, 2, 7, 40, 3, 3, 8])


def make(tmp_path: Path, shard_size: int, window_tokens: int) -> tuple[RunFolder, Tokens, Plan]:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    tokens = Tokens(np.arange(offsets[-1], dtype=np.int32), offsets, None, [], [])
    plan = make_plan(LENGTHS, shard_size, LAYOUT.token_bytes, 2 * window_tokens * LAYOUT.token_bytes, 1000)
    return folder, tokens, plan


def row_values(first: int, n_tokens: int) -> Any:
    """Rows that tell their place: token t of layer l holds 1000 l + t."""
    return np.arange(first, first + n_tokens)[None, :, None] + 1000 * np.arange(2)[:, None, None] + np.zeros(16)


def write_all(folder: RunFolder, tokens: Tokens, plan: Plan, published: list[int] | None = None) -> None:
    buffers = WindowBuffers(plan.windows, LAYOUT, 2 * max(window.n_tokens for window in plan.windows) * LAYOUT.token_bytes)
    with Writers(folder, LAYOUT, tokens, {"request": "test"}, (published if published is not None else []).append) as writers:
        for window in plan.windows:
            buffer = buffers.acquire(window.n_tokens, writers.check)
            buffer.rows_LTW[:] = row_values(int(tokens.offsets[window.first]), window.n_tokens)
            writers.submit(window, buffer, lambda shard: False)


@pytest.mark.parametrize(("shard_size", "window_tokens"), [(1, 200), (3, 50), (5, 20), (12, 25), (4, 1), (12, 200)])
def test_every_row_comes_to_its_place(shard_size: int, window_tokens: int, tmp_path: Path) -> None:
    folder, tokens, plan = make(tmp_path, shard_size, window_tokens)
    published: list[int] = []
    write_all(folder, tokens, plan, published)
    for shard in plan.shards:
        record = Record.read(folder.record(shard.index))
        assert record is not None
        assert (record.tokens, record.prompts) == (shard.n_tokens, (shard.first, shard.end))
        assert record.bytes == folder.shard(shard.index).stat().st_size
        assert record.sha256 == durable.file_sha256(folder.shard(shard.index))
        with open_shard(folder.shard(shard.index)) as opened:
            for prompt in range(shard.first, shard.end):
                expected = row_values(int(tokens.offsets[prompt]), int(LENGTHS[prompt]))
                assert np.array_equal(opened[f"prompt_{prompt}"].numpy(), expected)
    assert sorted(published) == sorted(folder.shard(shard.index).stat().st_size for shard in plan.shards)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that flushes nothing before the event is set."""
    may_flush = threading.Event()
    flush = durable.os.fsync
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: (may_flush.wait(), flush(descriptor)))
    return may_flush


def test_the_model_waits_for_slow_storage_and_no_third_window_is_in_memory(slow_disk: threading.Event, tmp_path: Path) -> None:
    folder, tokens, plan = make(tmp_path, 1, 40)
    buffers = WindowBuffers(plan.windows, LAYOUT, 2 * 40 * LAYOUT.token_bytes)
    begun: list[int] = []

    def model() -> None:
        with Writers(folder, LAYOUT, tokens, {}, lambda n_bytes: None) as writers:
            for window in plan.windows:
                buffer = buffers.acquire(window.n_tokens, writers.check)
                begun.append(window.index)
                buffer.rows_LTW[:] = 0
                writers.submit(window, buffer, lambda shard: False)

    thread = threading.Thread(target=model)
    thread.start()
    deadline = time.monotonic() + 10
    while len(begun) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.join(timeout=1.0)
    assert begun == [0, 1], "the third window has to wait until a buffer is free"
    slow_disk.set()
    thread.join(timeout=30)
    assert begun == [window.index for window in plan.windows]
    assert len(plan.windows) > 3


class BoomError(Exception):
    pass


@pytest.fixture(params=["encoder", "publisher"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one of the writers' threads, in the midst of the run."""
    calls = iter(range(1000))
    name = "_encode_chunk" if request.param == "encoder" else "publish"
    working = getattr(ShardFile, name)

    def breaks(self: ShardFile, *arguments: Any) -> Any:
        if next(calls) == 3:
            raise BoomError
        return working(self, *arguments)

    monkeypatch.setattr(ShardFile, name, breaks)


@pytest.mark.usefixtures("broken")
@pytest.mark.timeout(60)
def test_an_error_in_a_thread_ends_the_run_and_leaves_no_half_file(tmp_path: Path) -> None:
    folder, tokens, plan = make(tmp_path, 1, 1)
    with pytest.raises(BoomError):
        write_all(folder, tokens, plan)
    shards = list((folder.path / "shards").iterdir())
    assert not [path for path in shards if durable.is_temporary(path)]
    assert len(shards) < len(plan.shards)
    for path in (folder.path / "records").iterdir():
        record = Record.read(path)
        assert record is not None
        assert durable.file_sha256(folder.shard(record.shard)) == record.sha256


def test_an_error_of_the_system_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"job\.json: cannot be written \(No such file or directory\); check that the disk is there"):
        durable.write_whole(tmp_path / "gone" / "job.json", b"{}")
    with pytest.raises(StorageError, match=r"No space left on device.*free some space"), durable.storing(tmp_path / "a"):
        raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for data in (b"first", b"second, and longer"):
        durable.write_whole(tmp_path / "job.json", data)
        assert (tmp_path / "job.json").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
