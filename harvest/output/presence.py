"""Which processes work on a run folder: each claims its part, gives signs of life, and hears when another asks it to stop.

A claim is a file in processes/, made with a link, which one process alone can make, over NFS too; nothing here locks files. A dead
process leaves its claim behind. The next takes the same part under the next generation's name, so that of two that find the dead one
only one does, and nobody removes what is not its own. Then it looks once more: a claim that conflicts and was made in the meantime, by
a process that had seen an older folder, makes it withdraw.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harvest.contract import utc_now
from harvest.errors import CancelledError, FolderError, StorageError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.process import Process
from harvest.parts import WHOLE, Part
from harvest.stop import GOES_ON, StopFlag

_LOOK_EVERY_S = 0.5
_BEAT_EVERY_S = 5.0
# A process of another machine cannot be asked whether it lives; it is taken for dead when it gives no sign for so long.
_SILENT_AFTER = timedelta(seconds=90)
# After so long without one, by the clocks of both machines, nobody waits for a sign any more.
_LONG_SILENT_AFTER = timedelta(minutes=10)
_ATTEMPTS = 20
# Part, count and generation.
_NAME = re.compile(r"part-(\d+)-of-(\d+)-(\d+)\.json", re.ASCII)


@dataclass(frozen=True)
class Claim:
    """A part of a run that a process works on, or worked on until it died.

    beat_at: its last sign of life, by the clock of its machine.
    """

    path: Path
    part: Part
    process: Process
    beat_at: datetime

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs; of another machine's, whether it gave a sign within 90 seconds."""
        return self.process.runs if self.process.is_here else utc_now() - self.beat_at < _SILENT_AFTER

    def conflicts(self, part: Part) -> bool:
        """Whether another process may not take `part` beside this one: the same, or one of another count, which would overlap."""
        return self.part.count != part.count or self.part.index == part.index

    def __str__(self) -> str:
        return str(self.process) if self.part.is_whole else f"{self.process} ({self.part})"


def claims(folder: RunFolder) -> list[Claim]:
    """All claims in a folder, those of dead processes too, in the order of their names."""
    return [claim for path in sorted(folder.processes.glob("*.json")) if (claim := _read(path)) is not None]


def live_claims(folder: RunFolder) -> list[Claim]:
    """The claims of processes that work on a folder now."""
    return [claim for claim in claims(folder) if claim.is_alive]


def check_free(folder: RunFolder, part: Part = WHOLE) -> None:
    """Raise FolderError where a process of this machine works on the part: a look before time is spent, and no claim yet."""
    for claim in claims(folder):
        if claim.conflicts(part) and claim.process.is_here and claim.process.runs:
            raise _occupied(folder, claim)


class Presence:
    """Claims a part of a run folder while the context lasts, and passes on another process's wish to stop this one."""

    def __init__(self, folder: RunFolder, stop: StopFlag, part: Part = WHOLE, on_wait: Callable[[str], None] | None = None) -> None:
        """on_wait: told, once, when another machine's process may be dead and its signs of life are waited for."""
        self._folder = folder
        self._stop = stop
        self._part = part
        self._on_wait = on_wait
        self._process = Process.this(utc_now().isoformat())
        self._ended = threading.Event()
        # How far this process is, for who asks from elsewhere; None while there is nothing to say.
        self.shows: Callable[[], dict[str, Any] | None] = lambda: None
        self._thread = threading.Thread(target=self._watch, name="harvest-presence", daemon=True)
        self._path = Path()
        # Claims that were found to be dead, though their last sign of life may look recent by this machine's clock.
        self._dead: set[Claim] = set()

    def __enter__(self) -> Self:
        """Raises FolderError where another process works on the part, or on parts of another count, or nothing can be written there."""
        try:
            self._claim()
        except StorageError as error:
            raise FolderError(f"out: {error}") from error
        if not self.others():
            # What was asked of the processes before is no wish about this one.
            self._folder.cancel.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        # An error that is on its way must not be hidden by another.
        with contextlib.suppress(OSError):
            _remove(self._path)
            if not self.others():
                self._folder.cancel.unlink(missing_ok=True)
                self._folder.processes.rmdir()

    @property
    def holds(self) -> bool:
        """Whether the part is still this process's."""
        return self._path.exists() and not any(claim.part == self._part for claim in self.others())

    def others(self) -> list[Claim]:
        """The claims of the other processes that work on the folder now."""
        return [claim for claim in live_claims(self._folder) if claim.path != self._path and claim not in self._dead]

    def _claim(self) -> None:
        data = json.dumps(asdict(self._process)).encode()
        for _ in range(_ATTEMPTS):
            durable.make_folder(self._folder.processes)
            for claim in claims(self._folder):
                if claim.conflicts(self._part):
                    self._wait_for_death(claim)
                    self._dead.add(claim)
            self._path = self._next_path()
            with _retrying_where_the_folder_went():
                if durable.write_new(self._path, data):
                    break
        else:
            raise FolderError(f"out: {self._folder.processes}: another process always took {self._part} first; see what works there")
        rivals = [claim for claim in self.others() if claim.conflicts(self._part)]
        if rivals:
            _remove(self._path)
            raise _occupied(self._folder, rivals[0])
        for claim in claims(self._folder):
            if claim.path != self._path and claim.conflicts(self._part):
                _remove(claim.path)

    def _next_path(self) -> Path:
        """The name of this part's next generation. By names alone: a claim that cannot be read is passed over too."""
        stem = f"part-{self._part.index}-of-{self._part.count}-"
        names = (_NAME.fullmatch(path.name) for path in self._folder.processes.glob(f"{stem}*.json"))
        return self._folder.processes / f"{stem}{max((int(name[3]) for name in names if name), default=0) + 1}.json"

    def _wait_for_death(self, claim: Claim) -> None:
        """Return when the process of a claim is dead. Raises FolderError where it lives."""
        if claim.process.is_here:
            if claim.process.runs:
                raise _occupied(self._folder, claim)
            return
        if claim.process.was_requeued_as(self._process) or utc_now() - claim.beat_at > _LONG_SILENT_AFTER:
            return
        # Clocks of two machines may differ, so it is watched by this one's: a new sign of life says that it lives.
        if self._on_wait is not None:
            self._on_wait(
                f"{claim}, last heard of at {claim.beat_at:%H:%M:%S} UTC, holds {self._folder.path}; it cannot be asked from here, so it is"
                f" taken for dead after {_SILENT_AFTER.total_seconds():.0f} s without a sign (or sooner: where you know that it is dead, "
                f"remove {claim.path})"
            )
        deadline = time.monotonic() + _SILENT_AFTER.total_seconds()
        while time.monotonic() < deadline:
            self._stop.check()
            now = _read(claim.path)
            if now is None:
                return
            if now.beat_at != claim.beat_at:
                raise _occupied(self._folder, claim)
            time.sleep(_LOOK_EVERY_S)

    def _watch(self) -> None:
        looks = 0
        while not self._ended.wait(_LOOK_EVERY_S):
            looks += 1
            if self._folder.cancel.exists():
                self._stop.ask(CancelledError(f"cancelled; {GOES_ON}"))
            if looks % round(_BEAT_EVERY_S / _LOOK_EVERY_S) == 0:
                self._beat()

    def _beat(self) -> None:
        """A sign of life: the time of the claim's file. It needs no space, so it comes from a full disk too."""
        try:
            os.utime(self._path)
            if (shown := self.shows()) is not None:
                with contextlib.suppress(StorageError):
                    durable.write_whole(_shown(self._path), json.dumps(shown).encode())
        except FileNotFoundError:
            self._stop.ask(
                StorageError(
                    f"{self._path}: the claim of this process is gone, so another may work on the folder; see that none does, then run "
                    "the same command again"
                )
            )
        except OSError:
            # A sign that cannot be given is no reason to end the run: the next may succeed.
            return
        if self._path.exists() and not self.holds:
            self._stop.ask(StorageError(f"{self._folder.path}: another process took this one for dead and works on {self._part} now"))


def progress_of(claim: Claim) -> dict[str, Any] | None:
    """How far the process of a claim said that it is, a few seconds ago; None where it has said nothing yet."""
    try:
        return dict(json.loads(_shown(claim.path).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _shown(path: Path) -> Path:
    return path.with_suffix(".progress.json")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _shown(path).unlink(missing_ok=True)


def _occupied(folder: RunFolder, claim: Claim) -> FolderError:
    return FolderError(f"out: {claim} is working on {folder.path}; wait for it, stop it with harvest cancel, or name another folder")


@contextlib.contextmanager
def _retrying_where_the_folder_went() -> Iterator[None]:
    """The last process to leave takes the folder of claims away, which may be just now."""
    try:
        yield
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


def _read(path: Path) -> Claim | None:
    """The claim in a file, or None where there is none, or none that can be read."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        process = Process(**json.loads(path.read_bytes()))
        beat_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, ValueError, TypeError):
        return None
    return Claim(path, Part(int(match[1]), int(match[2])), process, beat_at)
