"""One window: its batches through a model that is loaded whole, and each captured row to its place in the window's buffer.

On a CPU the rows are written to the buffer itself. On a card a window of several batches is put together there, each row at its place, and
leaves it in one copy; a window of one batch, or one that is too large for that, is copied batch by batch.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from harvest.decoder import allowed_error, batches_to_check, say_checked
from harvest.errors import StreamError, ValueRangeError
from harvest.input.plan import Window
from harvest.model.blocks import LoadedDecoder
from harvest.model.capture import Capture, Captured, Places
from harvest.model.compiled import compiled_blocks
from harvest.model.device import card_bytes, free_memory, is_out_of_memory
from harvest.model.plain import check_values
from harvest.model.transfer import Arrival, Transfer, from_bits
from harvest.output.stats import widen
from harvest.output.writers import WindowBuffer, WindowBuffers
from harvest.prepare import Prepared
from harvest.progress import Reporter
from harvest.stop import StopFlag

# Called with a window, its filled buffer, and the batch budget if that was lowered.
OnRead = Callable[[Window, WindowBuffer, int | None], None]

# A window's rows are put together on the card if two windows take at most this share of its memory: one is copied while the next is read.
_STAGED_SHARE = 1 / 8


@dataclass
class _Window:
    """A window that is being read.

    target_LTW: its buffer as a tensor. staged: its rows on the card, in the window's order, and their peaks; None if each batch is copied
    to the buffer by itself. done: the prompts that were read.
    """

    window: Window
    buffer: WindowBuffer
    target_LTW: torch.Tensor
    staged: Captured | None
    done: list[int] = field(default_factory=list)


class WindowReader:
    """Reads windows through a model that is loaded. A context manager: the model's hooks are removed at its end.

    A window's last copies run while the first batch of the next one is computed, so `read` returns before its rows are there.
    """

    def __init__(self, prepared: Prepared, decoder: LoadedDecoder, reporter: Reporter, stop: StopFlag, on_read: OnRead) -> None:
        """on_read: called in the order of the windows, with a window, its filled buffer, and the batch budget if that was lowered."""
        self._prepared, self._decoder, self._reporter, self._stop, self._on_read = prepared, decoder, reporter, stop, on_read
        self._device = decoder.device
        self._store_dtype = getattr(torch, prepared.settings.store_dtype)
        self._capture = Capture(
            decoder,
            prepared.layers,
            prepared.description.hidden_size,
            self._store_dtype,
            prepared.directions_DH,
            prepared.allow_nonfinite,
        )
        self._transfer = Transfer(self._device)
        self._budget = prepared.plan.batch_tokens
        self._stages = self._device.type != "cpu"
        # Batches that compute or are copied, and whole windows that are copied: what to wait for, and what to do then.
        self._in_flight: deque[tuple[Arrival, Callable[[npt.NDArray[np.float32]], None]]] = deque()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._capture)
            if self._prepared.check_values:
                self._check_values()
            if self._prepared.settings.compile:
                self._compile(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        # A copy that is still under way must not write into memory that a later run of this process is given.
        for arrival, _ in self._in_flight:
            with suppress(RuntimeError):
                arrival.wait()
        self._in_flight.clear()
        return self._stack.__exit__(kind, error, trace)

    def _check_values(self) -> None:
        prepared = self._prepared
        batches, allowed = batches_to_check(prepared), allowed_error(prepared)
        worst = max(check_values(self._decoder, self._capture, prepared.layers, batch, allowed) for batch in batches)
        self._reporter.note(say_checked(batches, worst, allowed))

    def _compile(self, stack: ExitStack) -> None:
        prepared = self._prepared
        batches, allowed, started = batches_to_check(prepared), allowed_error(prepared), time.monotonic()
        worst = stack.enter_context(compiled_blocks(self._decoder, self._capture, prepared.layers, batches, allowed))
        self._reporter.note(
            f"compiled the decoder blocks in {time.monotonic() - started:.0f} s. "
            f"Values are within {worst:.1e} of the uncompiled model ({allowed:.0e} is allowed)"
        )

    def read(self, window: Window, buffer: WindowBuffer) -> None:
        """Start reading a window's batches into its buffer, each row at its prompt's place; `on_read` is called when they are there.

        If the device has no memory for a batch, the batch budget is halved for the rest of the run. Raises StreamError for a single prompt
        that is too large, and ValueRangeError for a value that the stored type cannot hold.
        """
        prepared, plan = self._prepared, self._prepared.plan
        batches = deque(plan.batches(window, self._budget))
        reading = self._open(window, buffer, len(batches))
        while batches:
            self._stop.check()
            batch = batches[0]
            arrival = self._start(batch, reading)
            if arrival is None:
                # What is still on the device makes room first: only then is it known what fits.
                is_alone = not self._in_flight
                self.finish()
                free_memory()
                if not is_alone:
                    continue
                if reading.staged is not None:
                    self._unstage(reading)
                    continue
                check_divisible(batch, prepared)
                self._budget = min(self._budget // 2, plan.footprint(len(batch) // 2, int(plan.lengths[batch].max())))
                self._reporter.note(say_lowered(batch, self._budget))
                batches = deque(plan.cut(sorted(prompt for batch in batches for prompt in batch), self._budget))
                continue
            batches.popleft()
            self._in_flight.append((arrival, partial(self._finish_batch, reading, batch, not batches and reading.staged is None)))
            self._finish_to(1)
        if reading.staged is not None:
            whole = Places([(0, 0, window.n_tokens)])
            self._in_flight.append((self._transfer.start(reading.staged, reading.target_LTW, whole), partial(self._finish_staged, reading)))
            reading.staged = None

    def finish(self) -> None:
        """Wait until all that was started is read."""
        self._finish_to(0)

    def _finish_to(self, n_left: int) -> None:
        while len(self._in_flight) > n_left:
            arrival, then = self._in_flight.popleft()
            then(arrival.wait())

    def _open(self, window: Window, buffer: WindowBuffer, n_batches: int) -> _Window:
        target_LTW = from_bits(buffer.rows_LTW, self._store_dtype)
        if self._device.type == "cpu":
            # The batches write to the buffer itself.
            return _Window(window, buffer, target_LTW, None)
        return _Window(window, buffer, target_LTW, self._stage(target_LTW) if self._stages and n_batches > 1 else None)

    def _stage(self, target_LTW: torch.Tensor) -> Captured | None:
        """Return memory on the device for the rows of a whole window, which leave it in one copy, or None if it does not fit."""
        if self._device.type == "cuda" and (not target_LTW.is_pinned() or 2 * target_LTW.nbytes > _STAGED_SHARE * card_bytes(self._device)):
            return None
        try:
            rows_LTW = torch.empty_like(target_LTW, device=self._device)
            return Captured(rows_LTW, torch.zeros(len(target_LTW), dtype=torch.float32, device=self._device))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self._stages = False
        return None

    def _unstage(self, reading: _Window) -> None:
        """Copy what is staged of a window to its buffer, and free its memory. From here on the run's rows are copied batch by batch."""
        assert reading.staged is not None
        # Places whose rows are still to come are overwritten later.
        peaks_L = self._transfer.start(reading.staged, reading.target_LTW, Places([(0, 0, reading.window.n_tokens)])).wait()
        check_range(reading.done, peaks_L, reading.window, reading.buffer, self._prepared)
        reading.staged, self._stages = None, False
        free_memory()

    def _start(self, batch: Sequence[int], reading: _Window) -> Arrival | None:
        """Start reading one batch. Return None if the device has no memory for it."""
        prepared, staged = self._prepared, reading.staged
        ids = [prepared.tokens.of(prompt) for prompt in batch]
        # The rows leave the model in the window's order, so that neighbours there are one run.
        order = sorted(range(len(batch)), key=batch.__getitem__)
        places = find_places([batch[row] for row in order], reading.window, prepared)
        try:
            if self._device.type == "cpu":
                return Arrival(None, None, self._capture.read(ids, order, reading.target_LTW, places).peaks_L)
            if staged is None:
                return self._transfer.start(self._capture.read(ids, order), reading.target_LTW, places)
            peaks_L = self._capture.read(ids, order, staged.rows_LTW, places).peaks_L
            torch.maximum(staged.peaks_L, peaks_L, out=staged.peaks_L)
            return self._transfer.mark()
        except RuntimeError as error:
            if is_out_of_memory(error):
                return None
            raise

    def _finish_batch(self, reading: _Window, batch: Sequence[int], is_last: bool, peaks_L: npt.NDArray[np.float32]) -> None:
        reading.done.extend(batch)
        check_range(batch, peaks_L, reading.window, reading.buffer, self._prepared)
        self._reporter.advance(sum(int(self._prepared.plan.lengths[prompt]) for prompt in batch))
        if is_last:
            self._hand_on(reading)

    def _finish_staged(self, reading: _Window, peaks_L: npt.NDArray[np.float32]) -> None:
        check_range(reading.done, peaks_L, reading.window, reading.buffer, self._prepared)
        self._hand_on(reading)

    def _hand_on(self, reading: _Window) -> None:
        self._on_read(reading.window, reading.buffer, self._budget if self._budget < self._prepared.plan.batch_tokens else None)


class Reader(Protocol):
    """What reads windows: see `WindowReader.read` and `WindowReader.finish`."""

    def read(self, window: Window, buffer: WindowBuffer) -> None: ...
    def finish(self) -> None: ...


def read_windows(
    reader: Reader,
    buffers: WindowBuffers,
    windows: Iterable[Window],
    check: Callable[[], None],
    waited: Callable[[float], None] = lambda _: None,
) -> None:
    """Read windows, each into a free buffer.

    check: called while there is none, and raises to stop. waited: called with the seconds of each wait for one.
    """
    for window in windows:
        if not buffers.has_free:
            # Storage is behind. The window before is handed over first, so that it has that to write.
            reader.finish()
        asked = time.monotonic()
        buffer = buffers.acquire(window.n_tokens, check)
        waited(time.monotonic() - asked)
        reader.read(window, buffer)
    reader.finish()


def say_lowered(batch: Sequence[int], budget: int) -> str:
    """Return the warning for a batch that did not fit."""
    return (
        f"warning: a batch of {len(batch)} prompts did not fit the device's memory. The batch budget is {budget:,} tokens for the rest of "
        "this run, so last bits may differ from a run in which it fitted"
    )


def check_divisible(batch: Sequence[int], prepared: Prepared) -> None:
    """Raise StreamError if a batch that did not fit is a single prompt, which cannot be halved."""
    if len(batch) == 1:
        eager = "Pass --attention sdpa, which holds no scores. " if prepared.settings.attention == "eager" else ""
        raise StreamError(
            f"prompt {batch[0]}, of {int(prepared.plan.lengths[batch[0]])} tokens, does not fit the device's memory even alone. "
            f"{eager}Lower --context-length, request fewer layers, or use a larger device"
        )


def find_places(prompts: Sequence[int], window: Window, prepared: Prepared) -> Places:
    """Return the places of prompts, ascending, in a window's buffer; prompts that follow one another are one run."""
    offsets = prepared.tokens.offsets
    runs: list[tuple[int, int, int]] = []
    row, end = 0, -1
    for prompt in prompts:
        place, n_tokens = int(offsets[prompt] - offsets[window.first]), int(offsets[prompt + 1] - offsets[prompt])
        if place == end:
            first, start, n_before = runs[-1]
            runs[-1] = (first, start, n_before + n_tokens)
        else:
            runs.append((row, place, n_tokens))
        row, end = row + n_tokens, place + n_tokens
    return Places(runs)


def check_range(
    prompts: Sequence[int], peaks_L: npt.NDArray[np.float32], window: Window, buffer: WindowBuffer, prepared: Prepared, first: int = 0
) -> None:
    """Raise ValueRangeError if a stored value of prompts is not finite. Only layers whose peak says so are looked at.

    peaks_L: of the layers from position `first` of the requested ones; empty if they are not known yet.
    """
    store_dtype, offsets = prepared.settings.store_dtype, prepared.tokens.offsets
    limit = torch.finfo(getattr(torch, store_dtype)).max
    for position in np.flatnonzero(~(peaks_L <= limit)):
        peak = float(peaks_L[position])
        for prompt in prompts:
            start, end = (int(offsets[edge] - offsets[window.first]) for edge in (prompt, prompt + 1))
            rows_TW = widen(buffer.rows_LTW[first + position, start:end], store_dtype)
            # An overflow is stored as inf. A NaN is the model's own, and may be allowed.
            bad_T = (np.isinf(rows_TW) if prepared.allow_nonfinite else ~np.isfinite(rows_TW)).any(axis=1)
            if not bad_T.any():
                continue
            where = f"layer {prepared.layers[first + position]}, prompt {prompt}, position {int(bad_T.argmax())}"
            if np.isfinite(peak):
                raise ValueRangeError(
                    f"{where}: the stream reaches {peak:,.6g}, and {store_dtype} ends at {limit:,.6g}; "
                    "store it with --store-dtype bfloat16 or float32"
                )
            raise ValueRangeError(
                f"{where}: the model itself computed a value that is not finite in {prepared.settings.compute_dtype}; "
                "try --compute-dtype float32 or bfloat16, or store it as it is with --allow-nonfinite"
            )
