"""One window: its batches through a model that is loaded whole, and each captured row to its place in the window's buffer."""

import gc
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch

from harvest.decoder import allowed_error, batches_to_check, say_checked
from harvest.errors import StreamError, ValueRangeError
from harvest.input.plan import Window
from harvest.model.blocks import LoadedDecoder
from harvest.model.capture import Capture, Captured
from harvest.model.plain import check_values
from harvest.model.transfer import Arrival, HostRows, Transfer
from harvest.output.stats import widen
from harvest.output.writers import WindowBuffer
from harvest.prepare import Prepared
from harvest.progress import Reporter
from harvest.stop import StopFlag


class WindowReader:
    """Reads windows through a model that is loaded. A context manager, as its capture is."""

    def __init__(self, prepared: Prepared, decoder: LoadedDecoder, reporter: Reporter, stop: StopFlag) -> None:
        store_dtype = getattr(torch, prepared.settings.store_dtype)
        self._prepared, self._decoder, self._reporter, self._stop = prepared, decoder, reporter, stop
        self._capture = Capture(decoder, prepared.layers, prepared.description.hidden_size, store_dtype, prepared.directions_DH)
        self._transfer = Transfer(torch.device(prepared.settings.device))

    def __enter__(self) -> Self:
        self._capture.__enter__()
        if self._prepared.check_values:
            self._check_values()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._capture.__exit__(kind, error, trace)

    def _check_values(self) -> None:
        prepared = self._prepared
        batches, allowed = batches_to_check(prepared), allowed_error(prepared)
        worst = max(check_values(self._decoder, self._capture, prepared.layers, batch, allowed) for batch in batches)
        self._reporter.note(say_checked(batches, worst, allowed))

    def read(self, window: Window, buffer: WindowBuffer) -> int | None:
        """Read a window's batches into its buffer, each row at its prompt's place. The copy of a batch runs beside the next one's pass.

        Where the device has no memory for a batch, the budget of a batch is halved for the rest of the window; answers what it came down
        to, or None where it held. Raises StreamError for a single prompt that is too large.
        """
        prepared, plan = self._prepared, self._prepared.plan
        on_the_way: deque[tuple[list[int], Arrival]] = deque()
        batches = deque(plan.batches(window))
        budget = plan.batch_tokens

        def place_first() -> None:
            batch, arrival = on_the_way.popleft()
            place_rows(batch, arrival.wait(), window, buffer, prepared)
            self._reporter.advance(sum(int(plan.lengths[prompt]) for prompt in batch))

        while batches or on_the_way:
            self._stop.check()
            if batches:
                captured = self._read(batches[0])
                if captured is None:
                    # What is still on the device makes room first: only then is it known what fits.
                    is_alone = not on_the_way
                    while on_the_way:
                        place_first()
                    free_memory()
                    if is_alone:
                        check_divisible(batches[0], prepared)
                        budget = min(budget // 2, len(batches[0]) // 2 * int(plan.lengths[batches[0]].max()))
                        self._reporter.note(say_lowered(batches[0], budget))
                        batches = deque(plan.cut(sorted(prompt for batch in batches for prompt in batch), budget))
                    continue
                on_the_way.append((batches.popleft(), self._transfer.start(captured)))
                # Named any longer, the rows of three batches would stay on the device.
                del captured
            if len(on_the_way) > 1 or not batches:
                place_first()
        return budget if budget < plan.batch_tokens else None

    def _read(self, batch: Sequence[int]) -> Captured | None:
        """Capture one batch; None where the device has no memory for it."""
        try:
            return self._capture.read([self._prepared.tokens.of(prompt) for prompt in batch])
        except RuntimeError as error:
            if is_out_of_memory(error):
                return None
            raise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device has no memory left."""
    # accelerate knows the words in which the libraries of each device say it; what it lacks is cuBLAS's own.
    from accelerate.utils.memory import should_reduce_batch_size

    return should_reduce_batch_size(error) or isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def say_lowered(batch: Sequence[int], budget: int) -> str:
    """The warning that goes with a batch that did not fit."""
    return (
        f"warning: a batch of {len(batch)} prompts did not fit the device's memory; the budget of a batch is {budget:,} tokens for the "
        "rest of this window, so its last bits may differ from a run that did fit"
    )


def check_divisible(batch: Sequence[int], prepared: Prepared) -> None:
    """Raise StreamError where a batch that did not fit is a single prompt, and cannot be halved."""
    if len(batch) == 1:
        raise StreamError(
            f"prompt {batch[0]}, of {int(prepared.plan.lengths[batch[0]])} tokens, does not fit the device's memory even alone; "
            "lower --context-length, ask for fewer layers, or take a larger device"
        )


def free_memory() -> None:
    """Give a device's memory back that nobody needs any more."""
    # An error on its way keeps the frames of the forward pass, and with them its tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def place_rows(batch: Sequence[int], rows: HostRows, window: Window, buffer: WindowBuffer, prepared: Prepared, first: int = 0) -> None:
    """Put a batch's rows in their prompts' places in the window's buffer.

    first: the place among the asked layers of the first that they are of. Raises ValueRangeError for a value that is not finite.
    """
    offsets = prepared.tokens.offsets
    _check_range(batch, rows, prepared, first)
    row, end = 0, first + len(rows.rows_LTW)
    for prompt in batch:
        n_tokens = int(offsets[prompt + 1] - offsets[prompt])
        at = int(offsets[prompt] - offsets[window.first])
        buffer.rows_LTW[first:end, at : at + n_tokens] = rows.rows_LTW[:, row : row + n_tokens]
        row += n_tokens


def _check_range(batch: Sequence[int], rows: HostRows, prepared: Prepared, first: int) -> None:
    """Raise ValueRangeError where a stored value is not finite. Only layers whose peak says so are looked at."""
    store_dtype = prepared.settings.store_dtype
    limit = torch.finfo(getattr(torch, store_dtype)).max
    for position in np.flatnonzero(~(rows.peaks_L <= limit)):
        peak = float(rows.peaks_L[position])
        if prepared.allow_nonfinite and not np.isfinite(peak):
            continue
        bad = np.flatnonzero(~np.isfinite(widen(rows.rows_LTW[position], store_dtype)).all(axis=1))
        if not len(bad):
            continue
        starts = np.concatenate([[0], np.cumsum([prepared.plan.lengths[prompt] for prompt in batch])])
        place = int(np.searchsorted(starts, bad[0], side="right")) - 1
        where = f"layer {prepared.layers[first + position]}, prompt {batch[place]}, position {bad[0] - starts[place]}"
        if np.isfinite(peak):
            raise ValueRangeError(
                f"{where}: the stream reaches {peak:,.6g}, and {store_dtype} ends at {limit:,.6g}; "
                "store it with --store-dtype bfloat16 or float32"
            )
        raise ValueRangeError(
            f"{where}: the model itself computed a value that is not finite in {prepared.settings.compute_dtype}; "
            "try --compute-dtype float32 or bfloat16, or store it as it is with --allow-nonfinite"
        )
