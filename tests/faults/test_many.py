"""Several processes on one folder: what belongs together shares the work, and what does not never mixes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS, wait_for
from forked import Task, content, run, start, started, wait
from test_kills import slow_batches

from harvest.contract import utc_now
from harvest.control import cancel
from harvest.errors import CancelledError, FolderError
from harvest.output import presence
from harvest.output.folder import RunFolder
from harvest.output.presence import Presence, claims
from harvest.output.process import Process
from harvest.parts import WHOLE, Part
from harvest.reading.verify import verify
from harvest.stop import StopFlag

# A prompt a batch and 32 batches a window: 60 prompts make two windows, and shards of two prompts give neither rank all of one.
MANY = tuple(f"prompt {number} " + "ab " * (number % 11) for number in range(150))
SLIM: dict[str, Any] = {"prompts": MANY, "engine": {"batch_tokens": 16}, "shard_size": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, said = run(Task(folder, **SLIM))
    assert code == 0, said
    return folder


def test_three_parts_write_the_bytes_of_one(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tasks = [Task(folder, part=Part(index, 3), **SLIM) for index in range(3)]
    processes = [start(task) for task in tasks]
    assert [wait(process) for process in processes] == [0, 0, 0], [task.said.read_text() for task in tasks]
    assert content(folder) == content(alone)
    assert verify(folder).is_sound
    assert not (folder / "processes").exists()
    # Each made something, and none what another had made.
    own = [int(task.said.read_text().count("on disk already")) for task in tasks]
    assert own == [0, 0, 0]


def test_parts_one_after_the_other(alone: Path, tmp_path: Path) -> None:
    """As an array job with one slot does: each ends well and says what is missing, and the last makes the run whole."""
    folder = tmp_path / "run"
    for index in (2, 0, 1):
        code, said = run(Task(folder, part=Part(index, 3), **SLIM))
        assert code == 0, said
        status = json.loads((folder / "job.json").read_text())["status"]
        assert (folder / "manifest.json").exists() == (index == 1)
        if index == 1:
            assert status == "done"
        else:
            assert status == "pending"
            assert f"part {index}/3 is done; " in said
            assert "whichever part ends last makes the run whole" in said
    assert content(folder) == content(alone)
    code, said = run(Task(folder, part=Part(0, 3), **SLIM))
    assert (code, "finished already" in said) == (0, True)


def test_a_killed_part_is_taken_up_by_its_own_command_and_by_another_number_of_parts(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(Task(folder, slow_batches, (0.05,), part=Part(1, 2), **SLIM)) as process:
        wait_for(lambda: RunFolder(folder).recorded())
        process.kill()
        process.join()
    assert [claim.is_alive for claim in claims(RunFolder(folder))] == [False]
    assert run(Task(folder, part=Part(1, 2), **SLIM))[0] == 0
    assert not (folder / "manifest.json").exists()
    code, said = run(Task(folder, **SLIM))
    assert code == 0, said
    assert content(folder) == content(alone)


@pytest.mark.parametrize("other", [Part(0, 2), Part(0, 3), WHOLE])
def test_a_part_that_overlaps_is_told_who_works_there(other: Part, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(Task(folder, slow_batches, (0.05,), part=Part(0, 2), **SLIM)) as process:
        wait_for(lambda: claims(RunFolder(folder)))
        code, said = run(Task(folder, part=other, **SLIM))
        assert code == 2
        assert f"process {process.pid} on {os.uname().nodename} (part 0/2) is working on {folder}" in said
        assert "wait for it, stop it with harvest cancel, or name another folder" in said


def test_a_part_of_another_request_never_mixes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(Task(folder, slow_batches, (0.05,), part=Part(0, 2), **SLIM)):
        wait_for(lambda: (folder / "job.json").exists())
        code, said = run(Task(folder, part=Part(1, 2), **SLIM | {"shard_size": 5}))
        assert code == 2
        assert "shard_size: 4 there, 5 here" in said


def test_overwrite_is_no_matter_of_a_part(tmp_path: Path) -> None:
    code, said = run(Task(tmp_path / "run", part=Part(0, 2), options={"overwrite": True}))
    assert code == 2
    assert "would remove what the others write" in said


def test_two_racing_for_a_folder(tmp_path: Path) -> None:
    """For up to thirty seconds two processes start on one new folder at once, each time with another head start.

    One works and the other is told so, or finds the run finished; together they never leave another run than one alone would.
    """
    expected, outcomes = None, set()
    deadline = time.monotonic() + 30
    number = 0
    while time.monotonic() < deadline and number < 60:
        folder = tmp_path / f"run-{number}"
        first = start(Task(folder, part=WHOLE))
        time.sleep((number % 10) * 0.015)
        second = start(Task(folder, part=WHOLE))
        codes = sorted((wait(first), wait(second)))
        assert codes in ([0, 0], [0, 2]), (number, codes, Task(folder).said.read_text())
        outcomes.add(tuple(codes))
        assert verify(folder).is_sound
        expected = expected or content(folder)
        assert content(folder) == expected
        assert not [path for path in folder.rglob("*") if "tmp-" in path.name]
        number += 1
    assert number >= 10
    assert (0, 2) in outcomes, "in no race did the two meet"


def claim_of(folder: RunFolder, name: str = "part-0-of-1-1.json", silent_s: float = 0, **fields: Any) -> Path:
    """A claim by process 7 of the machine elsewhere, last heard of so many seconds ago."""
    folder.processes.mkdir(exist_ok=True, parents=True)
    path = folder.processes / name
    process = replace(Process.this(""), host="elsewhere", machine="elsewhere", pid=7, **fields)
    path.write_text(json.dumps(asdict(process)))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def test_a_process_of_another_machine_that_gives_signs_of_life(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    path = claim_of(folder, silent_s=30)
    notes: list[str] = []

    def beat(text: str) -> None:
        notes.append(text)
        os.utime(path)

    with pytest.raises(FolderError, match="process 7 on elsewhere is working on"), Presence(folder, StopFlag(), on_wait=beat):
        pass
    (said,) = notes
    assert "process 7 on elsewhere, last heard of at " in said
    assert f"where you know that it is dead, remove {path}" in said


def test_a_silent_process_of_another_machine_is_waited_for_and_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_SILENT_AFTER", presence.timedelta(seconds=1.0))
    folder, notes = RunFolder(tmp_path), []
    path = claim_of(folder, silent_s=30)
    before = time.monotonic()
    with Presence(folder, StopFlag(), on_wait=notes.append):
        assert time.monotonic() - before >= 1
        assert [claim.process.pid for claim in claims(folder)] == [os.getpid()]
        assert not path.exists()
    assert len(notes) == 1


@pytest.mark.parametrize("dead", ["long silent", "requeued", "removed by hand"])
def test_a_process_of_another_machine_that_is_known_to_be_dead(dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, notes = RunFolder(tmp_path), []
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    path = claim_of(folder, silent_s=700 if dead == "long silent" else 0, slurm_job="77" if dead == "requeued" else "", slurm_restart=1)

    def remove(text: str) -> None:
        notes.append(text)
        path.unlink()

    before = time.monotonic()
    with Presence(folder, StopFlag(), on_wait=remove) as own:
        assert time.monotonic() - before < 30
        assert own.holds
        assert [claim.process.pid for claim in claims(folder)] == [os.getpid()]
    assert len(notes) == (1 if dead == "removed by hand" else 0)


def test_a_stop_while_another_machine_is_waited_for(tmp_path: Path) -> None:
    folder, stop = RunFolder(tmp_path), StopFlag()
    claim_of(folder)

    def ask(_text: str) -> None:
        stop.ask(CancelledError("enough"))

    with pytest.raises(CancelledError, match="enough"), Presence(folder, stop, on_wait=ask):
        pass


@pytest.mark.parametrize("fate", ["removed", "taken over"])
def test_a_process_that_lost_its_claim_stops(fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_BEAT_EVERY_S", 0.5)
    folder, stop = RunFolder(tmp_path), StopFlag()
    with Presence(folder, stop) as own:
        (claim,) = claims(folder)
        if fate == "removed":
            claim.path.unlink()
        else:
            claim_of(folder, "part-0-of-1-2.json")
        deadline = time.monotonic() + 20
        while not stop.is_set and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not own.holds
        with pytest.raises(presence.StorageError, match="claim of this process is gone" if fate == "removed" else "took this one for dead"):
            stop.check()


def test_signs_of_life_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_BEAT_EVERY_S", 0.5)
    folder = RunFolder(tmp_path)
    with Presence(folder, StopFlag()):
        first = claims(folder)[0].beat_at
        deadline = time.monotonic() + 20
        while claims(folder)[0].beat_at == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert first < claims(folder)[0].beat_at <= utc_now()


def test_ranks_of_torchrun_share_the_work(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    arguments = ["run", "--model", "tiny", "--prompts", str(prompts), "--layers", "all", "--shard-size", "1", "--batch-tokens", "8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "harvest"]
    for command, out in ((torchrun, "two"), ([sys.executable, "-m", "harvest"], "one")):
        done = subprocess.run([*command, *arguments, "--out", str(tmp_path / out)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert ("part 0/2" in done.stderr and "part 1/2" in done.stderr) == (out == "two")
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert verify(tmp_path / "two").is_sound


def test_cancel_stops_every_part(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    tasks = [Task(folder.path, slow_batches, (0.1,), part=Part(index, 2), **SLIM) for index in range(2)]
    with started(tasks[0]) as first, started(tasks[1]) as second:
        wait_for(lambda: len(claims(folder)) == 2)
        wait_for(lambda: folder.job.exists())
        job = cancel(folder)
        assert job.status == "cancelled"
        assert [wait(first), wait(second)] == [130, 130]
    assert not folder.cancel.exists()
    assert not claims(folder)
