"""The batch script of a SLURM job that harvests: pure text, and the one place that says what such a script must do.

What SLURM does was tried out on its release 22.05; tests/slurm does it again.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from harvest.errors import RequestError, RequeuedError

# SLURM sends a signal before the limit up to this much earlier than it was told to.
SIGNAL_EARLY_S = 60
# A run that gets nowhere within its time limit is not begun for ever.
MAX_RESTARTS = 100


def _check_word(text: str) -> str:
    if re.fullmatch(r"[\w.,:@%+/=-]+", text) is None:
        raise ValueError("it stands in a line of #SBATCH, so letters, digits and .,:@%+/=-_ are allowed, and at least one")
    return text


def time_limit_s(text: str) -> int:
    """A time limit as sbatch takes it, in seconds. Raises ValueError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ValueError("a time limit is MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, or DAYS-HOURS with :MINUTES:SECONDS after it")
    days, *numbers = match.groups()
    given = [int(number) for number in numbers if number is not None]
    # Without days a time begins with hours only where all three stand.
    largest_unit_s = 3600 if days is not None or len(given) == 3 else 60
    units_s = (3600, 60, 1) if largest_unit_s == 3600 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit_s for number, unit_s in zip(given, units_s, strict=False))


def _check_time(text: str) -> str:
    time_limit_s(text)
    return text


Word = Annotated[str, AfterValidator(_check_word)]


class BatchJob(BaseModel):
    """What a job asks of SLURM."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    job_name: Word = Field(default="harvest", description="The job's name, which its log has too.")
    partition: Word | None = Field(default=None, description="Partition.")
    account: Word | None = Field(default=None, description="Account.")
    time: Annotated[str, AfterValidator(_check_time)] = Field(default="04:00:00", description="Time limit of each run of the job.")
    nodes: int = Field(default=1, ge=1, description="Nodes.")
    gpus: int = Field(default=1, ge=0, description="GPUs of each node, with one process each; 0 for one process without.")
    cpus: int = Field(default=8, ge=1, description="CPUs of each process.")
    mem: Word | None = Field(default=None, description="Memory of each node, such as 64G.")
    parts: int | None = Field(default=None, ge=1, description="An array of this many jobs, each with its part of the run.")
    signal_s: int = Field(default=120, ge=1, le=65535, description="Seconds before the time limit at which harvest is told to stop.")

    @model_validator(mode="after")
    def _check_signal(self) -> Self:
        limit_s = time_limit_s(self.time)
        if limit_s <= self.signal_s + SIGNAL_EARLY_S:
            raise ValueError(
                f"time: {self.time} was given, {limit_s} s, of which the signal takes {self.signal_s} s, and up to {SIGNAL_EARLY_S} s more "
                "since SLURM may send it early; no time is left to harvest in: give --time more, or --signal-s less"
            )
        return self


def batch_script(job: BatchJob, options: Sequence[str]) -> str:
    """The script of a job that runs `harvest run` with these options, to be handed to sbatch."""
    tasks = max(job.gpus, 1)
    directives = {
        "job-name": job.job_name,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "array": job.parts and f"0-{job.parts - 1}",
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-task": 1 if job.gpus else None,
        "cpus-per-task": job.cpus,
        "mem": job.mem,
        "output": f"{job.job_name}-{'%A_%a' if job.parts else '%j'}.log",
    }
    title, element, part = _SINGLE, "$SLURM_JOB_ID", ""
    if job.parts:
        title, element, part = _ARRAY, "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID", ' --part "$part"'
    elif job.nodes * tasks > 1:
        title = _MANY
    return _SCRIPT.format(
        title=title,
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None),
        signal_s=job.signal_s,
        early_s=SIGNAL_EARLY_S,
        options="\n".join(f"    {line}" for line in _option_lines(options)),
        parts=_PARTS.format(parts=job.parts) if job.parts else "",
        # Which process a line of the log comes from.
        label=" --label" if job.nodes * tasks > 1 else "",
        part=part,
        requeue=_REQUEUE_ELEMENT if job.parts else "",
        stopped=RequeuedError.exit_code,
        max_restarts=MAX_RESTARTS,
        element=element,
    )


def submit(script: str) -> str:
    """Hand a script to sbatch, and answer the job's id. Raises RequestError."""
    program = shutil.which("sbatch")
    if program is None:
        raise RequestError(
            "submit: there is no sbatch on PATH; submit where SLURM's commands are, or leave --submit out and keep the script"
        )
    done = subprocess.run([program, "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode != 0:
        raise RequestError(f"submit: sbatch took no job (its exit code was {done.returncode}) and says: {done.stderr.strip() or 'nothing'}")
    return done.stdout.strip().split(";")[0]


def _option_lines(options: Sequence[str]) -> list[str]:
    """An option and its value a line, quoted for the shell."""
    lines: list[str] = []
    for word in options:
        if word.startswith("-") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


_SINGLE = "# harvest as one SLURM job."
_MANY = "# harvest as one SLURM job of many processes, one a GPU; each takes its share of the run, and any of them writes its end."
_ARRAY = (
    "# harvest as an array of SLURM jobs; each takes its part of one run whenever it starts, and whichever ends last writes the run's end."
)

_SCRIPT = """\
#!/bin/bash
{title}
# Submit it from a shell that finds `harvest`, such as one with its .venv activated: sbatch passes the environment on. Names of files
# count from the folder in which sbatch is called; all nodes must see the same one.
{directives}
# harvest is told to stop {signal_s} s before the time limit, or up to {early_s} s earlier; it ends after a batch and keeps finished shards.
# Without B: the signal goes to what srun started and not to this shell, which is needed afterwards.
#SBATCH --signal=TERM@{signal_s}
# A job that comes back, after the time limit, a preemption or a failed node, goes on in the same log.
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

options=(
{options}
)
{parts}
# srun starts the processes: it hands signals on to them and gives them time to end, while a plain command is killed with this shell.
# It must be told the CPUs again, and not to end the other processes when one of them is through or has failed.
status=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=0{label} \\
    harvest run "${{options[@]}}"{part} --on-term requeue || status=$?

# {stopped}: stopped by the signal, with work left. The same job is queued again and finishes what is missing. Any other code is an end.
{requeue}if [ "$status" -eq {stopped} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ]; then
    exec scontrol requeue "{element}"
fi
exit "$status"
"""

_PARTS = """
# How many parts there are, as in --array above. SLURM_ARRAY_TASK_COUNT would not do: an element that is submitted again alone, as with
# sbatch --array=2, is part 2 of as many as before, but finds a count of 1.
parts={parts}
part="${{SLURM_ARRAY_TASK_ID:?is not set: submit this as an array}}/$parts"
"""

_REQUEUE_ELEMENT = """\
# The element is named by its array: one element has the whole array's number as SLURM_JOB_ID, and would take all others with it.
"""
