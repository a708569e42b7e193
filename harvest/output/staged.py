"""A run folder whose files go to an object store: documents lie there, and shards wait in a local folder until they do too.

What makes a run safe stays local and as it is: shards are published and recorded here, and processes claim their parts here. Then a shard
goes up, is checked, and its record follows, with the store's word for its bytes (its ETag); only then is the local file removed. A shard
counts as finished where the store lists an object of the size and the ETag that its record names, on whichever machine that is asked.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from harvest.contract import URL_LIFETIME, utc_now
from harvest.errors import FolderError, NotARunError, RequestError, StorageError
from harvest.output import durable
from harvest.output.credentials import end_of_link
from harvest.output.folder import Links, RunFolder
from harvest.output.record import Fingerprint, Record
from harvest.output.store import Found, Store, is_url
from harvest.output.upload import MOST_WAITING, BusyClock, Uploads
from harvest.settings import cache_folder
from harvest.stop import StopFlag

RETRY_S = 180.0
_FOLDERS = ("records/", "shards/")


def open_folder(
    out: str | Path | RunFolder,
    stage: str | Path | None = None,
    keep_local: bool = False,
    retry_s: float = RETRY_S,
    stop: StopFlag | None = None,
) -> RunFolder:
    """The run folder that a name stands for: a local one, or that of an object store's URL, which is looked at now.

    stage: where shards wait on their way to a store; by default a folder of the URL's own below harvest's cache.
    keep_local: they stay there once they are in the store.
    retry_s: how long a request that a store refuses or does not answer is tried again.
    stop: what is asked of the store is given up once it is set.
    Raises FolderError where the store cannot be reached, or there is no such bucket, or it is not for these credentials.
    """
    if isinstance(out, RunFolder):
        return out
    if not is_url(out):
        if isinstance(out, Path) and is_url(f"{out.parts[0]}//" if out.parts else ""):
            raise RequestError(f"out: Path({str(out)!r}) was given; name a place in an object store as a str, since a Path drops a slash")
        return RunFolder(Path(out))
    folder = StagedFolder(Store(str(out), retry_s, stop), None if stage is None else Path(stage), keep_local)
    try:
        folder.refresh()
    except StorageError as error:
        raise FolderError(f"out: {error}") from error
    folder.store.be_patient()
    return folder


class StagedFolder(RunFolder):
    """The folder of a run below an object store's URL."""

    where = "in the store or on their way"
    readers = 16
    look_every_s = 2.0

    def __init__(self, store: Store, stage: Path | None, keep_local: bool) -> None:
        digest = hashlib.sha256(store.url.encode()).hexdigest()[:16]
        super().__init__(cache_folder() / "stage" / digest if stage is None else stage)
        self.store = store
        self.name = store.url
        self.most_shards = None if keep_local else MOST_WAITING + 2
        self._keeps = keep_local
        # Says whose shards wait here.
        self._owner = self.path / "store.json"
        self._clock = BusyClock()
        self._uploads: Uploads | None = None
        self._objects: dict[str, Found] = {}
        self._top: set[str] = set()
        # None: not fetched yet.
        self._known: dict[int, Record] | None = None

    @property
    def upload_s(self) -> float:
        """Seconds in which at least one file was on its way to the store."""
        return self._clock.total_s

    def refresh(self) -> None:
        """List what the store holds."""
        self._top = self.store.list_top()
        folders = [name for name in _FOLDERS if name in self._top]
        self._objects = {key: found for name in folders for key, found in self.store.list_below(name.rstrip("/")).items()}
        self._known = None

    def make(self) -> None:
        """Make the local folder. Raises FolderError where it is that of something else."""
        owner = json.dumps({"url": self.store.url}).encode()
        if self.path.exists() and not self._owner.exists() and any(self.path.iterdir()):
            raise FolderError(f"stage: {self.path} holds something else; name a new or empty folder for shards on their way")
        super().make()
        if not durable.write_new(self._owner, owner) and self._owner.read_bytes() != owner:
            raise FolderError(f"stage: {self.path} holds shards on their way to another place; name a folder of this run's own")

    @property
    def exists(self) -> bool:
        """Whether the store was seen: a place there needs no making."""
        return True

    @property
    def sees_processes(self) -> bool:
        """Whether processes of this machine have worked on it: those of others are not known here."""
        return self.path.exists()

    @property
    def is_vacant(self) -> bool:
        """Whether nothing lies below the URL."""
        return not self._objects and self._top <= set(_FOLDERS)

    def has(self, path: Path) -> bool:
        """Whether a document is in the store."""
        return self.store.head(self._key(path)) is not None

    def read(self, path: Path) -> bytes:
        """A document in the store. Raises FileNotFoundError where it is not there, StorageError where the store does not answer."""
        data = self.store.read(self._key(path))
        if data is None:
            raise FileNotFoundError(self.store.link(self._key(path)))
        return data

    def write(self, path: Path, data: bytes) -> None:
        """Write or replace a document in the store."""
        with self._clock.busy():
            self.store.write(self._key(path), data)

    def write_new(self, path: Path, data: bytes) -> bool:
        """Write a document in the store where there is none; answers whether it did."""
        with self._clock.busy():
            return self.store.write_new(self._key(path), data)

    def remove(self, path: Path) -> None:
        """Remove a file of the run, here and from the store."""
        # To delete what is not there takes the permission to delete too.
        if self.has(path):
            self.store.delete(self._key(path))
        self._objects.pop(self._key(path), None)
        if path.exists():
            durable.remove(path)

    def contents(self) -> dict[Path, int]:
        """All files of the run, here and in the store, in an order in which they may be removed: what says more goes first."""
        sizes = {self.path / key: found.size for key, found in self._objects.items() if key != self._key(self._fingerprint)}
        documents = (self.manifest, self.job, self.stats, self.request)
        first = {path: found.size for path in documents if (found := self.store.head(self._key(path))) is not None}
        last = self._objects.get(self._key(self._fingerprint))
        return first | sizes | super().contents() | ({self._fingerprint: last.size} if last else {})

    def recorded(self) -> set[int]:
        """The numbers of the shards that the store has a record of, or that wait here to go there."""
        waiting = {index for index in super().recorded() if (record := Record.read(self.record(index))) and record.e_tag is None}
        return waiting | self._listed()

    def finished(self, index: int, fingerprint: Fingerprint, on_damage: Callable[[str], None] = lambda _: None) -> Record | None:
        """The record of a shard of this fingerprint that is in the store, or here as a whole and still to go there."""
        record = self._stored(index)
        if record is not None and record.fingerprint == fingerprint:
            return record
        if self._key(self.record(index)) in self._objects and not self.shard(index).exists():
            on_damage(f"{self.store.link(self.shard_key(index))} is not what was uploaded, or of another run")
            return None
        return super().finished(index, fingerprint, on_damage)

    def is_there(self, index: int, fingerprint: Fingerprint) -> bool:
        """Whether a shard of this fingerprint is in the store."""
        record = self._stored(index)
        return record is not None and record.fingerprint == fingerprint

    def published(self, index: int) -> Record:
        """The record of a shard that is in the store. Raises NotARunError where it has gone since."""
        record = self._stored(index)
        if record is None:
            raise NotARunError(f"{self.store.link(self.shard_key(index))}: a finished shard is gone; run the same command again")
        return record

    def write_record(self, shard: int, *fields: Any, **more: Any) -> None:
        """Record a shard that was just published, and send it on its way."""
        super().write_record(shard, *fields, **more)
        if self._uploads is not None:
            self._uploads.submit(shard)

    def make_room(self) -> None:
        """Wait until fewer shards lie here than may. Raises what ended the uploads."""
        if self._uploads is not None:
            self._uploads.wait_for_room()

    @contextmanager
    def carrying(self, finished: Collection[int], stop: StopFlag, note: Callable[[str], None]) -> Iterator[None]:
        """While shards are published: takes them to the store, and those of `finished` that wait here; ends when all are there."""
        note(f"shards wait in {self.path} on their way to the store{', and stay there' if self._keeps else ''}")
        self._uploads = uploads = Uploads(self._upload, stop)
        try:
            for index in sorted(finished):
                if (record := self._stored(index)) is None:
                    uploads.submit(index)
                else:
                    self._settle(index, record)
            yield
            if uploads.n_left:
                note(f"{uploads.n_left} shards are still on their way to {self.name}")
            uploads.finish()
        except BaseException:
            # What is left to be said to the store must not take long: it may be what has gone.
            self.store.be_quick()
            raise
        finally:
            uploads.end()
            self._uploads = None

    @contextmanager
    def open_shard(self, index: int) -> Iterator[IO[bytes]]:
        """The bytes of a shard: of the local file where it is here, else of the object, whose end is read first."""
        if self.shard(index).exists():
            with super().open_shard(index) as file:
                yield file
        else:
            key = self.shard_key(index)
            yield self.store.open(key, self._objects[key].size)

    def links(self, n_shards: int) -> dict[str, Any]:
        """The places of a run's files in the store: links are signed for each answer anew, and never stored."""
        return {
            "manifest_url": self.store.link(self.manifest.name),
            "shard_urls": [self.store.link(self.shard_key(index)) for index in range(n_shards)],
            "stats_url": self.store.link(self.stats.name),
        }

    def fresh_links(self, n_shards: int) -> Links:
        """Signed links for seven days, or as long as the credentials last that sign them."""
        keys = [self.manifest.name, self.stats.name, *(self.shard_key(index) for index in range(n_shards))]
        try:
            manifest, stats, *shards = self.store.sign(keys, URL_LIFETIME)
        except StorageError as error:
            # As where a login of a person, and no key of an account, is what gives access.
            return Links(self.links(n_shards), utc_now() + URL_LIFETIME, f"the links are not signed, and need credentials: {error}")
        end, sooner = end_of_link(manifest, URL_LIFETIME)
        return Links({"manifest_url": manifest, "shard_urls": shards, "stats_url": stats}, end, sooner)

    def _upload(self, index: int, check: Callable[[], None]) -> None:
        """Take a shard and then its record to the store; then the local file may go."""
        record = Record.read(self.record(index))
        if record is None:
            raise StorageError(f"{self.record(index)}: the record of a published shard is gone; run the same command again")
        key, at_record = self.shard_key(index), self._key(self.record(index))
        with self._clock.busy(), durable.storing(self.shard(index)):
            self._objects[key] = found = self.store.upload(key, self.shard(index), record.sha256, check)
            record = replace(record, e_tag=found.e_tag)
            self._objects[at_record] = self.store.write(at_record, record.to_json().encode())
        if self._known is not None:
            self._known[index] = record
        self._settle(index, record)

    def _settle(self, index: int, record: Record) -> None:
        """Write down here that a shard is in the store, and remove its local file."""
        durable.write_whole(self.record(index), record.to_json().encode())
        if not self._keeps and self.shard(index).exists():
            durable.remove(self.shard(index))

    def _stored(self, index: int) -> Record | None:
        """The record of a shard that the store holds, by its size and its ETag, as the record says."""
        if self._known is None:
            with ThreadPoolExecutor(self.readers) as pool:
                found = pool.map(self._find_record, self._listed())
            self._known = {record.shard: record for record in found if record is not None}
        return self._known.get(index)

    def _find_record(self, index: int) -> Record | None:
        key = self.shard_key(index)
        found = self._objects.get(key)
        here = Record.read(self.record(index))
        if found is not None and here is not None and (here.bytes, here.e_tag) == (found.size, found.e_tag):
            return here
        record = Record.parse((self.store.read(self._key(self.record(index))) or b"").decode(errors="replace"))
        if record is None or found is None or record.shard != index or record.bytes != found.size:
            return None
        # Some servers list another ETag than they answer for the object.
        return record if record.e_tag == found.e_tag or Found(record.bytes, record.e_tag or "") == self.store.head(key) else None

    def _listed(self) -> set[int]:
        """The numbers of the shards that the store has a record of."""
        names = (re.fullmatch(r"records/shard_(\d+)\.json", key) for key in self._objects)
        return {int(name[1]) for name in names if name}

    def _key(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()
