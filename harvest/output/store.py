"""An object store (s3, gs, az) by the few calls that a run needs of it, over obstore; its errors become StorageError here and nowhere else.

What it is reached by (endpoint, region, credentials) comes from the environment, by each cloud's usual variables.
"""

import functools
import hashlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from harvest.errors import NotARunError, RequestError, StorageError
from harvest.output.credentials import client_options, credentials
from harvest.output.objects import Digests, ObjectFile
from harvest.output.store_errors import advice, first_words
from harvest.stop import StopFlag, while_checking

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Store

P = ParamSpec("P")
T = TypeVar("T")

_URL = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]*)((?:/[^/]+)*)/?")
# The least that S3 takes is 5 MiB, and 10,000 parts are the most.
_PART_BYTES = 8 << 20
_MOST_PARTS = 10_000
# Parts of one file on their way at a time.
_PARTS_AT_ONCE = 4
_READ_BYTES = 32 << 20
# A request that has no answer by then is taken for lost: 16 parts at once come to 1.1 MB/s.
_REQUEST_S = 120.0
# So long a request is tried again before a run has begun, and after it has ended.
_SHORT_S = 10.0


@dataclass(frozen=True)
class Found:
    """An object of a store. e_tag: the store's word for its very bytes, without quotes; another for other bytes, "" where it has none."""

    size: int
    e_tag: str


def _heeding_a_stop(method: Callable[Concatenate["Store", P], T]) -> Callable[Concatenate["Store", P], T]:
    """A call that is given up soon once a stop is asked for."""

    @functools.wraps(method)
    def call(self: "Store", /, *arguments: P.args, **named: P.kwargs) -> T:
        return while_checking(self.check_stop, functools.partial(method, self, *arguments, **named))

    return call


def is_url(name: object) -> bool:
    """Whether this names a place in an object store, and no folder."""
    return isinstance(name, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def no_folder(path: str | Path) -> NotARunError:
    """The error for a run folder that is not there: what reads runs reads local ones."""
    hint = f"; a run in an object store is read here after harvest fetch {path} DIR" if is_url(str(path)) else ""
    return NotARunError(f"{path}: there is no such run folder{hint}")


class Store:
    """The objects below one URL, by their keys there."""

    def __init__(self, url: str, retry_s: float, stop: StopFlag | None = None) -> None:
        """retry_s: how long a request that fails is tried again. Raises RequestError; nothing is asked of the store yet."""
        match = _URL.fullmatch(url)
        if match is None or {".", ".."} & set(url.split("/")) or re.search(r"[?#\\\x00-\x1f]", url):
            raise RequestError(
                f"out: {url!r} was given; a place in an object store is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
            )
        try:
            import obstore.store
        except ImportError:
            raise RequestError(f"out: {url} needs obstore, which is not installed: pip install 'harvest[cloud]'") from None
        self.url = url.rstrip("/")
        self._scheme, self._bucket = match[1], match[2]
        self._retry_s = retry_s
        self._stop: StopFlag | None = stop
        self._from_url: Any = obstore.store.from_url
        try:
            self._quick = self._store = self._connect(min(retry_s, _SHORT_S))
        except Exception as error:
            # Of a bad endpoint or a variable that obstore cannot read: nothing was asked of anybody yet.
            raise RequestError(f"out: {url}: {first_words(str(error))}; see the store's variables in the environment") from error

    def be_patient(self) -> None:
        """From now on requests that fail are tried again for as long as was asked for: the store was seen to be there."""
        self._store = self._connect(self._retry_s)

    def be_quick(self) -> None:
        """From now on requests that fail are given up soon: the run has ended."""
        self._store = self._quick

    def check_stop(self) -> None:
        """Raise the stop that was asked for, the first time: what a run still says of its end must be heard."""
        if self._stop is not None and self._stop.is_set:
            stop, self._stop = self._stop, None
            self.be_quick()
            stop.check()

    def link(self, key: str) -> str:
        """The place of an object, which works only for who has credentials."""
        return f"{self.url}/{key}"

    @_heeding_a_stop
    def list_below(self, folder: str) -> dict[str, Found]:
        """The objects below a folder by their keys."""
        found: dict[str, Found] = {}
        with self._asking(folder):
            for chunk in self._store.list(folder):
                found.update((meta["path"], _found(meta)) for meta in chunk)
        return found

    @_heeding_a_stop
    def list_top(self) -> set[str]:
        """The names of what lies directly below the URL: objects, and folders of them with a slash at their end."""
        with self._asking(""):
            listed = self._store.list_with_delimiter()
        return {meta["path"] for meta in listed["objects"]} | {f"{prefix}/" for prefix in listed["common_prefixes"]}

    @_heeding_a_stop
    def head(self, key: str) -> Found | None:
        """An object, or None where there is none."""
        with self._asking(key):
            try:
                return _found(self._store.head(key))
            except FileNotFoundError:
                return None

    @_heeding_a_stop
    def read(self, key: str) -> bytes | None:
        """A small object's bytes, or None where there is none."""
        with self._asking(key):
            try:
                return self._store.get(key).bytes().to_bytes()
            except FileNotFoundError:
                return None

    @_heeding_a_stop
    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes of an object from `start` to `stop`."""
        with self._asking(key):
            try:
                return self._store.get_range(key, start=start, end=stop).to_bytes()
            except Exception as error:
                if "NotPartial" not in str(error):
                    raise
            # A server that knows no ranges sends all of it.
            at, kept = 0, bytearray()
            for block in self._store.get(key).stream():
                kept += block[max(start - at, 0) : max(stop - at, 0)]
                at += len(block)
            return bytes(kept)

    def open(self, key: str, size: int) -> IO[bytes]:
        """An object of so many bytes as a file."""
        return io.BufferedReader(ObjectFile(functools.partial(self.read_range, key), size))

    @_heeding_a_stop
    def write(self, key: str, data: bytes) -> Found:
        """Write or replace a small object."""
        with self._asking(key):
            answer = self._store.put(key, data, use_multipart=False)
        return Found(len(data), _plain(answer["e_tag"]))

    @_heeding_a_stop
    def write_new(self, key: str, data: bytes) -> bool:
        """Write a small object where there is none; answers whether it did. Of two writers only one does, where the store sees to that."""
        from obstore.exceptions import AlreadyExistsError

        if self.head(key) is not None:
            return False
        with self._asking(key):
            try:
                self._store.put(key, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    @_heeding_a_stop
    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        with self._asking(key):
            try:
                self._store.delete(key)
            except FileNotFoundError:
                return

    def upload(self, key: str, path: Path, sha256: str, check: Callable[[], None]) -> Found:
        """Take a file up in parts, and see that the store holds it byte for byte.

        sha256: what the file's bytes must give while they are read; else nothing becomes of the object. The store's answer is then
        compared: the size, and the ETag where it is the MD5 of the file or of its parts, as S3 has it where no key of the user's own
        encrypts; where it is not, all is read back.
        check: called at each part; what it raises ends the upload.
        """
        size = path.stat().st_size
        part_bytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
        digests, own_errors = Digests(), []

        def parts() -> Iterator[bytes]:
            try:
                with open(path, "rb") as file:
                    while block := file.read(part_bytes):
                        check()
                        digests.add(block)
                        if file.tell() >= size and digests.sha256 != sha256:
                            raise StorageError(f"{path}: its bytes have changed since they were written; run the same command again")
                        yield block
            except Exception as error:
                own_errors.append(error)
                raise

        try:
            with self._asking(key):
                multipart = size > part_bytes
                self._store.put(key, parts(), use_multipart=multipart, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE)
        except Exception:
            # Parts that are there already are removed after an error; where that fails too, its error would hide the first.
            if own_errors:
                raise own_errors[0] from None
            raise
        found = self.head(key)
        if found is None or found.size != size:
            raise StorageError(f"{self.link(key)}: the store does not hold what was uploaded; run the same command again")
        if found.e_tag not in digests.e_tags and self._sha256(key, size, check) != sha256:
            raise StorageError(f"{self.link(key)}: the store answers other bytes than were uploaded; run the same command again")
        return found

    @_heeding_a_stop
    def sign(self, keys: list[str], lifetime: timedelta) -> list[str]:
        """Links to objects that anybody can read them by."""
        import obstore

        with self._asking(""):
            return list(obstore.sign(cast("S3Store", self._store), "GET", keys, lifetime))

    def _sha256(self, key: str, size: int, check: Callable[[], None]) -> str:
        digest = hashlib.sha256()
        for start in range(0, size, _READ_BYTES):
            check()
            digest.update(self.read_range(key, start, min(start + _READ_BYTES, size)))
        return digest.hexdigest()

    def _connect(self, retry_s: float) -> "ObjectStore":
        retry: Any = {"max_retries": 1000, "retry_timeout": timedelta(seconds=retry_s)}
        request_s = timedelta(seconds=min(_REQUEST_S, max(retry_s, 1.0)))
        options: Any = {"timeout": request_s, "connect_timeout": min(request_s, timedelta(seconds=10)), **client_options()}
        store: ObjectStore = self._from_url(self.url, config=credentials(self._scheme), client_options=options, retry_config=retry)
        return store

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Turn an error of obstore into a StorageError that says what was asked of whom, and what to do."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            if not (type(error).__module__.startswith("obstore") or isinstance(error, (OSError, ValueError, NotImplementedError))):
                raise
            text = str(error)
            # What is still to be said to it when a run ends must not take as long again.
            self._store = self._quick
            raise StorageError(f"{self.link(key).rstrip('/')}: {advice(text, self._bucket)} ({first_words(text)})") from error


def _found(meta: Any) -> Found:
    return Found(meta["size"], _plain(meta["e_tag"]))


def _plain(e_tag: str | None) -> str:
    """An ETag without its quotes: some servers leave them out where they list."""
    return (e_tag or "").strip('"')
