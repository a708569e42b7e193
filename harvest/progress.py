"""What a run says while it works: notes, and how far it is. Everything here goes to standard error; results alone go to standard output."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

LINE_EVERY_S = 30.0
_EVENT_EVERY_S = 1.0


class Reporter(Protocol):
    """What a run tells about itself. All calls but `wrote` come from one thread."""

    def note(self, text: str) -> None:
        """Say one thing that a user should know."""

    def begin(self, n_tokens: int, n_done: int) -> None:
        """The forward passes begin: so many tokens in all, of which so many are on disk already."""

    def advance(self, n_tokens: int) -> None:
        """So many more tokens were read."""

    def wrote(self, n_bytes: int) -> None:
        """A shard of so many bytes was published."""

    def waited(self, seconds: float) -> None:
        """The model stood still so long, until storage had room for more."""

    def end(self) -> None:
        """The forward passes ended, well or not."""


class Silent:
    """Says nothing: the library's default, and --quiet."""

    def note(self, text: str) -> None: ...
    def begin(self, n_tokens: int, n_done: int) -> None: ...
    def advance(self, n_tokens: int) -> None: ...
    def wrote(self, n_bytes: int) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def end(self) -> None: ...


@dataclass
class Progress:
    """How far the forward passes are: tokens in all and read, those of them that were there before; bytes written; seconds waited."""

    total: int = 0
    first_done: int = 0
    done: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    started: float = 0.0

    @property
    def tokens_s(self) -> float:
        """Tokens a second, since the passes began."""
        return (self.done - self.first_done) / max(time.monotonic() - self.started, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left at this rate; None where nothing was read yet."""
        return (self.total - self.done) / rate if (rate := self.tokens_s) > 0 else None

    @property
    def limited_by(self) -> str:
        """What holds the run up most: storage, where the model waits for it half of the time, or else computing."""
        return "storage" if self.waited_s > (time.monotonic() - self.started) / 2 else "computing"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, with units in the names."""
        left_s = self.left_s
        return {
            "tokens": self.done,
            "total_tokens": self.total,
            "tokens_s": round(self.tokens_s, 1),
            "bytes_written": self.bytes,
            "left_s": None if left_s is None else round(left_s, 1),
            "limited_by": self.limited_by,
        }


class _Counting:
    """What every reporter that counts has in common: the progress."""

    def __init__(self) -> None:
        self._progress = Progress()

    def begin(self, n_tokens: int, n_done: int) -> None:
        self._progress = Progress(n_tokens, n_done, n_done, started=time.monotonic())

    def advance(self, n_tokens: int) -> None:
        self._progress.done += n_tokens

    def wrote(self, n_bytes: int) -> None:
        self._progress.bytes += n_bytes

    def waited(self, seconds: float) -> None:
        self._progress.waited_s += seconds


class StderrReporter(_Counting):
    """A moving bar on a terminal; elsewhere, as in a log file, a line every 30 seconds and one at the end."""

    _UNIT = "tok"

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._next_line = 0.0
        self._bar: Any = None
        self._is_deaf = False

    def note(self, text: str) -> None:
        line = f"harvest: {text}"
        if self._is_deaf:
            return
        with self._hearing():
            if self._bar is None:
                print(line, file=self._stream, flush=True)
            else:
                self._bar.write(line, file=self._stream)

    def begin(self, n_tokens: int, n_done: int) -> None:
        super().begin(n_tokens, n_done)
        self._next_line = self._progress.started + LINE_EVERY_S
        with self._hearing():
            if self._is_deaf or not self._is_terminal():
                return
            from tqdm import tqdm

            self._bar = tqdm(total=n_tokens, initial=n_done, unit=self._UNIT, unit_scale=True, file=self._stream, dynamic_ncols=True)

    def advance(self, n_tokens: int) -> None:
        super().advance(n_tokens)
        if self._bar is not None:
            with self._hearing():
                self._bar.set_postfix_str(self._beside(), refresh=False)
                self._bar.update(n_tokens)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self.note(self._so_far())

    def end(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with self._hearing():
                bar.set_postfix_str(self._beside())
                bar.close()
        elif self._progress.done > self._progress.first_done:
            self.note(self._so_far())

    def _is_terminal(self) -> bool:
        # A dumb terminal cannot go back to the start of a line.
        return self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def _beside(self) -> str:
        """What stands beside the bar: bytes, and storage where that is the limit."""
        words = [size(self._progress.bytes)] if self._progress.bytes else []
        return ", ".join(words + (["limited by storage"] if self._progress.limited_by == "storage" else []))

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Say nothing more once nobody can hear it: a terminal that was closed, or a pipe's end, is no reason to end a run."""
        try:
            yield
        except (OSError, ValueError):
            # ValueError: the stream was closed in this process.
            self._is_deaf, self._bar = True, None

    def _so_far(self) -> str:
        return how_far(self._progress.to_dict())

    def _left(self) -> str:
        left_s = None if self._progress.done >= self._progress.total else self._progress.left_s
        return "" if left_s is None else f", {duration(left_s)} left"


class JsonReporter(_Counting):
    """The same as JSON, an event a line: for a program that watches. Progress comes once a second at most, and once at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._next_line = 0.0

    def note(self, text: str) -> None:
        self._say("note", {"text": text})

    def begin(self, n_tokens: int, n_done: int) -> None:
        super().begin(n_tokens, n_done)
        self._say("begin", {"tokens": n_done, "total_tokens": n_tokens})

    def advance(self, n_tokens: int) -> None:
        super().advance(n_tokens)
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _EVENT_EVERY_S
            self._say("progress", self._progress.to_dict())

    def end(self) -> None:
        self._say("end", self._progress.to_dict())

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        with suppress(OSError, ValueError):
            # Nobody may be there to hear it any more.
            print(json.dumps({"event": event, "at": round(time.time(), 3), **fields}), file=self._stream, flush=True)


class DownloadReporter(StderrReporter):
    """The same for a download: `begin` and `advance` count bytes."""

    _UNIT = "B"

    def _so_far(self) -> str:
        now = self._progress
        return f"{size(now.done)} of {size(now.total)}, {size(now.tokens_s)}/s{self._left()}"


class ReadingReporter(StderrReporter):
    """The same for what only reads: `begin` and `advance` count tokens, and nothing is written."""

    def _so_far(self) -> str:
        now = self._progress
        return f"{now.done:,} of {now.total:,} tokens, {now.tokens_s:,.0f} tokens/s{self._left()}"


class Counted(_Counting):
    """Passes all on to another reporter, and keeps how far the run is, for who asks from elsewhere."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def so_far(self) -> dict[str, Any] | None:
        """The progress as plain values, once the passes have begun."""
        return self._progress.to_dict() if self._progress.total else None

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def begin(self, n_tokens: int, n_done: int) -> None:
        super().begin(n_tokens, n_done)
        self._reporter.begin(n_tokens, n_done)

    def advance(self, n_tokens: int) -> None:
        super().advance(n_tokens)
        self._reporter.advance(n_tokens)

    def wrote(self, n_bytes: int) -> None:
        super().wrote(n_bytes)
        self._reporter.wrote(n_bytes)

    def waited(self, seconds: float) -> None:
        super().waited(seconds)
        self._reporter.waited(seconds)

    def end(self) -> None:
        self._reporter.end()


def how_far(progress: Mapping[str, Any]) -> str:
    """What `Progress.to_dict` says, in a line to read."""
    done, total, left_s = progress["tokens"], progress["total_tokens"], progress["left_s"]
    words = f"{done:,} of {total:,} tokens, {progress['tokens_s']:,.0f} tokens/s, {size(progress['bytes_written'])} written"
    if done >= total:
        # At the end a note says what limited the whole run.
        return words
    return words + ("" if left_s is None else f", {duration(left_s)} left") + f", limited by {progress['limited_by']}"


def size(n_bytes: float) -> str:
    """So many bytes to read, in three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} TB"


def duration(seconds: float) -> str:
    """So many seconds to read."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s" if minutes else f"{rest_s} s"
