"""The run folder: every path in it, its documents, and the records of what is published there."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any

from harvest.contract import URL_LIFETIME, utc_now
from harvest.errors import NotARunError
from harvest.output import durable
from harvest.output.record import Fingerprint, Record
from harvest.stop import StopFlag


@dataclass(frozen=True)
class Links:
    """A run's links, as the result of a job has them, and until when they work. sooner: why that is sooner than the API's 7 days."""

    fields: dict[str, Any]
    expire_at: datetime
    sooner: str | None = None


class RunFolder:
    """A run folder on a local file system, and the one owner of its layout.

    The documents of a run (job, request, fingerprint, stats, manifest) are read and written through it alone, and what it says of shards
    is asked of it: `harvest.output.staged` has the same for a run whose files go to an object store.
    """

    # Of so many shards at once the disk must have room; None: of all.
    most_shards: int | None = None
    # Of its shards a note says that they are there.
    where = "on disk"
    # So many of its shards are read side by side.
    readers = 1
    # Whoever waits for its job to change looks so often.
    look_every_s = 0.1

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        # What errors and notes call it.
        self.name = str(self.path)
        self.job = self.path / "job.json"
        self.request = self.path / "request.json"
        self.stats = self.path / "stats.safetensors"
        self.manifest = self.path / "manifest.json"
        # There only while the folder becomes a copy of a run, and as long as that copy is not whole.
        self.copying = self.path / "copying.json"
        # These two are there only while processes work on the run.
        self.processes = self.path / "processes"
        self.cancel = self.path / "cancel.json"
        self._shards = self.path / "shards"
        self._records = self.path / "records"
        self._fingerprint = self._records / "fingerprint.json"
        # What was asked for, in a digest that takes neither a tokenizer nor a model to compare.
        self.asked = self._records / "asked.json"

    def make(self) -> None:
        """Make the folder and those in it."""
        for folder in (self.path, self._shards, self._records):
            durable.make_folder(folder)

    def refresh(self) -> None:
        """Look anew at what other processes may have changed; here every look is a new one."""

    @property
    def exists(self) -> bool:
        """Whether there is anything of that name."""
        return self.path.exists()

    @property
    def sees_processes(self) -> bool:
        """Whether the processes that work on it are known here."""
        return True

    @property
    def upload_s(self) -> float:
        """Seconds in which files of the run were on their way to an object store."""
        return 0.0

    def has(self, path: Path) -> bool:
        """Whether a document is there."""
        return path.exists()

    def read(self, path: Path) -> bytes:
        """A document. Raises OSError where it is not there, or cannot be read."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """Write or replace a document in one step."""
        durable.write_whole(path, data)

    def write_new(self, path: Path, data: bytes) -> bool:
        """Write a document where there is none; answers whether it did."""
        return durable.write_new(path, data)

    def remove(self, path: Path) -> None:
        """Remove a file of the run."""
        durable.remove(path)

    @property
    def is_vacant(self) -> bool:
        """Whether the folder holds nothing but what a process leaves that died as it began."""
        own = (self._shards, self._records)
        others = [path for path in self.path.iterdir() if path not in own and path != self.processes]
        others += [path for folder in own if folder.is_dir() for path in folder.iterdir()]
        return all(durable.is_temporary(path) for path in others)

    def shard(self, index: int) -> Path:
        """The file of a shard."""
        return self._shards / f"shard_{index:05d}.zarr.zip"

    def shard_key(self, index: int) -> str:
        """The place of a shard below the run folder, as the manifest writes it."""
        return self.shard(index).relative_to(self.path).as_posix()

    def shard_file(self, index: int) -> Path:
        """The file of a published shard of either kind: by the API's name where the folder holds it, else harvest's own."""
        names = (f"shard_{index:05d}.safetensors", f"shard_{index:05d}.safetensors.gz")
        return next((path for name in names if (path := self.path / name).is_file()), self.shard(index))

    def find(self, key: str) -> Path:
        """The file of a shard by its key in a manifest: below the run folder, or in the folder itself by the last part of the key.

        The API's keys are those of its own storage, so the files of its results lie in a folder by that part alone.
        """
        below, beside = self.path / key, self.path / PurePosixPath(key).name
        is_inside = not PurePosixPath(key).is_absolute() and ".." not in PurePosixPath(key).parts
        return beside if not is_inside or (beside.is_file() and not below.is_file()) else below

    def record(self, index: int) -> Path:
        """The file of a shard's record."""
        return self._records / f"shard_{index:05d}.json"

    def write_record(
        self,
        shard: int,
        fingerprint: Fingerprint,
        prompts: tuple[int, int],
        tokens: int,
        sha256: str,
        nonfinite: tuple[int, ...] = (),
        batch_tokens: int | None = None,
    ) -> None:
        """Record a shard that was just published."""
        with durable.storing(self.shard(shard)):
            found = self.shard(shard).stat()
        published_at = utc_now().isoformat(timespec="milliseconds")
        record = Record(
            shard, fingerprint, prompts, tokens, found.st_size, sha256, found.st_mtime_ns, published_at, nonfinite, batch_tokens
        )
        durable.write_whole(self.record(shard), record.to_json().encode())

    def make_room(self) -> None:
        """Called before a shard is begun; returns when there is room for it."""

    @contextmanager
    def carrying(self, finished: Collection[int], stop: StopFlag, note: Callable[[str], None]) -> Iterator[None]:  # noqa: ARG002
        """While shards are published: takes them, and those of `finished`, to where the run lies. Here they are there already."""
        yield

    @contextmanager
    def open_shard(self, index: int) -> Iterator[IO[bytes]]:
        """The bytes of a published shard."""
        with durable.storing(self.shard(index)), open(self.shard(index), "rb") as file:
            yield file

    def links(self, n_shards: int) -> dict[str, Any]:
        """The result's links to a run's files, as job.json keeps them."""
        return {
            "manifest_url": self.manifest.as_uri(),
            "shard_urls": [self.shard_file(index).as_uri() for index in range(n_shards)],
            "stats_url": self.stats.as_uri(),
        }

    def fresh_links(self, n_shards: int) -> Links:
        """The links of one answer, good for seven days from now."""
        return Links(self.links(n_shards), utc_now() + URL_LIFETIME)

    def finished(self, index: int, fingerprint: Fingerprint, on_damage: Callable[[str], None] = lambda _: None) -> Record | None:
        """The record of a shard that is published, of this fingerprint, and whose file's bytes are still what they were: all are read.

        on_damage: told what is wrong with one that was published and is no longer what it was.
        """
        path, at_record = self.shard(index), self.record(index)
        record = Record.read(at_record)
        if record is None:
            if at_record.exists():
                on_damage(f"{at_record.name} cannot be read")
            elif path.exists():
                on_damage(f"{path.name} has no record")
        elif record.fingerprint != fingerprint:
            on_damage(f"{path.name} is of another run")
        elif not path.is_file():
            on_damage(f"{path.name} is missing")
        elif path.stat().st_size != record.bytes or durable.file_sha256(path) != record.sha256:
            on_damage(f"{path.name} is not what was published: its checksum differs")
        else:
            return record
        return None

    def published(self, index: int) -> Record:
        """The record of a shard that this run has just found or made whole. Raises NotARunError where it has gone since."""
        record = Record.read(self.record(index))
        if record is None:
            raise NotARunError(f"{self.record(index)}: the record of a finished shard is gone; run the same command again to make it anew")
        return record

    def is_there(self, index: int, fingerprint: Fingerprint) -> bool:
        """Whether a shard of this fingerprint is published: a glance at its file's size and time, where `finished` reads every byte.

        A file of another time was copied, or written to: then its checksum is looked at.
        """
        record, path = Record.read(self.record(index)), self.shard(index)
        if record is None or record.fingerprint != fingerprint or not path.is_file():
            return False
        found = path.stat()
        if found.st_size != record.bytes:
            return False
        return found.st_mtime_ns == record.modified_ns or durable.file_sha256(path) == record.sha256

    def recorded(self) -> set[int]:
        """The numbers of the shards that have a record.

        By listing the folder: over NFS a name that was asked for before it was there may still look missing for a while.
        """
        return {int(name[1]) for path in self._records.glob("shard_*.json") if (name := re.fullmatch(r"shard_(\d+)\.json", path.name))}

    def write_fingerprint(self, fingerprint: Fingerprint, is_shared: bool = False) -> None:
        """Write down whose folder this is, before anything is published in it. Where it is shared, what is there stays."""
        data = json.dumps(fingerprint, indent=2).encode()
        if is_shared:
            self.write_new(self._fingerprint, data)
        else:
            self.write(self._fingerprint, data)

    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the run that the folder belongs to, or None where no run has begun in it."""
        try:
            return dict(json.loads(self.read(self._fingerprint)))
        except (OSError, ValueError, TypeError):
            records = (Record.read(self.record(index)) for index in sorted(self.recorded()))
            return next((record.fingerprint for record in records if record is not None), None)

    def temporary(self) -> list[Path]:
        """The files that are being written, or that a process left half written."""
        folders = (self.path, self._shards, self._records, self.processes)
        return [path for folder in folders for path in sorted(folder.glob("*")) if durable.is_temporary(path)]

    def remove_temporary(self, at_work: Collection[str] = ()) -> int:
        """Remove the files that dead processes left half written; answers how many there were.

        at_work: the processes that are not dead, by `harvest.output.process.owner_id`.
        """
        leftovers = [path for path in self.temporary() if not durable.is_temporary_of(path, at_work)]
        for path in leftovers:
            with durable.storing(path):
                path.unlink(missing_ok=True)
        return len(leftovers)

    def contents(self) -> dict[Path, int]:
        """All files of the run that are there and their bytes, in an order in which they may be removed: what says more goes first."""
        documents = [self.manifest, self.job, self.stats, self.request, self.cancel]
        shards = [path for folder in (self._records, self._shards) for path in sorted(folder.glob("*")) if path != self._fingerprint]
        return {path: path.stat().st_size for path in [*documents, *shards, *self.temporary(), self._fingerprint] if path.is_file()}
