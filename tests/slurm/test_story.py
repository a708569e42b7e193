"""harvest under a real SLURM, by the scripts that users get: one job, an array, many processes, a time limit, scancel."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import TEXTS

import harvest.cli.sbatch  # noqa: F401
from harvest.cli import cli
from harvest.reading.verify import verify
from slurm.cluster import ENDED, Cluster, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "slurm"
BIN = Path(sys.executable).parent
# One thread a process, as on a cluster that gives a process no more than its CPUs.
ENVIRONMENT = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
# A pass and a shard for each prompt: a run takes its time, publishes from the beginning, and has many windows to share.
SLOW = "--shard-size 1 --batch-tokens 16"
COUNT = 240


def write_prompts(folder: Path, count: int) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(f"{number}: {TEXTS[number % len(TEXTS)]}") + "\n" for number in range(count)))
    return path


def edited(folder: Path, name: str, options: str, changes: Mapping[str, str] = {}) -> Path:
    """One of the scripts in scripts/slurm in a folder, edited as a user does."""
    text = (SCRIPTS / f"{name}.sbatch").read_text()
    for old, new in {"--model llama-8b": f"--model tiny {options}", **changes}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / f"{name}.sbatch"
    script.write_text(text)
    return script


def submit(cluster: Cluster, script: Path, *options: str) -> int:
    return cluster.submit(script, "--cpus-per-task=1", *options, cwd=script.parent, **ENVIRONMENT)


def job_json(folder: Path) -> dict[str, Any]:
    """The job of a run, or nothing where it has none yet."""
    try:
        return dict(json.loads((folder / "job.json").read_text()))
    except FileNotFoundError:
        return {}


def published(run: Path) -> dict[str, bytes]:
    """The bytes of what is the same for everyone: shards and stats."""
    return {path.name: path.read_bytes() for path in [*(run / "shards").iterdir(), *run.glob("stats.safetensors")]}


def records(run: Path) -> dict[str, int]:
    """Which shards are recorded, and when that was."""
    return {path.name: path.stat().st_mtime_ns for path in (run / "records").glob("shard_*.json")}


def hold(run: Path, part: str = "0-of-1") -> None:
    """Stop the process of a part where it is, however fast the machine: SLURM's own SIGCONT, which comes with each SIGTERM, wakes it."""
    (claim,) = run.glob(f"processes/part-{part}-*.json")
    os.kill(json.loads(claim.read_text())["pid"], signal.SIGSTOP)


def assert_whole(run: Path) -> None:
    assert job_json(run)["status"] == "done"
    assert verify(run).is_sound, verify(run).to_text()
    assert not (run / "processes").exists()


@pytest.fixture(scope="module")
def single(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, by single.sbatch."""
    folder = tmp_path_factory.mktemp("single")
    write_prompts(folder, COUNT)
    job = submit(cluster, edited(folder, "single", SLOW))
    assert cluster.wait_for_state(job)["JobState"] == "COMPLETED"
    log = (folder / f"harvest-{job}.log").read_text()
    assert json.loads(log[log.index("{\n") : log.rindex("\n}") + 2])["status"] == "done"
    return folder / "run1"


def test_one_job(single: Path) -> None:
    assert_whole(single)
    assert len(published(single)) == COUNT + 1


def test_an_array_whose_cancelled_element_is_submitted_again_alone(cluster: Cluster, single: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path, COUNT)
    script = edited(tmp_path, "array", SLOW, {"--array=0-3": "--array=0-2", "parts=4": "parts=3"})
    run = tmp_path / "run1"
    array = submit(cluster, script)
    wait_for(lambda: list(run.glob("processes/part-1-of-3-*")), "element 1 at work")
    hold(run, "1-of-3")
    cluster.run("scancel", f"{array}_1")
    states = [cluster.wait_for_state(f"{array}_{part}")["JobState"] for part in range(3)]
    assert states == ["COMPLETED", "CANCELLED", "COMPLETED"]
    logs = [(tmp_path / f"harvest-{array}_{part}.log").read_text() for part in range(3)]
    assert "those of part 1/3" in logs[0]
    assert "those of part" in logs[2]
    assert "task 0: Exited with exit code 75" in logs[1]
    assert job_json(run)["status"] == "pending"
    assert not (run / "manifest.json").exists()
    before = records(run)
    assert 0 < len(before) < COUNT

    again = submit(cluster, script, "--array=1")
    assert cluster.wait_for_state(f"{again}_1")["JobState"] == "COMPLETED"
    assert_whole(run)
    assert published(run) == published(single)
    assert before.items() <= records(run).items(), "what the others had finished stays as it was"


def test_two_processes_of_srun_share_a_run(cluster: Cluster, single: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path, COUNT)
    script = edited(tmp_path, "multi-node", SLOW, {"--ntasks-per-node=8": "--ntasks-per-node=1"})
    job = submit(cluster, script)
    assert cluster.wait_for_state(job)["JobState"] == "COMPLETED"
    log = (tmp_path / f"harvest-{job}.log").read_text().splitlines()
    for rank in range(2):
        (read,) = (line for line in log if line.startswith(f"{rank}: ") and "tokens/s" in line)
        assert "0 of" not in read
        assert any(line.startswith(f"{rank}: harvest: run folder: ") and line.endswith(f"part {rank}/2") for line in log)
    assert_whole(tmp_path / "run1")
    assert published(tmp_path / "run1") == published(single)


def test_a_job_cut_by_its_time_limit_comes_back_and_finishes_by_itself(cluster: Cluster, single: Path, tmp_path: Path) -> None:
    """SLURM looks every 30 s which signals are due, so this one comes 10 to 40 s after the start."""
    write_prompts(tmp_path, COUNT)
    script = edited(tmp_path, "single", SLOW, {"--time=04:00:00": "--time=1", "TERM@120": "TERM@20"})
    run = tmp_path / "run1"
    job = submit(cluster, script)
    held = False
    cuts: list[dict[str, int]] = []

    def look() -> dict[str, str] | None:
        nonlocal held
        now = cluster.job(job)
        if not held and now["JobState"] == "RUNNING" and records(run):
            hold(run)
            held = True
        if now["JobState"] == "PENDING" and int(now["Restarts"]) > len(cuts):
            assert job_json(run)["status"] == "pending"
            assert not (run / "manifest.json").exists()
            cuts.append(records(run))
            cluster.begin_now(job)
        return now if now["JobState"] in ENDED else None

    assert wait_for(look, "the end of a job that comes back", 300)["JobState"] == "COMPLETED"
    assert_whole(run)
    assert published(run) == published(single)
    log = (tmp_path / f"harvest-{job}.log").read_text()
    assert log.count("task 0: Exited with exit code 75") == len(cuts) > 0
    assert f"{len(cuts[-1])} of {COUNT} shards are on disk already" in log
    assert 0 < len(cuts[-1]) < COUNT
    assert cuts[-1].items() <= records(run).items(), "what was finished before the cut stays as it was"


@pytest.mark.parametrize("exit_code", [75, 143])
def test_scancel_ends_a_job_that_the_same_command_finishes(exit_code: int, cluster: Cluster, single: Path, tmp_path: Path) -> None:
    """By the script that `harvest sbatch` submits, and by a script of one's own without srun and without --on-term requeue."""
    write_prompts(tmp_path, COUNT)
    run = tmp_path / "run1"
    options = f"--model tiny {SLOW} --prompts prompts.jsonl --layers all --out run1"

    def start() -> int:
        if exit_code == 143:
            script = f"#!/bin/bash\n#SBATCH --output=harvest-%j.log\nexec harvest run {options}\n"
            return cluster.submit(script, cwd=tmp_path, **ENVIRONMENT)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            runner = CliRunner(env={**cluster.environment, **ENVIRONMENT})
            result = runner.invoke(cli, ["sbatch", "--gpus", "0", "--cpus", "1", "--submit", *options.split()])
        assert result.exit_code == 0, result.stderr
        return int(result.stdout)

    job = start()
    wait_for(lambda: records(run), "the first shards")
    hold(run)
    cluster.run("scancel", str(job))
    ended = cluster.wait_for_state(job)
    log = (tmp_path / f"harvest-{job}.log").read_text()
    assert ended["JobState"] == "CANCELLED"
    assert "harvest: error: stopped by SIGTERM; the shards that were finished stay" in log
    if exit_code == 143:
        assert ended["ExitCode"] == "143:0"
    else:
        assert "task 0: Exited with exit code 75" in log
    assert job_json(run)["status"] == {75: "pending", 143: "cancelled"}[exit_code]
    assert not (run / "manifest.json").exists()
    before = records(run)
    assert 0 < len(before) < COUNT

    assert cluster.wait_for_state(start())["JobState"] == "COMPLETED"
    assert_whole(run)
    assert published(run) == published(single)
    assert before.items() <= records(run).items(), "what was finished before stays as it was"
