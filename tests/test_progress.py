"""What a run says on stderr: a bar on a terminal, lines elsewhere."""

import io
import json
import re

import pytest

from harvest import progress
from harvest.progress import DownloadReporter, JsonReporter, StderrReporter


class Clock:
    """A clock that stands where a test puts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(reporter: StderrReporter) -> None:
    reporter.note("first note")
    reporter.begin(1000, 200)
    for _ in range(4):
        reporter.advance(200)
        reporter.wrote(3_000_000)
    reporter.note("second note")
    reporter.end()


def test_a_log_file_gets_one_line_at_the_end_of_a_short_run() -> None:
    stream = io.StringIO()
    work(StderrReporter(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["harvest: first note", "harvest: second note"]
    assert re.fullmatch(r"harvest: 1,000 of 1,000 tokens, [\d,]+ tokens/s, 12 MB written", lines[2])


def test_a_log_file_gets_a_line_now_and_then_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = io.StringIO()
    reporter = StderrReporter(stream)
    reporter.begin(10_000, 0)
    clock.now = 40
    reporter.advance(1000)
    clock.now = 45
    reporter.advance(100)
    clock.now = 80
    reporter.waited(41)
    reporter.advance(900)
    assert stream.getvalue().splitlines() == [
        "harvest: 1,000 of 10,000 tokens, 25 tokens/s, 0 B written, 6 min 00 s left, limited by computing",
        "harvest: 2,000 of 10,000 tokens, 25 tokens/s, 0 B written, 5 min 20 s left, limited by storage",
    ]


def test_events_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = io.StringIO()
    reporter = JsonReporter(stream)
    reporter.note("one\ntwo")
    reporter.begin(1000, 200)
    for now, n_tokens in ((4, 100), (4.5, 100), (8, 200)):
        clock.now = now
        reporter.advance(n_tokens)
        reporter.wrote(3_000_000)
    reporter.waited(5)
    reporter.end()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all(event.pop("at") > 1.7e9 for event in events)
    assert [event.pop("event") for event in events] == ["note", "begin", "progress", "progress", "end"]
    assert events[:2] == [{"text": "one\ntwo"}, {"tokens": 200, "total_tokens": 1000}]
    keys = ("tokens", "total_tokens", "tokens_s", "bytes_written", "left_s", "limited_by")
    assert [tuple(event[key] for key in keys) for event in events[2:]] == [
        (300, 1000, 25.0, 0, 28.0, "computing"),
        (600, 1000, 50.0, 6_000_000, 8.0, "computing"),
        (600, 1000, 50.0, 9_000_000, 8.0, "storage"),
    ]


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    work(StderrReporter(stream))
    assert "\r" not in stream.getvalue()
    assert "1,000 of 1,000 tokens" in stream.getvalue()


def test_a_terminal_gets_a_bar_and_notes_above_it() -> None:
    stream = Terminal()
    work(StderrReporter(stream))
    shown = stream.getvalue()
    assert "harvest: second note" in shown
    assert "100%" in shown
    assert "1.00k/1.00k" in shown
    assert "12 MB" in shown


def test_a_download_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = io.StringIO()
    reporter = DownloadReporter(stream)
    reporter.begin(10_000_000, 1_000_000)
    clock.now = 40
    reporter.advance(4_000_000)
    # A file that begins anew takes back what had come of it.
    clock.now = 50
    reporter.advance(-3_000_000)
    reporter.advance(8_000_000)
    reporter.end()
    assert stream.getvalue().splitlines() == [
        "harvest: 5 MB of 10 MB, 100 kB/s, 50 s left",
        "harvest: 10 MB of 10 MB, 180 kB/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (3600, "1 h 00 min"), (90_000, "25 h 00 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


@pytest.mark.parametrize(("n_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345_678, "12.3 MB"), (5e14, "500 TB")])
def test_sizes(n_bytes: float, text: str) -> None:
    assert progress.size(n_bytes) == text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nobody_who_hears_is_no_reason_to_end_a_run(is_terminal: bool) -> None:
    class Gone(io.StringIO):
        n_writes = 0

        def isatty(self) -> bool:
            return is_terminal

        def write(self, text: str) -> int:
            self.n_writes += 1
            raise BrokenPipeError

    stream = Gone()
    work(StderrReporter(stream))
    assert stream.n_writes == 1
