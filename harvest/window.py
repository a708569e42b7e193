"""One window: its batches through the model, and each captured row to its place in the window's buffer."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from harvest.errors import StreamError, ValueRangeError
from harvest.input.plan import Window
from harvest.model.capture import Capture, Captured
from harvest.model.transfer import Arrival, HostRows, Transfer
from harvest.output.stats import widen
from harvest.output.writers import WindowBuffer
from harvest.prepare import Prepared
from harvest.progress import Reporter
from harvest.stop import StopFlag


def read_window(
    window: Window,
    buffer: WindowBuffer,
    prepared: Prepared,
    capture: Capture,
    transfer: Transfer,
    reporter: Reporter,
    stop: StopFlag,
) -> None:
    """Read a window's batches into its buffer, each row at its prompt's place. The copy of a batch runs beside the next one's pass."""
    on_the_way: deque[tuple[list[int], Arrival]] = deque()
    batches = deque(prepared.plan.batches(window))
    while batches or on_the_way:
        stop.check()
        if batches:
            batch = batches.popleft()
            captured = _read(capture, prepared, batch)
            if captured is None:
                reporter.note(f"a batch of {len(batch)} prompts did not fit the device's memory; it is read in two halves")
                batches.extendleft((batch[len(batch) // 2 :], batch[: len(batch) // 2]))
                continue
            on_the_way.append((batch, transfer.start(captured)))
        if len(on_the_way) > 1 or not batches:
            batch, arrival = on_the_way.popleft()
            _place(batch, arrival.wait(), window, buffer, prepared)
            reporter.advance(sum(int(prepared.plan.lengths[prompt]) for prompt in batch))


def _read(capture: Capture, prepared: Prepared, batch: Sequence[int]) -> Captured | None:
    """Capture one batch; None where the device has no memory for it as a whole. Raises StreamError for one prompt that is too large."""
    try:
        return capture.read([prepared.tokens.of(prompt) for prompt in batch])
    except torch.OutOfMemoryError as error:
        if len(batch) == 1:
            n_tokens = int(prepared.plan.lengths[batch[0]])
            raise StreamError(
                f"prompt {batch[0]}, of {n_tokens} tokens, does not fit the device's memory even alone; "
                "lower --context-length, ask for fewer layers, or take a larger device"
            ) from error
        return None


def _place(batch: Sequence[int], rows: HostRows, window: Window, buffer: WindowBuffer, prepared: Prepared) -> None:
    offsets = prepared.tokens.offsets
    _check_range(batch, rows, prepared)
    row = 0
    for prompt in batch:
        n_tokens = int(offsets[prompt + 1] - offsets[prompt])
        at = int(offsets[prompt] - offsets[window.first])
        buffer.rows_LTW[:, at : at + n_tokens] = rows.rows_LTW[:, row : row + n_tokens]
        row += n_tokens


def _check_range(batch: Sequence[int], rows: HostRows, prepared: Prepared) -> None:
    """Raise ValueRangeError where a stored value is not finite. Only layers whose peak says so are looked at."""
    store_dtype = prepared.settings.store_dtype
    limit = torch.finfo(getattr(torch, store_dtype)).max
    for position in np.flatnonzero(~(rows.peaks_L <= limit)):
        bad = np.flatnonzero(~np.isfinite(widen(rows.rows_LTW[position], store_dtype)).all(axis=1))
        if not len(bad):
            continue
        starts = np.concatenate([[0], np.cumsum([prepared.plan.lengths[prompt] for prompt in batch])])
        place = int(np.searchsorted(starts, bad[0], side="right")) - 1
        where = f"layer {prepared.layers[position]}, prompt {batch[place]}, position {bad[0] - starts[place]}"
        peak = float(rows.peaks_L[position])
        if np.isfinite(peak):
            raise ValueRangeError(
                f"{where}: the stream reaches {peak:,.6g}, and {store_dtype} ends at {limit:,.6g}; "
                "store it with --store-dtype bfloat16 or float32"
            )
        raise ValueRangeError(
            f"{where}: the model itself computed a value that is not finite in {prepared.settings.compute_dtype}; "
            "try --compute-dtype float32 or bfloat16"
        )
