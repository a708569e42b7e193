"""What a run says while it works: notes, and how far it is. Everything here goes to standard error; results alone go to standard output."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

LINE_EVERY_S = 30.0


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

    def end(self) -> None:
        """The forward passes ended, well or not."""


class Silent:
    """Says nothing: the library's default, and --quiet."""

    def note(self, text: str) -> None: ...
    def begin(self, n_tokens: int, n_done: int) -> None: ...
    def advance(self, n_tokens: int) -> None: ...
    def wrote(self, n_bytes: int) -> None: ...
    def end(self) -> None: ...


class StderrReporter:
    """A moving bar on a terminal; elsewhere, as in a log file, a line every 30 seconds and one at the end."""

    _UNIT = "tok"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = self._first_done = self._done = self._bytes = 0
        self._started = self._next_line = 0.0
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
        self._total, self._first_done, self._done = n_tokens, n_done, n_done
        self._started = time.monotonic()
        self._next_line = self._started + LINE_EVERY_S
        with self._hearing():
            if self._is_deaf or not self._stream.isatty():
                return
            from tqdm import tqdm

            self._bar = tqdm(total=n_tokens, initial=n_done, unit=self._UNIT, unit_scale=True, file=self._stream, dynamic_ncols=True)

    def advance(self, n_tokens: int) -> None:
        self._done += n_tokens
        if self._bar is not None:
            with self._hearing():
                self._bar.set_postfix_str(size(self._bytes) if self._bytes else "", refresh=False)
                self._bar.update(n_tokens)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self._print_line()

    def wrote(self, n_bytes: int) -> None:
        self._bytes += n_bytes

    def end(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with self._hearing():
                bar.set_postfix_str(size(self._bytes) if self._bytes else "")
                bar.close()
        elif self._done > self._first_done:
            self._print_line()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Say nothing more once nobody can hear it: a terminal that was closed, or a pipe's end, is no reason to end a run."""
        try:
            yield
        except (OSError, ValueError):
            # ValueError: the stream was closed in this process.
            self._is_deaf, self._bar = True, None

    def _print_line(self) -> None:
        elapsed_s = time.monotonic() - self._started
        rate = (self._done - self._first_done) / max(elapsed_s, 1e-9)
        left = "" if self._done >= self._total else f", {_duration((self._total - self._done) / max(rate, 1e-9))} left"
        self.note(self._so_far(rate) + left)

    def _so_far(self, rate: float) -> str:
        return f"{self._done:,} of {self._total:,} tokens, {rate:,.0f} tokens/s, {size(self._bytes)} written"


class DownloadReporter(StderrReporter):
    """The same for a download: `begin` and `advance` count bytes."""

    _UNIT = "B"

    def _so_far(self, rate: float) -> str:
        return f"{size(self._done)} of {size(self._total)}, {size(rate)}/s"


class ReadingReporter(StderrReporter):
    """The same for what only reads: `begin` and `advance` count tokens, and nothing is written."""

    def _so_far(self, rate: float) -> str:
        return f"{self._done:,} of {self._total:,} tokens, {rate:,.0f} tokens/s"


def size(n_bytes: float) -> str:
    """So many bytes to read, in three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} TB"


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s" if minutes else f"{rest_s} s"
