"""Who a process is, and whether it still lives: asked of the kernel on its own machine, and judged by signs of life elsewhere."""

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# States of a process that has ended and is not yet waited for (proc(5), /proc/pid/stat).
_ENDED = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    """A process, told from every other of any machine.

    machine: what tells this host's pids from those of another host, another boot or another container of the same name.
    birth: the kernel's start time of the pid, which tells it from a later process of the same number.
    slurm_job, slurm_restart: the SLURM job that it belongs to, and how many times that was requeued before; empty and 0 outside.
    """

    host: str
    pid: int
    machine: str
    birth: str
    started_at: str
    slurm_job: str = ""
    slurm_restart: int = 0

    @classmethod
    def this(cls, started_at: str, environment: Mapping[str, str] | None = None) -> "Process":
        """This process."""
        environment = os.environ if environment is None else environment
        job = environment.get("SLURM_JOB_ID", "")
        restart = environment.get("SLURM_RESTART_COUNT", "0")
        state = _look(os.getpid())
        birth = state[1] if state else ""
        return cls(
            socket.gethostname(),
            os.getpid(),
            _machine(),
            birth,
            started_at,
            job,
            int(restart) if restart.isascii() and restart.isdigit() else 0,
        )

    @property
    def is_here(self) -> bool:
        """Whether the kernel of this machine can be asked about it."""
        return self.machine == _machine()

    @property
    def runs(self) -> bool:
        """Whether it still runs. Only of a process that `is_here`."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state = _look(self.pid)
        # Where the system has no /proc, only the number is known.
        return state is None or (state[0] not in _ENDED and state[1] == self.birth)

    def was_requeued_as(self, other: "Process") -> bool:
        """Whether `other` belongs to a later start of the same SLURM job: SLURM has ended the earlier one then, wherever it ran."""
        return bool(self.slurm_job) and self.slurm_job == other.slurm_job and self.slurm_restart < other.slurm_restart

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def owner_id(process: Process | None = None) -> str:
    """A word that tells a process, by default this one, from all others that may write in the same folder: of hex digits and its pid."""
    machine, pid = (_machine(), os.getpid()) if process is None else (process.machine, process.pid)
    return f"{hashlib.sha256(machine.encode()).hexdigest()[:8]}-{pid}"


@functools.cache
def _machine() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _look(pid: int) -> tuple[str, str] | None:
    """The state of a process and its start time in the kernel's ticks since boot, or None where the system does not tell."""
    try:
        # The command's name, in parentheses, may hold spaces; the state follows it, and the start time 19 fields later (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None
