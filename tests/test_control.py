"""Status and cancel, from another process than the one that works."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import DATA, tiny_request, wait_for

import harvest
from harvest.control import cancel, status, under_way
from harvest.errors import FolderError, NotARunError
from harvest.output.folder import RunFolder
from harvest.output.job import JobFile, read_job
from harvest.output.presence import Presence, claims
from harvest.output.process import Process
from harvest.stop import StopFlag

SCHEMA = json.loads((DATA / "harvest_job.schema.json").read_text())

# A run that works until it is stopped: a batch a prompt, and a pause after each.
WORK = """
import sys, time
import harvest.model.capture as capture
from harvest.cli import main
read = capture.Capture.read
def slowly(self, prompts, *arguments):
    time.sleep(0.05)
    return read(self, prompts, *arguments)
capture.Capture.read = slowly
sys.argv[0] = "harvest"
main()
"""


@pytest.fixture
def working(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    """A process that works on 2,000 prompts, 4 a shard, and has published a shard."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(2000)))
    folder = RunFolder(tmp_path / "run")
    command = ["run", "--prompts", str(prompts), "--out", str(folder.path), "--shard-size", "4", "--batch-tokens", "1", "--layers", "1"]
    process = subprocess.Popen([sys.executable, "-c", WORK, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: process.poll() is not None or folder.record(0).exists())
        assert process.poll() is None, process.communicate()[1]
        yield process, folder
    finally:
        process.kill()
        process.communicate()


def check(job: harvest.HarvestJob) -> harvest.HarvestJob:
    jsonschema.validate(json.loads(job.to_json()), SCHEMA, format_checker=jsonschema.FormatChecker())
    return job


def published(folder: RunFolder) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder.path / "shards").iterdir()}


def test_a_run_to_be_queued_again_is_pending(working: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, folder = working
    process.kill()
    process.communicate()
    command = [*process.args, "--on-term", "requeue"]  # type: ignore[misc]
    again = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        n_before = len(folder.recorded())
        wait_for(lambda: again.poll() is not None or len(folder.recorded()) > n_before)
        again.send_signal(signal.SIGTERM)
        out, said = again.communicate(timeout=30)
    finally:
        again.kill()
        again.communicate()
    assert (again.returncode, out) == (75, ""), said
    job = check(status(folder))
    assert (job.status, job.tokens, job.started_at, job.completed_at) == ("pending", None, None, None)
    assert len(folder.recorded()) > n_before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 130)])
def test_a_stop_ends_the_run_after_its_batch_and_keeps_what_is_published(
    number: int | None, code: int, working: tuple[subprocess.Popen[str], RunFolder]
) -> None:
    process, folder = working
    assert check(status(folder)).status == "running"
    before = time.monotonic()
    if number is None:
        answer = check(cancel(folder))
    else:
        process.send_signal(number)
        answer = check(status(folder, wait_s=30))
    assert time.monotonic() - before < 10
    assert (answer.status, answer.tokens) == ("cancelled", answer.reserved_tokens)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code, said
    assert "the same command goes on with the rest" in said
    assert not folder.processes.exists()
    assert not folder.cancel.exists()
    names = published(folder)
    assert names
    assert all(folder.record(int(name[6:11])).exists() for name in names)
    assert not [name for name in names if "tmp" in name]


def claim_of_another_machine(folder: RunFolder, silent_s: float, **fields: Any) -> Path:
    """A claim of the whole run by process 7 of the host elsewhere, last heard of so many seconds ago."""
    folder.processes.mkdir(exist_ok=True)
    path = folder.processes / "part-0-of-1-1.json"
    process = replace(Process.this(""), host="elsewhere", machine="elsewhere", pid=7, **fields)
    path.write_text(json.dumps(asdict(process)))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def test_a_killed_process_is_told_from_one_that_works(working: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, folder = working
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    job = check(status(folder, wait_s=5))
    assert (job.status, job.tokens) == ("failed", 0)
    assert job.error is not None
    assert f"process {process.pid} on " in job.error
    stored = read_job(folder)
    assert stored is not None
    assert stored.status == "running", "a look changes nothing on disk"
    assert check(cancel(folder)).status == "cancelled", "what a dead process left can be cancelled"


def test_a_second_process_on_the_folder_is_told_of_the_first(working: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, folder = working
    with pytest.raises(FolderError, match=rf"process {process.pid} on .* is working on .*harvest cancel"):
        harvest.run(tiny_request(), folder.path)


def test_a_run_that_has_ended_stays_as_it_is(tiny_run: Path) -> None:
    folder = RunFolder(tiny_run)
    before = folder.job.read_bytes()
    job = check(cancel(folder))
    assert job.status == "done"
    assert job.job_id == check(status(folder, wait_s=5)).job_id
    assert folder.job.read_bytes() == before


def test_a_queued_run_is_cancelled_without_a_charge(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    JobFile.begin(folder, None, model="tiny", n_prompts=1, reserved_tokens=9, layers=[0])
    assert check(status(folder)).status == "pending"
    job = check(cancel(folder))
    assert (job.status, job.tokens, job.started_at) == ("cancelled", 0, None)


def test_a_folder_without_a_job(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match=r"holds no job\.json"):
        status(RunFolder(tmp_path / "nowhere"))


def test_a_process_of_the_same_number_that_was_born_later_is_another() -> None:
    this = Process.this("")
    assert this.is_here
    assert this.runs
    assert not replace(this, birth="1").runs


def test_a_process_that_ended_and_is_not_waited_for_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat")
    process = replace(Process.this(""), pid=child.pid, birth=stat.read_text().split()[21])
    assert process.runs
    child.kill()
    wait_for(lambda: stat.read_text().split()[2] == "Z")
    assert not process.runs
    child.communicate()


@pytest.mark.parametrize(("silent_s", "alive"), [(0, True), (60, True), (600, False)])
def test_a_process_of_another_machine_is_judged_by_its_signs_of_life(silent_s: int, alive: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    claim_of_another_machine(folder, silent_s)
    assert [claim.is_alive for claim in claims(folder)] == [alive]


def test_presence_lasts_as_long_as_its_context(tmp_path: Path) -> None:
    folder, stop = RunFolder(tmp_path), StopFlag()
    with Presence(folder, stop):
        (claim,) = claims(folder)
        assert claim.process.pid == os.getpid()
        assert claim.is_alive
        assert not stop.is_set
        folder.cancel.touch()
        wait_for(lambda: stop.is_set)
    assert list(tmp_path.iterdir()) == []


def test_the_commands(tiny_run: Path, tmp_path: Path) -> None:
    for command in ("status", "cancel"):
        done = subprocess.run([sys.executable, "-m", "harvest", command, str(tiny_run)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["status"] == "done"
        done = subprocess.run([sys.executable, "-m", "harvest", command, str(tmp_path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert "holds no job.json" in done.stderr


def test_how_far_a_run_is_can_be_seen_from_elsewhere(working: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, folder = working
    (line,) = wait_for(lambda: under_way(folder))
    assert re.fullmatch(r"process \d+ on .+: [\d,]+ of [\d,]+ tokens, \d+ tokens/s, .+ written, .+ left, limited by computing", line), line
    shown = subprocess.run([sys.executable, "-m", "harvest", "status", folder.path], capture_output=True, text=True)
    assert json.loads(shown.stdout)["status"] == "running"
    assert shown.stderr.startswith(f"harvest: process {process.pid} on ")
    # A killed process leaves its last word; who takes its part removes it, and leaves nothing.
    process.kill()
    process.wait()
    assert list(folder.processes.glob("*.progress.json"))
    assert under_way(folder) == []
    with Presence(folder, StopFlag()):
        assert not list(folder.processes.glob("*.progress.json"))
    assert not folder.processes.exists()
