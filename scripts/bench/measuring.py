"""What all benches share: what machine this is, a child process with its time and memory, medians, and the JSON of measurements.

No torch here: a child begins with the memory of its parent counted in its peak, so the parent stays small.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from watch import Watch

ROOT = Path(__file__).resolve().parent.parent.parent
_LIBRARIES = ("harvest", "torch", "transformers", "zarr", "numcodecs", "numpy", "safetensors", "transformer-lens", "nnsight")


@dataclass(frozen=True)
class Child:
    """A process that has ended.

    peak_bytes: the most memory that it held, and by samples anon_bytes: of its own, mapped_bytes: of files. read_bytes: that the disk
    gave it, and not the system's cache. error: what it said last, where it failed.
    """

    wall_s: float
    peak_bytes: int
    anon_bytes: int
    mapped_bytes: int
    read_bytes: int
    stdout: str
    stderr: str
    error: str | None


def run_child(
    command: Sequence[str], threads: int | None = None, timeout_s: float = 3600, variables: Mapping[str, str] | None = None
) -> Child:
    """Run a process to its end, and measure it. threads: of torch and of the libraries under it. variables: more of its environment."""
    # A model lies on this machine, or the bench cannot be repeated; and no contender waits for a hub.
    environment = {"HF_HUB_OFFLINE": "1"} | dict(os.environ) | dict(variables or {})
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True)
        timer = threading.Timer(timeout_s, _kill, (process.pid,))
        timer.start()
        try:
            with Watch(process.pid) as watch:
                _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            _kill(process.pid)
            process.wait()
            raise
        finally:
            timer.cancel()
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    error = None
    if process.returncode:
        said = stderr.strip().splitlines() or ["it said nothing"]
        late = f"it was still at work after {timeout_s:g} s; " if wall_s >= timeout_s else ""
        error = f"{late}exit code {process.returncode}: {said[-1][:300]}"
        print(f"bench: {shlex.join(command)}\n{stderr}", file=sys.stderr)
    # The system counts what was read in pieces of 512 bytes.
    read_bytes = usage.ru_inblock * 512
    return Child(wall_s, usage.ru_maxrss * 1024, watch.anon_bytes, watch.mapped_bytes, read_bytes, stdout, stderr, error)


def _kill(process_group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Processes that were at work in the last minute, this bench's own among them; 0 where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def begin(kind: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The head of a JSON of measurements: what was run, when, where, and with which versions."""
    return {
        "kind": kind,
        "command": shlex.join(["python", "scripts/bench", kind, *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": _commit(),
    }


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {"system": platform.system(), "cpu": cpu, "cores": cores(), "memory_bytes": memory, "load_at_start": load()}


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of this checkout, and whether files differ from it; None where git cannot say."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_json(path: str | None, measured: dict[str, Any]) -> None:
    """Write measurements, where a file is named."""
    if path is not None:
        Path(path).write_text(json.dumps(measured, indent=1) + "\n")


def median(values: Iterable[float]) -> float:
    """The median of at least one value."""
    return float(statistics.median(values))


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in their order, begun with another one each turn: none is always first, and none always follows the same one."""
    turn %= max(1, len(names))
    return [*names[turn:], *names[:turn]]


def say(text: str) -> None:
    """Progress goes to stderr; tables alone go to stdout."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
