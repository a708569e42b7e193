"""One window of a model whose blocks are streamed: all its batches through one block, while the next block is read.

Feed        the next block, from the files, in its own threads
Restart     a batch through the block, with the arguments that the model itself makes for it
Waiting     the streams between two blocks
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from harvest.decoder import allowed_error, batches_to_check, say_checked
from harvest.input.plan import Window
from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.capture import Captured, Places, check_shape, find_peak, pad, take_rows, true_float32
from harvest.model.device import free_card_bytes, free_memory, is_out_of_memory, pinned_bytes, upload
from harvest.model.feed import PREFETCH_PINNED, Feed
from harvest.model.restart import Restart
from harvest.model.soundness import tried_tokens
from harvest.model.transfer import Arrival, Transfer, from_bits
from harvest.model.waiting import InFile, InMemory, OnDevice, Waiting
from harvest.model.witness import Comparison, Witness
from harvest.output.writers import WindowBuffer, WindowBuffers, buffer_sizes
from harvest.prepare import Prepared
from harvest.progress import Reporter, duration
from harvest.stop import StopFlag
from harvest.window import OnRead, check_divisible, check_range, find_places, say_lowered

# Waiting streams stay on a card where they take no more of what is free there.
_STAYS = 0.25
# After so many blocks the time of the rest is told; the first is alone in having nothing beside it to wait for.
_TOLD_AFTER = 3


def make_buffers(prepared: Prepared, windows: Sequence[Window]) -> WindowBuffers:
    """The buffers for the rows of windows: in host memory, or in the scratch folder where blocks are streamed and that is too small.

    Raises StorageError where the scratch folder has no room for them.
    """
    folder = _rows_folder(prepared, windows)
    return WindowBuffers(windows, prepared.layout, _window_bytes(prepared), folder, prepared.settings.on_card)


def kept_bytes(prepared: Prepared, batches: Iterable[Sequence[list[int]]]) -> tuple[int, int]:
    """Return the most bytes that rows, and streams between two blocks, take at once: in host memory, and in the scratch folder.

    Pinned memory counts with what rounding it up takes. batches: those of each window of the run.
    """
    windows, lengths = prepared.plan.windows, prepared.plan.lengths
    rows = _row_bytes(prepared, windows)
    if prepared.room is None:
        return rows, 0
    shapes = ([(len(batch), int(lengths[batch].max())) for batch in window] for window in batches)
    streams = max(_stream_bytes(prepared, window) for window in shapes)
    rows_in_memory = _rows_in_memory(prepared, windows)
    in_memory = rows_in_memory + (streams if prepared.room.fits_memory(rows_in_memory, streams) else 0)
    in_scratch = rows + streams - in_memory
    return in_memory + (PREFETCH_PINNED if prepared.settings.on_card else 0), in_scratch


def _window_bytes(prepared: Prepared) -> int | None:
    return None if prepared.room is not None else prepared.settings.window_bytes


def _rows_folder(prepared: Prepared, windows: Sequence[Window]) -> Path | None:
    room = prepared.room
    return None if room is None or room.fits_memory(_row_bytes(prepared, windows)) else room.scratch


def _rows_in_memory(prepared: Prepared, windows: Sequence[Window]) -> int:
    return _row_bytes(prepared, windows) if _rows_folder(prepared, windows) is None else 0


def _row_bytes(prepared: Prepared, windows: Sequence[Window]) -> int:
    n_buffers, n_bytes = buffer_sizes(windows, prepared.layout, _window_bytes(prepared))
    return n_buffers * (pinned_bytes(n_bytes) if prepared.settings.on_card else n_bytes)


def _stream_bytes(prepared: Prepared, shapes: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that the streams of batches take on the host. shapes: the prompts and the padded tokens of each."""
    token_bytes = prepared.description.hidden_size * int(getattr(torch, prepared.settings.compute_dtype).itemsize)
    sizes = (n_prompts * width * token_bytes for n_prompts, width in shapes)
    return sum(map(pinned_bytes, sizes) if prepared.settings.on_card else sizes)


@dataclass
class _Batch:
    """Prompts that are read together. number: of its stream in the activation store. places: of its rows in the window's buffer."""

    number: int
    prompts: list[int]
    ids_BS: torch.Tensor
    real_T: torch.Tensor | None
    places: Places
    n_tokens: int


@dataclass
class _Pass:
    """One window on its way through the blocks.

    in_flight: rows that are copied to host memory, with their batch and the position of their layer.
    read: tokens times blocks so far, and advanced: the whole tokens of it that were reported.
    """

    window: Window
    buffer: WindowBuffer
    target_LTW: torch.Tensor
    batches: list[_Batch]
    waiting: Waiting
    in_flight: deque[tuple[_Batch, int, Arrival]] = field(default_factory=deque)
    lowered: int | None = None
    read: int = 0
    advanced: int = 0


class StreamReader:
    """Reads windows through a model whose blocks are streamed. A context manager: at its end nothing of a block is loaded any more."""

    def __init__(
        self,
        prepared: Prepared,
        decoder: BlockwiseDecoder,
        windows: Sequence[Window],
        reporter: Reporter,
        stop: StopFlag,
        on_read: OnRead,
    ) -> None:
        """windows: all that will be read, in order. on_read: called with each when its buffer is filled."""
        self._prepared, self._reporter, self._stop, self._on_read = prepared, reporter, stop, on_read
        self._device = decoder.decoder.device
        self._restart, self.feed = Restart(decoder.decoder), Feed(decoder, len(windows))
        self._windows_left = len(windows)
        self._dtype = getattr(torch, prepared.settings.compute_dtype)
        self._store_dtype = getattr(torch, prepared.settings.store_dtype)
        directions = prepared.directions_DH
        self._directions_DH = None if directions is None else upload(directions, self._device)
        self._transfer = Transfer(self._device)
        ids = prepared.tokens.of(int(prepared.plan.lengths.argmax()))
        n_tried = tried_tokens(prepared.description.n_chosen_keys)
        self._witness: Witness | None = Witness(decoder.decoder, self._restart, ids, n_tried, prepared.plan.length_switches)
        self._to_check = batches_to_check(prepared) if prepared.check_values else []
        allowed = allowed_error(prepared)
        self._comparisons = [Comparison(self._restart, batch, self._store_dtype, allowed, self._device) for batch in self._to_check]
        self._rows_in_memory = _rows_in_memory(prepared, windows)
        self._lowered: int | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(true_float32())
        self._stack.enter_context(self._restart)
        self._stack.enter_context(self.feed)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def read(self, window: Window, buffer: WindowBuffer) -> None:
        """Read a window into its buffer, each row at its prompt's place, and call `on_read`.

        If the device has no memory for a batch, it is halved, and so is the batch budget of the windows that follow. Raises ModelError if
        a block cannot be read, or is found to be read wrongly, and StreamError for a single prompt that is too large.
        """
        n_blocks, started = self._prepared.n_blocks, time.monotonic()
        batches = [self._batch(number, prompts, window) for number, prompts in enumerate(self._prepared.plan.batches(window, self._budget))]
        way = _Pass(window, buffer, from_bits(buffer.rows_LTW, self._store_dtype), batches, self._store_for(batches), lowered=self._lowered)
        try:
            for block in range(n_blocks):
                self.feed.next(self._stop.check)
                self._see(block)
                self._run(way, block)
                if self._witness is not None and block + 1 == _TOLD_AFTER < n_blocks // 2:
                    self._tell((time.monotonic() - started) / _TOLD_AFTER)
            while way.in_flight:
                self._finish_first(way)
        finally:
            # A copy that is still under way must not write into memory that a later run of this process is given.
            for _, _, arrival in way.in_flight:
                with suppress(RuntimeError):
                    arrival.wait()
            way.waiting.close()
        self._witness, self._lowered = None, way.lowered
        self._windows_left -= 1
        self._on_read(window, buffer, way.lowered)

    def finish(self) -> None:
        """Wait until all that was started is read: `read` leaves nothing behind."""

    @property
    def _budget(self) -> int:
        return self._lowered or self._prepared.plan.batch_tokens

    def _batch(self, number: int, prompts: list[int], window: Window, width: int | None = None) -> _Batch:
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        ids_BS, real_T = pad([self._prepared.tokens.of(prompt) for prompt in prompts], self._device, width, order)
        places = find_places([prompts[row] for row in order], window, self._prepared)
        return _Batch(number, prompts, ids_BS, real_T, places, sum(int(self._prepared.plan.lengths[prompt]) for prompt in prompts))

    def _store_for(self, batches: Sequence[_Batch]) -> Waiting:
        """Return the activation store for a window: in a scratch file, on the card, or in host memory."""
        shapes = [(batch.ids_BS.shape[0], batch.ids_BS.shape[1]) for batch in batches]
        n_bytes = _stream_bytes(self._prepared, shapes)
        room = self._prepared.room
        if room is not None and room.scratch is not None and not room.fits_memory(self._rows_in_memory, n_bytes):
            return InFile(room.scratch, [(*shape, self._prepared.description.hidden_size) for shape in shapes], self._dtype, self._device)
        if self._device.type != "cuda" or n_bytes <= _STAYS * free_card_bytes(self._device):
            return OnDevice()
        return InMemory(self._device)

    def _see(self, block: int) -> None:
        """In the first window: whether the block is read right."""
        if self._witness is None:
            return
        self._witness.see(block)
        for comparison in self._comparisons:
            comparison.see(block, block in self._prepared.layers)
        if self._comparisons and block == self._prepared.n_blocks - 1:
            worst = max(comparison.worst for comparison in self._comparisons)
            self._reporter.note(say_checked(self._to_check, worst, allowed_error(self._prepared)))

    def _tell(self, block_s: float) -> None:
        left = block_s * (self._prepared.n_blocks * self._windows_left - _TOLD_AFTER)
        windows = f"{self._windows_left} windows" if self._windows_left > 1 else "one window"
        limit = "reading weights" if self.feed.wait_s > _TOLD_AFTER * block_s / 2 else "computing"
        self._reporter.note(f"{block_s:.1f} s a block, limited by {limit}: about {duration(left)} for the rest of {windows}")

    def _run(self, way: _Pass, block: int) -> None:
        """Run all batches of a window through one block."""
        place = 0
        while place < len(way.batches):
            self._stop.check()
            batch = way.batches[place]
            following = way.batches[place + 1].number if place + 1 < len(way.batches) else way.batches[0].number
            if not self._try(way, batch, block, following):
                self._make_room(way, place)
                continue
            if len(way.in_flight) > 1:
                self._finish_first(way)
            self._advance(way, batch.n_tokens)
            place += 1

    @torch.inference_mode()
    def _try(self, way: _Pass, batch: _Batch, block: int, following: int) -> bool:
        """Run a batch through a block: its rows on their way, and its stream in the store. False if the device has no memory for it."""
        arrival: Arrival | None = None
        try:
            stream_BSH = way.waiting.get(batch.number, following) if block else None
            after_BSH = self._restart.run(batch.ids_BS, block, stream_BSH)
            del stream_BSH
            check_shape(after_BSH, (*batch.ids_BS.shape, self._prepared.description.hidden_size), block)
            layer = self._prepared.layers.index(block) if block in self._prepared.layers else None
            if layer is not None:
                rows_TW = take_rows(after_BSH, batch.real_T, self._directions_DH)
                captured = Captured(rows_TW.to(self._store_dtype)[None], find_peak(rows_TW, self._prepared.allow_nonfinite)[None])
                arrival = self._transfer.start(captured, way.target_LTW[layer : layer + 1], batch.places)
            if block + 1 < self._prepared.n_blocks:
                way.waiting.put(batch.number, after_BSH)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if arrival is not None:
                # The batch is tried again, and its rows are copied again: this copy must not outlive its memory on the device.
                arrival.wait()
            return False
        if layer is not None and arrival is not None:
            way.in_flight.append((batch, layer, arrival))
        return True

    def _make_room(self, way: _Pass, place: int) -> None:
        """Make room on the device for a batch that did not fit: finish what is under way, then move streams to the host, then halve it."""
        is_alone = not way.in_flight
        while way.in_flight:
            self._finish_first(way)
        free_memory()
        if not is_alone:
            return
        if isinstance(way.waiting, OnDevice) and self._device.type == "cuda" and not way.waiting.is_empty:
            way.waiting = way.waiting.move_to(InMemory(self._device))
            free_memory()
            return
        self._halve(way, place)

    def _finish_first(self, way: _Pass) -> None:
        batch, layer, arrival = way.in_flight.popleft()
        check_range(batch.prompts, arrival.wait(), way.window, way.buffer, self._prepared, layer)

    def _halve(self, way: _Pass, place: int) -> None:
        """Make two batches of one that did not fit, and of each after it that is larger than what is left of the batch budget."""
        batch, plan = way.batches[place], self._prepared.plan
        check_divisible(batch.prompts, self._prepared)
        n_kept, width = (len(batch.prompts) + 1) // 2, batch.ids_BS.shape[1]
        if way.lowered is None or plan.footprint(len(batch.prompts), width) <= way.lowered:
            way.lowered = plan.footprint(n_kept, width)
            self._reporter.note(say_lowered(batch.prompts, way.lowered))
        self._split(way, place)
        while place < len(way.batches):
            if len(way.batches[place].prompts) > 1 and plan.footprint(*way.batches[place].ids_BS.shape) > way.lowered:
                self._split(way, place)
            else:
                place += 1

    def _split(self, way: _Pass, place: int) -> None:
        """Make two batches of one, each as wide as it was: the streams in the store are."""
        batch, other = way.batches[place], len(way.batches)
        n_kept, width = (len(batch.prompts) + 1) // 2, batch.ids_BS.shape[1]
        way.batches[place : place + 1] = [
            self._batch(batch.number, batch.prompts[:n_kept], way.window, width),
            self._batch(other, batch.prompts[n_kept:], way.window, width),
        ]
        way.waiting.split(batch.number, n_kept, other)

    def _advance(self, way: _Pass, n_tokens: int) -> None:
        """Tell of tokens that were read through one more block: a token counts when it has come through all."""
        way.read += n_tokens
        whole = way.read // self._prepared.n_blocks
        self._reporter.advance(whole - way.advanced)
        way.advanced = whole
