"""One window: its batches through the model, and each captured row to its place in the window's buffer."""

import gc
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
) -> int | None:
    """Read a window's batches into its buffer, each row at its prompt's place. The copy of a batch runs beside the next one's pass.

    Where the device has no memory for a batch, the budget of a batch is halved for the rest of the window; answers what it came down to,
    or None where it held. Raises StreamError for a single prompt that is too large.
    """
    plan = prepared.plan
    on_the_way: deque[tuple[list[int], Arrival]] = deque()
    batches = deque(plan.batches(window))
    budget = plan.batch_tokens

    def place_first() -> None:
        batch, arrival = on_the_way.popleft()
        _place(batch, arrival.wait(), window, buffer, prepared)
        reporter.advance(sum(int(plan.lengths[prompt]) for prompt in batch))

    while batches or on_the_way:
        stop.check()
        if batches:
            captured = _read(capture, prepared, batches[0])
            if captured is None:
                # What is still on the device makes room first: only then is it known what fits.
                is_alone = not on_the_way
                while on_the_way:
                    place_first()
                _free_memory()
                if is_alone:
                    budget = _halve(budget, batches[0], prepared)
                    reporter.note(
                        f"warning: a batch of {len(batches[0])} prompts did not fit the device's memory; the budget of a batch is "
                        f"{budget:,} tokens for the rest of this window, so its last bits may differ from a run that did fit"
                    )
                    batches = deque(plan.cut(sorted(prompt for batch in batches for prompt in batch), budget))
                continue
            on_the_way.append((batches.popleft(), transfer.start(captured)))
            # Named any longer, the rows of three batches would stay on the device.
            del captured
        if len(on_the_way) > 1 or not batches:
            place_first()
    return budget if budget < plan.batch_tokens else None


def _read(capture: Capture, prepared: Prepared, batch: Sequence[int]) -> Captured | None:
    """Capture one batch; None where the device has no memory for it."""
    try:
        return capture.read([prepared.tokens.of(prompt) for prompt in batch])
    except RuntimeError as error:
        # accelerate knows the words in which the libraries of each device say it; what it lacks is cuBLAS's own.
        from accelerate.utils.memory import should_reduce_batch_size

        if should_reduce_batch_size(error) or isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            return None
        raise


def _halve(budget: int, batch: Sequence[int], prepared: Prepared) -> int:
    """The next budget after a batch that did not fit: half, or less where that was smaller. Raises StreamError for a single prompt."""
    longest = int(prepared.plan.lengths[batch].max())
    if len(batch) == 1:
        raise StreamError(
            f"prompt {batch[0]}, of {longest} tokens, does not fit the device's memory even alone; "
            "lower --context-length, ask for fewer layers, or take a larger device"
        )
    return min(budget // 2, len(batch) // 2 * longest)


def _free_memory() -> None:
    # An error on its way keeps the frames of the forward pass, and with them its tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
        peak = float(rows.peaks_L[position])
        if prepared.allow_nonfinite and not np.isfinite(peak):
            continue
        bad = np.flatnonzero(~np.isfinite(widen(rows.rows_LTW[position], store_dtype)).all(axis=1))
        if not len(bad):
            continue
        starts = np.concatenate([[0], np.cumsum([prepared.plan.lengths[prompt] for prompt in batch])])
        place = int(np.searchsorted(starts, bad[0], side="right")) - 1
        where = f"layer {prepared.layers[position]}, prompt {batch[place]}, position {bad[0] - starts[place]}"
        if np.isfinite(peak):
            raise ValueRangeError(
                f"{where}: the stream reaches {peak:,.6g}, and {store_dtype} ends at {limit:,.6g}; "
                "store it with --store-dtype bfloat16 or float32"
            )
        raise ValueRangeError(
            f"{where}: the model itself computed a value that is not finite in {prepared.settings.compute_dtype}; "
            "try --compute-dtype float32 or bfloat16, or store it as it is with --allow-nonfinite"
        )
