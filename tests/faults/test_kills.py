"""Killed at any point, a run that is started again ends with the same bytes as one that ran through."""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Task, content, run, start, started, wait

from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.presence import live_claims
from harvest.output.record import Record
from harvest.reading.verify import verify

# What changes a folder, as the interpreter tells before it does so. A fsync is not told of, and so is counted by hand.
_EVENTS = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir"}


def kill_before(folder: Path, step: int, count_file: Path | None = None) -> None:
    """Kill this process before its step number `step` that changes the folder, from 0; or only count the steps."""
    n_steps = 0
    sync = os.fsync

    def count() -> None:
        nonlocal n_steps
        if n_steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        n_steps += 1
        if count_file is not None:
            count_file.write_text(str(n_steps))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(args[1], str) and args[1][:1] in ("w", "x", "a")
        if (is_write or event in _EVENTS) and str(folder) + os.sep in f"{args[0]}{os.sep}":
            count()

    def counted(descriptor: int) -> None:
        count()
        sync(descriptor)

    os.fsync = counted
    sys.addaudithook(hook)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ran through."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, said = run(Task(folder))
    assert code == 0, said
    return folder


def check_published(folder: Path) -> int:
    """Every record stands for a whole shard, and a manifest for a whole run; answers the number of records."""
    run_folder, n_records = RunFolder(folder), 0
    for index in sorted(run_folder.recorded()):
        record = Record.read(run_folder.record(index))
        assert record is not None, f"the record of shard {index} is torn"
        assert durable.file_sha256(run_folder.shard(record.shard)) == record.sha256
        n_records += 1
    if run_folder.manifest.exists():
        # The job says that it is done last of all.
        assert {finding.where for finding in verify(folder).findings} <= {"job.json"}
    return n_records


def test_killed_at_every_step_of_publishing(whole: Path, tmp_path: Path) -> None:
    counted = Task(tmp_path / "counted", kill_before, (-1, tmp_path / "count"))
    assert run(counted)[0] == 0
    n_steps = int((tmp_path / "count").read_text())
    # Five shards and five records alone are opened, flushed twice each and renamed.
    assert n_steps > 60
    records_at_kill = set()
    for step in range(n_steps):
        folder = tmp_path / f"run-{step}"
        code, said = run(Task(folder, kill_before, (step,)))
        assert code == -signal.SIGKILL, (step, code, said)
        records_at_kill.add(check_published(folder) if (folder / "records").exists() else 0)
        code, said = run(Task(folder))
        assert code == 0, (step, said)
        assert content(folder) == content(whole), step
        assert not [path for path in folder.rglob("*") if durable.is_temporary(path)], step
        assert not live_claims(RunFolder(folder)), step
    assert records_at_kill == set(range(6)), "the steps span the whole run"


def test_killed_at_random_times_again_and_again(whole: Path, tmp_path: Path) -> None:
    started_at = time.monotonic()
    assert run(Task(tmp_path / "timed"))[0] == 0
    length_s = time.monotonic() - started_at
    chance = random.Random(20261201)
    n_kills = 0
    for number in range(8):
        folder = tmp_path / f"run-{number}"
        for _ in range(3):
            with started(Task(folder)) as process:
                process.join(chance.uniform(0.1, 1.0) * length_s)
                n_kills += process.is_alive()
            if folder.exists():
                check_published(folder)
        code, said = run(Task(folder))
        assert code == 0, said
        assert content(folder) == content(whole)
    assert n_kills >= 10


def test_two_stops_and_a_kill(whole: Path, tmp_path: Path) -> None:
    """A second Ctrl-C ends a run at once, and what was published by then stays."""
    folder = tmp_path / "run"
    task = Task(folder, slow_batches, (0.2,), engine={"batch_tokens": 1})
    process = start(task)
    deadline = time.monotonic() + 60
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    assert wait(process) == 130
    check_published(folder)
    code, said = run(Task(folder, engine={"batch_tokens": 1}))
    assert code == 0, said


def slow_batches(_folder: Path, pause_s: float) -> None:
    """Make each batch of this process take longer."""
    from harvest.model.capture import Capture

    read = Capture.read

    def slowly(self: Capture, prompts: Any, *arguments: Any) -> Any:
        time.sleep(pause_s)
        return read(self, prompts, *arguments)

    Capture.read = slowly  # type: ignore[method-assign]
