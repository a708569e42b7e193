"""A file behind a link, http, https or file, appended to what is there of it until it is whole.

A dropped connection is taken up again where it broke, with a Range request (RFC 9110, section 14); a server that knows no ranges sends
the whole file anew. A link that is refused is an error at once.
"""

import http.client
import io
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from harvest.errors import DownloadError, RequestError
from harvest.output import durable

_SCHEMES = ("http", "https", "file")
_TIMEOUT_S = 60.0
# Waited for before each further try; the count begins anew when a try brought the file further than it ever was.
_BACK_OFF_S = (0.2, 1.0, 5.0)
_BLOCK_BYTES = 1 << 20
# "Later" in other words: too slow, too early, too many; and every 5xx.
_TRY_AGAIN = (408, 425, 429)


class _CutError(Exception):
    """A connection ended before the file did."""


class _RangeError(Exception):
    """A server answered other bytes than were asked for."""


@dataclass(frozen=True)
class _Opened:
    """The bytes of a file from `start` on. size: of the whole file."""

    stream: io.BufferedIOBase
    start: int
    size: int | None


def check_link(link: str) -> None:
    """Raise RequestError for a link that is neither http, https nor file."""
    try:
        parts = urllib.parse.urlsplit(link)
        # The port is looked at where it is asked for: a link whose port is no number is a ValueError here.
        is_local = parts.netloc in ("", "localhost") and parts.path
        names_something = is_local if parts.scheme == "file" else parts.hostname and (parts.port or True)
    except ValueError:
        names_something = False
    if not names_something or parts.scheme not in _SCHEMES or re.fullmatch("[!-~]+", link) is None:
        raise RequestError(f"result: the link {shown(link)!r} was given; allowed are http, https and file, with what is not ASCII escaped")


def shown(link: str) -> str:
    """A link as a message shows it: without its query, which may hold a signature."""
    return link.split("?")[0]


def download(link: str, file: BinaryIO, path: Path, on_bytes: Callable[[int], None], check: Callable[[], None]) -> None:
    """Append the file behind a link to `file`, from its end on, until it is whole.

    path: what an error of the disk names. on_bytes: told how many bytes came, a negative number where the file begins anew.
    check: called between blocks; what it raises ends the download.
    Raises DownloadError where the link is refused, or the connection fails again and again.
    """
    farthest, failures, can_resume = 0, 0, True
    while True:
        check()
        try:
            _go_on(link, file, path, on_bytes, check, can_resume)
            return
        except _RangeError:
            can_resume = False
        except (_CutError, OSError, http.client.HTTPException) as error:
            if file.tell() > farthest:
                farthest, failures = file.tell(), 0
            if failures == len(_BACK_OFF_S):
                what = error.reason if type(error) is urllib.error.URLError else error
                raise DownloadError(
                    f"{shown(link)}: the connection failed {failures + 1} times ({what}); "
                    "what was fetched stays, and the same command goes on with the rest"
                ) from error
            _wait(_BACK_OFF_S[failures], check)
            failures += 1


def _go_on(link: str, file: BinaryIO, path: Path, on_bytes: Callable[[int], None], check: Callable[[], None], can_resume: bool) -> None:
    """One try to bring the file to its end."""
    with durable.storing(path):
        at = file.seek(0, io.SEEK_END)
    with _open(link, at if can_resume else 0) as opened:
        if opened.start != at:
            with durable.storing(path):
                file.seek(0)
                file.truncate()
            on_bytes(-at)
        # What has come is kept at once, and the end is known by its place: a server may keep the connection open after it.
        while file.tell() != opened.size and (block := opened.stream.read1(_BLOCK_BYTES)):
            with durable.storing(path):
                file.write(block)
                file.flush()
            on_bytes(len(block))
            check()
    if opened.size is not None and file.tell() < opened.size:
        raise _CutError(f"{file.tell():,} of {opened.size:,} bytes came")
    if opened.size is not None and file.tell() > opened.size:
        raise DownloadError(f"{shown(link)}: more bytes came than the {opened.size:,} that were announced; the file is being changed")


@contextmanager
def _open(link: str, start: int) -> Iterator[_Opened]:
    """A link's bytes from `start` on, or all of them where the server knows no ranges."""
    if urllib.parse.urlsplit(link).scheme == "file":
        with _open_file(link, start) as opened:
            yield opened
        return
    response = _ask(link, start)
    if response is None:
        yield _Opened(io.BytesIO(), start, start)
        return
    with response:
        yield _Opened(response, *_extent(link, response, start))


def _ask(link: str, start: int) -> http.client.HTTPResponse | None:
    """The answer of a server, or None where it says that the file has just `start` bytes."""
    headers = {"User-Agent": "harvest"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response: http.client.HTTPResponse = _opener().open(urllib.request.Request(link, headers=headers), timeout=_TIMEOUT_S)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            if error.headers.get("Content-Range", "").strip() == f"bytes */{start}":
                return None
            raise _RangeError from None
        if error.code >= 500 or error.code in _TRY_AGAIN:
            raise
        raise DownloadError(
            f"{shown(link)}: the link was refused ({error.code} {error.reason}); links of a job work 7 days and name one file each: "
            "ask for the job again and fetch with the new answer; what was fetched stays"
        ) from None


def _extent(link: str, response: http.client.HTTPResponse, start: int) -> tuple[int, int | None]:
    """Where the bytes of an answer begin, and the size of the whole file. Raises _RangeError where they are not those asked for."""
    length = response.headers.get("Content-Length", "")
    n_bytes = int(length) if re.fullmatch(r"[0-9]+", length) else None
    if response.status == HTTPStatus.PARTIAL_CONTENT and start:
        match = re.fullmatch(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)", response.headers.get("Content-Range", "").strip())
        if match is None or int(match[1]) != start or match[3] not in ("*", str(int(match[2]) + 1)):
            raise _RangeError
        return start, int(match[2]) + 1
    if response.status != HTTPStatus.OK:
        raise DownloadError(f"{shown(link)}: answers {response.status} {response.reason} where the whole file was asked for")
    if n_bytes is None and not response.chunked:
        raise DownloadError(f"{shown(link)}: the server does not say how long the file is, so a file cut short would go unseen")
    return 0, n_bytes


@contextmanager
def _open_file(link: str, start: int) -> Iterator[_Opened]:
    """The same for a file on this machine."""
    with _open_local(Path(urllib.request.url2pathname(urllib.parse.urlsplit(link).path))) as stream:
        size = stream.seek(0, io.SEEK_END)
        if start > size:
            raise _RangeError
        stream.seek(start)
        yield _Opened(stream, start, size)


def _open_local(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        reason = error.strerror or error
        raise DownloadError(f"{path}: cannot be read ({reason}); where its run was moved, harvest status DIR prints links to it") from error


def _opener() -> urllib.request.OpenerDirector:
    """An opener of http and https alone, so that no server can redirect to a file of this machine."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _wait(seconds: float, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        check()
        time.sleep(min(left_s, 0.1))
