"""A run's decoder: its weights loaded, and seen to have a stream that is read right before anything is written."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import HarvestError
from harvest.model.blocks import LoadedDecoder
from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.device import is_failure, is_out_of_memory
from harvest.model.load import load_blockwise, load_decoder
from harvest.model.plain import tolerance
from harvest.model.soundness import check_stream, tried_tokens
from harvest.prepare import Prepared
from harvest.progress import Reporter, size
from harvest.stop import StopFlag


def load(prepared: Prepared, reporter: Reporter) -> LoadedDecoder:
    """Load a run's decoder up to the deepest asked block, and see that it has a stream that is read right. Raises ModelError."""
    dtype, n_blocks = getattr(torch, prepared.settings.compute_dtype), prepared.n_blocks
    ids = prepared.tokens.of(int(prepared.plan.lengths.argmax()))
    switches = prepared.plan.length_switches
    n_tried = tried_tokens(prepared.description.n_chosen_keys)
    attention = prepared.settings.attention
    decoder = load_decoder(prepared.description, prepared.placement, dtype, n_blocks, attention)
    try:
        check_stream(decoder, ids, n_tried, switches)
    except HarvestError:
        raise
    except Exception as error:
        # A model that asks for a block above the cut is read whole, and must show there what it does with its blocks. A device without
        # memory for the cut model has none for the whole one.
        if not decoder.is_cut or is_out_of_memory(error) or is_failure(error):
            raise
        decoder = load_decoder(prepared.description, prepared.placement, dtype, n_blocks, attention, allow_cut=False)
        check_stream(decoder, ids, n_tried, switches)
    if prepared.placement.limits is not None:
        reporter.note(f"weights: {decoder.where()}")
    decoder.drop_above(n_blocks)
    return decoder


def load_streamed(prepared: Prepared, reporter: Reporter, stop: StopFlag) -> BlockwiseDecoder:
    """Load what stands beside the blocks of a run's decoder, and see that all that the blocks take is there. Raises ModelError.

    Whether the stream is read right shows when the blocks are there: see `model.witness`.
    """
    dtype = getattr(torch, prepared.settings.compute_dtype)
    decoder = load_blockwise(prepared.description, prepared.placement, dtype, prepared.n_blocks, prepared.settings.attention)
    decoder.rehearse(stop.check)
    n_bytes = sum(decoder.n_bytes(block) for block in range(prepared.n_blocks))
    n_windows = len(prepared.plan.windows)
    reporter.note(
        f"weights: {prepared.n_blocks} block{'' if prepared.n_blocks == 1 else 's'}, {size(n_bytes)} in the model's files, streamed once "
        f"for each of {n_windows} window{'' if n_windows == 1 else 's'}"
    )
    return decoder


def batches_to_check(prepared: Prepared) -> list[list[npt.NDArray[np.int32]]]:
    """What --check reads: the longest prompt and one of the middle length, together as the run would, by their token ids."""
    order = prepared.plan.lengths.argsort(kind="stable")
    chosen = sorted({int(order[place]) for place in (len(order) // 2, len(order) - 1)})
    # With so large a budget a pass costs more than any padding: only those that may never share a batch do not share one here.
    return [[prepared.tokens.of(number) for number in batch] for batch in prepared.plan.cut(chosen, 1 << 40)]


def allowed_error(prepared: Prepared) -> float:
    """How far a prompt of a batch may be from the same prompt alone, on average, relative to its norm."""
    return tolerance(prepared.settings.store_dtype, prepared.settings.compute_dtype)


def say_checked(batches: Sequence[Sequence[npt.NDArray[np.int32]]], worst: float, allowed: float) -> str:
    """What to say of a check that found nothing wrong."""
    how = "in a batch" if len(batches) == 1 else f"in {len(batches)} batches"
    return f"checked: {sum(map(len, batches))} prompts {how} are within {worst:.1e} of what each gives alone ({allowed:.0e} is allowed)"
