"""Which process works on a run folder: a heartbeat with its host and pid, and the way for another process to ask it to stop."""

import contextlib
import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from harvest.contract import utc_now
from harvest.errors import CancelledError, StorageError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.stop import GOES_ON, StopFlag

_LOOK_EVERY_S = 0.5
_BEAT_EVERY_S = 5.0
# A process on another host cannot be asked whether it lives; it is taken for dead when it has not been heard of for so long.
_SILENT_AFTER = timedelta(seconds=90)


@dataclass(frozen=True)
class Process:
    """A process that works on a run. birth: the kernel's start time of the pid, which tells it from a later process of the same number."""

    host: str
    pid: int
    birth: str
    beat_at: str

    @classmethod
    def this(cls) -> "Process":
        """This process, now."""
        return cls(socket.gethostname(), os.getpid(), _birth(os.getpid()), utc_now().isoformat())

    @property
    def beat_time(self) -> datetime:
        """When it was last heard of."""
        return datetime.fromisoformat(self.beat_at)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs: asked of the kernel on its own host, and judged by its last heartbeat elsewhere."""
        if self.host != socket.gethostname():
            return utc_now() - self.beat_time < _SILENT_AFTER
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _birth(self.pid) == self.birth

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read_process(folder: RunFolder) -> Process | None:
    """The process that works, or worked, on a folder; None where none is written down."""
    try:
        return Process(**json.loads(folder.process.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class Presence:
    """Makes this process known in a run folder while the context lasts, and passes on another process's wish to stop it."""

    def __init__(self, folder: RunFolder, stop: StopFlag) -> None:
        self._folder = folder
        self._stop = stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="harvest-presence", daemon=True)

    def __enter__(self) -> Self:
        self._folder.cancel.unlink(missing_ok=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        for path in (self._folder.process, self._folder.cancel):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _watch(self) -> None:
        looks = 0
        while not self._ended.wait(_LOOK_EVERY_S):
            looks += 1
            if self._folder.cancel.exists():
                self._stop.ask(CancelledError(f"cancelled; {GOES_ON}"))
            if looks % round(_BEAT_EVERY_S / _LOOK_EVERY_S) == 0:
                # A heartbeat that cannot be written is no reason to end the run: the next may succeed.
                with contextlib.suppress(StorageError):
                    self._beat()

    def _beat(self) -> None:
        durable.write_whole(self._folder.process, json.dumps(asdict(Process.this())).encode())


def _birth(pid: int) -> str:
    """The start time of a process in the kernel's ticks since boot, or nothing where the system does not tell."""
    try:
        # The command's name, in parentheses, may hold spaces; the start time is the 20th field after it (proc(5), /proc/pid/stat).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
