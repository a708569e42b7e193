"""Each wait between the host, the card and its streams is needed: without it some order of the work gives other bytes.

A simulated card does its work in any order that streams and events allow (its schedules). Taken out one at a time here:

    transfer    the wait for a finished copy; the copy stream's wait for the batch; the hold on rows that are being copied; the second
                of the pinned buffers that are used in turn
    prefetcher  the wait for a filled block; the wait for the last use of a block before its memory is filled again; the wait for a piece
                before its pinned memory is read into again
    activation  the copy stream's wait for the batch, and the mark that it uses the batch's memory; the wait for a copy that is out before
    store       it is kept; the wait for a stream that comes back, and the mark that the batch uses it
"""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harvest
import harvest.stream
import harvest.window
from harvest.model import device as devices
from harvest.model.feed import Feed
from harvest.model.transfer import Arrival, Transfer
from harvest.model.waiting import _Moved

from .conftest import PROMPTS, Card, asking, digests, settings

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("once")]

SCHEDULES = [("eager", 1), ("lazy", 1), ("copies-late", 1), ("copies-early", 1), *(("random", seed) for seed in range(1, 9))]
NOTHING = "pass"
# A wait: its function, its line, the line that replaces it, and the way through the program that reaches it.
WAITS: dict[str, tuple[Any, str, str, str]] = {
    "a finished copy": (Arrival.wait, "self._done.synchronize()", NOTHING, "run by run"),
    "a finished copy of a staged window": (Arrival.wait, "self._done.synchronize()", NOTHING, "staged"),
    "the batch, before its copy": (
        Transfer._start,
        "self._stream.wait_stream(torch.cuda.current_stream(self._device))",
        NOTHING,
        "run by run",
    ),
    "the hold on rows": (Arrival.__init__, "= done, held, peaks_L, then", "= done, None, peaks_L, then", "run by run"),
    "the second pinned buffer": (Transfer.__init__, "for _ in range(2)", "for _ in range(1)", "through a pinned buffer"),
    "a filled block": (Feed.next, "torch.cuda.current_stream(self._device).wait_event(filled)", NOTHING, "streamed"),
    "a block's last use": (Feed._make_room, "self._stream.wait_event(used)", NOTHING, "streamed"),
    "a piece's copy": (Feed._read_piece, "copied.synchronize()", NOTHING, "streamed"),
    "the batch, before its stream leaves": (
        _Moved.put,
        "self._out.wait_stream(torch.cuda.current_stream(self._device))",
        NOTHING,
        "on the host",
    ),
    "the use of a stream that leaves": (_Moved.put, "stream_BSH.record_stream(self._out)", NOTHING, "on the host"),
    "a stream that is out": (_Moved._keep_when_there, "event.synchronize()", NOTHING, "in a file"),
    "a stream that comes back": (_Moved.get, "now.wait_event(fetched)", NOTHING, "on the host"),
    "the use of a stream that came back": (_Moved.get, "stream.record_stream(now)", NOTHING, "on the host"),
}


def without(function: Callable[..., Any], line: str, instead: str) -> Callable[..., Any]:
    """Return a function with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has no line {line!r} any more"
    names: dict[str, Any] = {}
    exec(compile(source.replace(line, instead), function.__code__.co_filename, "exec"), function.__globals__, names)
    return names[function.__name__]  # type: ignore[no-any-return]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], harvest.Engine]:
    """Make a way the one that the program goes, and return its engine."""

    def choose(way: str) -> harvest.Engine:
        if way == "run by run":
            monkeypatch.setattr(harvest.window, "_STAGED_SHARE", 0)
        if way == "through a pinned buffer":
            host_empty = devices.host_empty
            monkeypatch.setattr("harvest.output.writers.host_empty", lambda shape, dtype, _pinned: host_empty(shape, dtype, False))
        if way in ("run by run", "staged", "through a pinned buffer"):
            return settings()
        if way in ("on the host", "in a file"):
            monkeypatch.setattr(harvest.stream, "_STAYS", 0)
        scratch = {"scratch": str(tmp_path), "window_bytes": 1000} if way == "in a file" else {}
        return settings(weights="stream", **scratch)

    return choose


@pytest.mark.parametrize("wait", WAITS)
def test_without_a_wait_some_order_gives_other_bytes(
    wait: str, llama: Path, card: Card, engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not card.is_simulated:
        pytest.skip("a real card has one order, and no way to ask for another")
    function, line, instead, way = WAITS[wait]
    request, engine = asking(llama, prompts=PROMPTS * 2), engines(way)
    harvest.run(request, tmp_path / "whole", engine)
    whole = digests(tmp_path / "whole")
    owner = {"Feed": Feed, "_Moved": _Moved, "Transfer": Transfer, "Arrival": Arrival}[function.__qualname__.split(".")[0]]
    monkeypatch.setattr(owner, function.__name__, without(function, line, instead))
    tried = []
    for number, (mode, seed) in enumerate(SCHEDULES):
        card.schedule(mode, seed)
        folder = tmp_path / f"run-{number}"
        try:
            harvest.run(request, folder, engine)
        except Exception as error:
            # Wrong bytes may be found out, as values that are not finite are.
            tried.append(f"{mode} {seed}: {error}")
            break
        if digests(folder) != whole:
            break
        tried.append(f"{mode} {seed}: the same bytes")
    else:
        pytest.fail(f"no schedule shows that it is needed: {tried}")
