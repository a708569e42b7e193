"""The run folder: every path in it, and the records of what is published there."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harvest.contract import utc_now
from harvest.errors import NotARunError
from harvest.output import durable

Fingerprint = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What is known of one published shard.

    fingerprint: what the shard's bytes depend on; a shard of another request is never taken for this one's.
    prompts: the first prompt, and one past the last.
    bytes, sha256: of the file.
    """

    shard: int
    fingerprint: Fingerprint
    prompts: tuple[int, int]
    tokens: int
    bytes: int
    sha256: str
    published_at: str

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record in a file, or None where there is none that can be read."""
        try:
            fields = json.loads(path.read_bytes())
            return cls(**fields | {"prompts": tuple(fields["prompts"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class RunFolder:
    """A run folder on a local file system, and the one owner of its layout."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.job = self.path / "job.json"
        self.request = self.path / "request.json"
        self.stats = self.path / "stats.safetensors"
        self.manifest = self.path / "manifest.json"
        # There only while the folder becomes a copy of a run, and as long as that copy is not whole.
        self.copying = self.path / "copying.json"
        # These two are there only while a process works on the run.
        self.process = self.path / "process.json"
        self.cancel = self.path / "cancel.json"
        self._shards = self.path / "shards"
        self._records = self.path / "records"
        self._fingerprint = self._records / "fingerprint.json"

    def make(self) -> None:
        """Make the folder and those in it."""
        for folder in (self.path, self._shards, self._records):
            durable.make_folder(folder)

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

    def write_record(self, shard: int, fingerprint: Fingerprint, prompts: tuple[int, int], tokens: int, n_bytes: int, sha256: str) -> None:
        """Record a shard that was just published."""
        published_at = utc_now().isoformat(timespec="milliseconds")
        record = Record(shard, fingerprint, prompts, tokens, n_bytes, sha256, published_at)
        durable.write_whole(self.record(shard), json.dumps(asdict(record), indent=2).encode())

    def finished(self, index: int, fingerprint: Fingerprint) -> Record | None:
        """The record of a shard that is published, of this fingerprint, and whose file's bytes are still what they were."""
        record = Record.read(self.record(index))
        if record is None or record.fingerprint != fingerprint:
            return None
        path = self.shard(index)
        return record if path.is_file() and durable.file_sha256(path) == record.sha256 else None

    def published(self, index: int) -> Record:
        """The record of a shard that this run has just found or made whole. Raises NotARunError where it has gone since."""
        record = Record.read(self.record(index))
        if record is None:
            raise NotARunError(f"{self.record(index)}: the record of a finished shard is gone; run the same command again to make it anew")
        return record

    def is_there(self, index: int) -> bool:
        """Whether a shard's file and record are there and the file has its length; a glance, where `finished` reads every byte."""
        record, path = Record.read(self.record(index)), self.shard(index)
        return record is not None and path.is_file() and path.stat().st_size == record.bytes

    def n_records(self) -> int:
        """How many shards have a record."""
        return len(list(self._records.glob("shard_*.json")))

    def write_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Write down whose folder this is, before anything is published in it."""
        durable.write_whole(self._fingerprint, json.dumps(fingerprint, indent=2).encode())

    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the run that the folder belongs to, or None where no run has begun in it."""
        try:
            return dict(json.loads(self._fingerprint.read_bytes()))
        except (OSError, ValueError, TypeError):
            records = (Record.read(path) for path in sorted(self._records.glob("shard_*.json")))
            return next((record.fingerprint for record in records if record is not None), None)

    def remove_temporary(self) -> int:
        """Remove the files that a process left half written; answers how many there were."""
        leftovers = [path for folder in (self.path, self._shards, self._records) for path in folder.glob("*") if durable.is_temporary(path)]
        for path in leftovers:
            with durable.storing(path):
                path.unlink()
        return len(leftovers)
