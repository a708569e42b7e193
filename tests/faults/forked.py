"""Runs of tiny in processes of their own, forked from one that has the libraries loaded: a start takes a tenth of a second.

The process that forks never computes, so no thread of torch is lost in a fork.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from conftest import TEXTS

import harvest
from harvest.parts import WHOLE, Part
from harvest.progress import Silent
from harvest.stop import StopFlag, stopping_on_signals

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["conftest", "harvest.pipeline", "harvest.model.tiny", "forked"])

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Task:
    """A run in a process of its own. setup is called there first, with the folder; it must be a function of a module."""

    folder: Path
    setup: Callable[..., None] | None = None
    arguments: tuple[Any, ...] = ()
    prompts: tuple[str, ...] = tuple(TEXTS)
    shard_size: int = 2
    engine: dict[str, Any] = field(default_factory=dict)
    part: Part = WHOLE
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> Path:
        """Where the process writes its notes and its error: beside no run, since that disk may be full."""
        name = hashlib.sha256(f"{self.folder} {self.part}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"harvest-said-{name}"


class _Notes(Silent):
    def __init__(self, path: Path) -> None:
        # Opened now: later this process may have no right to, or no file descriptor left.
        self._file = path.open("w", buffering=1)

    def note(self, text: str) -> None:
        self._file.write(text + "\n")


def _work(task: Task) -> None:
    import torch

    torch.set_num_threads(1)
    notes = _Notes(task.said)
    stop = StopFlag()
    try:
        if task.setup is not None:
            task.setup(task.folder, *task.arguments)
        request = harvest.HarvestRequest(model="tiny", prompts=list(task.prompts), layers="all", shard_size=task.shard_size)
        with stopping_on_signals(stop, requeues=bool(task.options.get("requeues"))):
            options = {name: value for name, value in task.options.items() if name != "requeues"}
            harvest.run(request, task.folder, harvest.Engine(**task.engine), notes, stop, part=task.part, **options)
    except harvest.HarvestError as error:
        notes.note(f"error: {error}")
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        os._exit(error.exit_code)
    except BaseException:
        notes.note(traceback.format_exc())
        os._exit(99)
    os._exit(0)


def start(task: Task) -> ForkServerProcess:
    """A process that carries out a task."""
    process = CONTEXT.Process(target=_work, args=(task,), daemon=True)
    process.start()
    return process


def wait(process: ForkServerProcess) -> int:
    """The exit code of a process, minus the signal's number where one ended it. A process that hangs is killed, and fails the test."""
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process did not end within {TIMEOUT_S} s")
    return process.exitcode


def run(task: Task) -> tuple[int, str]:
    """The exit code of a task, and what it said."""
    code = wait(start(task))
    said = task.said.read_text()
    task.said.unlink()
    return code, said


@contextmanager
def started(task: Task) -> Iterator[ForkServerProcess]:
    """A process that works while the context lasts, and is killed at its end where it still does."""
    process = start(task)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
        process.join()


def content(folder: Path) -> dict[str, bytes]:
    """The bytes that a run promises to be the same: its shards and its stats."""
    files = [*sorted((folder / "shards").iterdir()), folder / "stats.safetensors"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
