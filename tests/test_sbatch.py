"""The scripts that start harvest by themselves: those for SLURM, held as text and run by bash, and the line for cron."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import DATA, TEXTS

from harvest.cli import cli
from harvest.cli.sbatch import sbatch
from harvest.sbatch import MAX_RESTARTS, BatchJob, batch_script, time_limit_s

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts" / "slurm"
RUN = "--model llama-8b --prompts prompts.jsonl --layers all --out run1"
# Each file is what this command prints: where the script is changed, write the files anew with it.
FILES = {
    SCRIPTS / "single.sbatch": f"harvest sbatch -- {RUN}",
    SCRIPTS / "array.sbatch": f"harvest sbatch --parts 4 -- {RUN}",
    SCRIPTS / "multi-node.sbatch": f"harvest sbatch --nodes 2 --gpus 8 -- {RUN}",
    DATA / "sbatch" / "cpu.sbatch": "harvest sbatch --gpus 0 --model tiny --prompts 'my prompts.jsonl' -q --out=run1",
    DATA / "sbatch" / "every-option.sbatch": (
        "harvest sbatch --job-name sae --partition gpu --account lab --time 1-12 --nodes 2 --gpus 4 --cpus 12 --mem 200G --parts 3 "
        "--signal-s 300 -- --config body.json --out /data/run1 --no-limits"
    ),
}


def invoke(line: str) -> Result:
    words = shlex.split(line)
    assert words[0] == "harvest"
    return CliRunner().invoke(cli, words[1:])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_script_of_a_request(file: Path) -> None:
    result = invoke(FILES[file])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == file.read_text()


def test_every_script_is_held() -> None:
    assert {path for path in FILES if path.parent == SCRIPTS} == set(SCRIPTS.iterdir())
    assert {path for path in FILES if path.parent != SCRIPTS} == set((DATA / "sbatch").iterdir())


class Shell:
    """bash, with programs that stand for srun and scontrol: each writes down its arguments, and srun ends with a code of our choice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, code in (("srun", "$SRUN_CODE"), ("scontrol", "0")):
            (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {shlex.quote(str(folder))}/{name}.called\nexit {code}\n')
            (folder / name).chmod(0o755)

    def run(self, script: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder}:{os.environ['PATH']}"
        own = {"PATH": path, "SRUN_CODE": str(code), "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "41"}
        return subprocess.run(["bash"], input=script, env={**own, **environment}, cwd=self.folder, capture_output=True, text=True)

    def called(self, name: str) -> list[str] | None:
        file = self.folder / f"{name}.called"
        return file.read_text().split("\0")[:-1] if file.exists() else None


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_options_reach_harvest_as_they_were_given(shell: Shell) -> None:
    options = ["--model", "a b", "--prompts", "it's $(touch hit) `touch hit`.jsonl", '--field="x"', "--out", "new\nline\\", "-q", "*", ""]
    done = shell.run(batch_script(BatchJob(), options))
    assert (done.returncode, done.stderr) == (0, "")
    called = shell.called("srun")
    assert called is not None
    assert called[called.index("harvest") :] == ["harvest", "run", *options, "--on-term", "requeue"]
    assert called[: called.index("harvest")] == ["--cpus-per-task=8", "--kill-on-bad-exit=0", "--wait=0"]
    assert not (shell.folder / "hit").exists()


@pytest.mark.parametrize("restarts", [None, 1, MAX_RESTARTS - 1])
def test_a_job_that_was_cut_is_queued_again(shell: Shell, restarts: int | None) -> None:
    environment = {} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)}
    assert shell.run(batch_script(BatchJob(), ["--out", "run1"]), code=75, **environment).returncode == 0
    assert shell.called("scontrol") == ["requeue", "41"]


@pytest.mark.parametrize(("code", "restarts"), [(0, 0), (1, 0), (2, 3), (130, 0), (137, 0), (143, 0), (75, MAX_RESTARTS)])
def test_a_job_that_has_ended_is_not_queued_again(shell: Shell, code: int, restarts: int) -> None:
    for parts in (None, 3):
        script = batch_script(BatchJob(parts=parts), ["--out", "run1"])
        array = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"} if parts else {}
        assert shell.run(script, code=code, SLURM_RESTART_COUNT=str(restarts), **array).returncode == code
        assert shell.called("srun") is not None
        assert shell.called("scontrol") is None


def test_an_element_knows_its_part_and_is_queued_again_by_its_number(shell: Shell) -> None:
    script = batch_script(BatchJob(parts=5), ["--out", "run1"])
    # As in `sbatch --array=4`, where one element is submitted again alone.
    element = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_COUNT": "1"}
    assert shell.run(script, code=75, **element).returncode == 0
    called = shell.called("srun")
    assert called is not None
    assert called[called.index("--part") + 1] == "4/5"
    assert shell.called("scontrol") == ["requeue", "41_4"]


def test_an_array_script_without_an_array_says_so(shell: Shell) -> None:
    done = shell.run(batch_script(BatchJob(parts=5), ["--out", "run1"]))
    assert done.returncode != 0
    assert "SLURM_ARRAY_TASK_ID: is not set: submit this as an array" in done.stderr
    assert shell.called("srun") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--parts 0 --out run1", "parts: 0 was given"),
        ("--nodes 0 --out run1", "nodes: 0 was given"),
        ("--gpus -1 --out run1", "gpus: -1 was given"),
        ("--signal-s 70000 --time 7-0 --out run1", "signal_s: 70000 was given"),
        ("--time 4h --out run1", "'4h' was given: a time limit is MINUTES"),
        ("--time 3 --out run1", "time: 3 was given, 180 s, of which the signal takes 120 s, and up to 60 s more"),
        ("--partition 'gpu or cpu' --out run1", "partition: 'gpu or cpu' was given: it stands in a line of #SBATCH"),
        ("--mem '' --out run1", "mem: '' was given"),
        ("--prompts prompts.jsonl", "out: no run folder was given; name one"),
        ("--out run1 --prompts -", "prompts: - was given, and a batch job has no standard input"),
        ("--out run1 --overwrite", "overwrite: a job that comes back would start anew each time"),
        ("--out run1 --part 0/2", "part: the script gives --part itself"),
        ("--out run1 --on-term cancel", "on_term: the script gives --on-term itself"),
        ("--out run1 --lairs all", "No such option '--lairs'"),
        ("--out run1 prompts.jsonl", "Got unexpected extra argument (prompts.jsonl)"),
    ],
)
def test_what_no_job_can_run_with_is_an_error(line: str, message: str) -> None:
    result = invoke(f"harvest sbatch {line}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_the_help_tells_the_defaults_of_a_job() -> None:
    for option in sbatch.params:
        if option.name in BatchJob.model_fields and (default := BatchJob.model_fields[option.name].default) is not None:
            assert f"[default: {default}]" in (getattr(option, "help", None) or ""), option.name


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [("90", 5400), ("5:30", 330), ("04:00:00", 14400), ("1-12", 129600), ("1-0:30", 88200), ("2-1:02:03", 176523)],
)
def test_a_time_limit_in_seconds(text: str, limit_s: int) -> None:
    assert time_limit_s(text) == limit_s


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-5", "1-", "1.5", "UNLIMITED"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(ValueError, match="a time limit is MINUTES"):
        time_limit_s(text)


def test_submit_hands_the_script_to_sbatch_and_prints_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    line = f"harvest sbatch --parts 2 --submit -- {RUN}"
    stand_in = tmp_path / "sbatch"
    stand_in.write_text(f'#!/bin/bash\ncat > "{tmp_path}/script"\necho "$@" > "{tmp_path}/arguments"\necho "17;cluster"\n')
    stand_in.chmod(0o755)
    result = invoke(line)
    assert (result.exit_code, result.stdout) == (0, "17\n")
    assert (tmp_path / "arguments").read_text() == "--parsable\n"
    assert (tmp_path / "script").read_text() == invoke(line.replace("--submit ", "")).stdout

    stand_in.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    result = invoke(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "sbatch took no job (its exit code was 1) and says: sbatch: error: invalid partition specified: gpu" in result.stderr


def test_submit_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke(f"harvest sbatch --submit -- {RUN}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no sbatch on PATH" in result.stderr


def start_as_cron_does(folder: Path) -> "subprocess.Popen[bytes]":
    """The command of the crontab, on tiny, by its shell with cron's bare environment, in a process group of its own."""
    *settings, line = [
        line for line in (ROOT / "scripts" / "cron" / "harvest.crontab").read_text().splitlines() if line and not line.startswith("#")
    ]
    environment = dict(setting.split("=", 1) for setting in settings)
    assert environment == {"SHELL": "/bin/sh", "HARVEST": "/home/me/harvest/.venv/bin/harvest", "RUNS": "/home/me/runs"}
    every, command = line.split(" cd ", 1)
    assert len(every.split()) == 5
    assert "%" not in command
    assert "--model smollm2" in command
    environment |= {"HARVEST": str(Path(sys.executable).parent / "harvest"), "RUNS": str(folder), "HOME": "/", "PATH": "/usr/bin:/bin"}
    command = "cd " + command.replace("--model smollm2", "--model tiny")
    return subprocess.Popen([environment["SHELL"], "-c", command], env=environment, cwd="/", start_new_session=True)


def test_the_line_for_cron_may_be_run_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS * 40))
    run, log = tmp_path / "run1", tmp_path / "run1.log"
    job, manifest = run / "job.json", run / "manifest.json"
    first = start_as_cron_does(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (job.exists() and json.loads(job.read_text())["status"] == "running"):
            assert time.monotonic() < deadline
            assert first.poll() is None, log.read_text()
            time.sleep(0.01)
        # Held, so that it is still at work when the second starts.
        os.killpg(first.pid, signal.SIGSTOP)
        (claim,) = (run / "processes").iterdir()
        pid = json.loads(claim.read_text())["pid"]
        assert os.getpgid(pid) == first.pid
        assert start_as_cron_does(tmp_path).wait(60) == 2
        assert not manifest.exists()
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    assert first.wait(120) == 0, log.read_text()
    (refusal,) = log.read_text().splitlines()
    assert refusal.startswith(f"harvest: error: out: process {pid} on "), refusal
    assert json.loads(job.read_text())["status"] == "done"

    written = manifest.read_bytes(), manifest.stat().st_mtime_ns
    assert start_as_cron_does(tmp_path).wait(60) == 0
    assert (manifest.read_bytes(), manifest.stat().st_mtime_ns) == written
    assert len(log.read_text().splitlines()) == 1
