"""What SLURM does that harvest and its scripts rely on: its variables, and what becomes of a job that is queued again."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harvest.parts import ALONE, Rank, find_rank
from slurm.cluster import Cluster, wait_for

pytestmark = pytest.mark.slurm

# Writes the environment that a process finds to a file of its own.
TELL = f"{sys.executable} -c 'import json, os, sys; open(sys.argv[1] + str(os.getpid()), \"w\").write(json.dumps(dict(os.environ)))'"
# Says in a file that it works, and goes on until it is stopped; started again, it ends at once.
WORK = """#!/bin/bash
echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-none}" >> started-${SLURM_ARRAY_TASK_ID:-x}
[ -z "${SLURM_RESTART_COUNT:-}" ] || exit 0
exec sleep 300
"""


def told(folder: Path, prefix: str) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in folder.glob(f"{prefix}*")]


def lines_of(path: Path) -> Callable[[], list[str]]:
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_stands_in_a_step_alone_and_sees_a_gpu_of_its_own(cluster: Cluster, tmp_path: Path, nodes: int) -> None:
    script = f"#!/bin/bash\n{TELL} shell\nsrun {TELL} task\n"
    job = cluster.submit(script, f"--nodes={nodes}", "--ntasks-per-node=2", "--gpus-per-task=1", cwd=tmp_path)
    assert cluster.wait_for_state(job)["JobState"] == "COMPLETED"

    (shell,) = told(tmp_path, "shell")
    assert (shell["SLURM_NTASKS"], shell["SLURM_PROCID"]) == (str(2 * nodes), "0")
    assert not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & shell.keys()
    assert find_rank(shell) == ALONE

    tasks = told(tmp_path, "task")
    assert sorted(find_rank(task).index for task in tasks) == list(range(2 * nodes))
    assert {find_rank(task) for task in tasks} == {Rank(index, 2 * nodes, index % 2, 2) for index in range(2 * nodes)}
    assert {(task["SLURM_NODEID"], task["CUDA_VISIBLE_DEVICES"]) for task in tasks} == {(str(n), gpu) for n in range(nodes) for gpu in "01"}


def test_an_element_submitted_again_alone_finds_a_count_of_1(cluster: Cluster, tmp_path: Path) -> None:
    script = f"#!/bin/bash\n{TELL} element\n"
    job = cluster.submit(script, "--array=2", cwd=tmp_path)
    assert cluster.wait_for_state(f"{job}_2")["JobState"] == "COMPLETED"
    (element,) = told(tmp_path, "element")
    assert (element["SLURM_ARRAY_TASK_ID"], element["SLURM_ARRAY_TASK_COUNT"]) == ("2", "1")


def test_a_job_that_is_queued_again_keeps_its_number_and_counts(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(WORK, "--requeue", cwd=tmp_path)
    started = lines_of(tmp_path / "started-x")
    wait_for(started, "the start of the job")
    cluster.run("scontrol", "requeue", str(job))
    again = cluster.wait_for_state(job, "PENDING")
    assert (again["Reason"], again["Restarts"]) == ("BeginTime", "1")
    cluster.begin_now(job)
    assert cluster.wait_for_state(job)["JobState"] == "COMPLETED"
    assert started() == [f"{job} none", f"{job} 1"]


def test_the_number_of_one_element_is_that_of_its_whole_array(cluster: Cluster, tmp_path: Path) -> None:
    array = cluster.submit(WORK, "--requeue", "--array=0-1", cwd=tmp_path)
    elements = [f"{array}_0", f"{array}_1"]
    started = [lines_of(tmp_path / f"started-{index}") for index in range(2)]
    wait_for(lambda: all(look() for look in started), "the start of both elements")
    numbers = [look()[0].split()[0] for look in started]
    assert str(array) in numbers

    def restarts() -> list[str]:
        return [cluster.job(element)["Restarts"] for element in elements]

    # By the name that the scripts use, one element alone; by the number that one of them has, the others as well.
    cluster.run("scontrol", "requeue", elements[0])
    cluster.wait_for_state(elements[0], "PENDING")
    assert restarts() == ["1", "0"]
    # Not `run`: it tells that element 0 is pending already, and ends with 1.
    cluster.call("scontrol", "requeue", str(array))
    wait_for(lambda: restarts()[1] == "1", "the other element queued again")
    cluster.run("scancel", str(array))


def test_a_signal_before_the_time_limit_is_the_tasks_alone(cluster: Cluster, tmp_path: Path) -> None:
    """With `scancel --signal`, which sends it by the same way as `sbatch --signal` does, and at once."""
    trap = "trap 'echo {0} >> signalled' TERM; echo >> ready-{0}; until [ -e end ]; do sleep 0.1; done"
    script = f'#!/bin/bash\nsrun bash -c "{trap.format("task")}" &\n{trap.format("shell")}\n'
    job = cluster.submit(script, cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "the traps of shell and task")
    cluster.run("scancel", "--signal=TERM", str(job))
    wait_for(lines_of(tmp_path / "signalled"), "the signal")
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run("scancel", "--batch", "--signal=TERM", str(job))
    wait_for(lambda: "shell" in lines_of(tmp_path / "signalled")(), "the shell's signal")
    assert lines_of(tmp_path / "signalled")() == ["task", "shell"]
    (tmp_path / "end").touch()
    assert cluster.wait_for_state(job)["JobState"] == "COMPLETED"
