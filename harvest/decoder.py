"""A run's decoder: its weights loaded, and seen to have a stream that is read right before anything is written."""

import torch

from harvest.errors import HarvestError
from harvest.model.blocks import LoadedDecoder
from harvest.model.capture import Capture
from harvest.model.load import load_decoder
from harvest.model.plain import check_values, tolerance
from harvest.model.soundness import check_stream, tried_tokens
from harvest.prepare import Prepared
from harvest.progress import Reporter


def load(prepared: Prepared, reporter: Reporter) -> LoadedDecoder:
    """Load a run's decoder up to the deepest asked block, and see that it has a stream that is read right. Raises ModelError."""
    dtype, n_blocks = getattr(torch, prepared.settings.compute_dtype), prepared.layers[-1] + 1
    ids = prepared.tokens.of(int(prepared.plan.lengths.argmax()))
    switches = prepared.plan.length_switches
    n_tried = tried_tokens(prepared.description.n_chosen_keys)
    attention = prepared.settings.attention
    decoder = load_decoder(prepared.description, prepared.placement, dtype, n_blocks, attention)
    try:
        check_stream(decoder, ids, n_tried, switches)
    except HarvestError:
        raise
    except Exception:
        # A model that asks for a block above the cut is read whole, and must show there what it does with its blocks.
        if not decoder.is_cut:
            raise
        decoder = load_decoder(prepared.description, prepared.placement, dtype, n_blocks, attention, allow_cut=False)
        check_stream(decoder, ids, n_tried, switches)
    if prepared.placement.limits is not None:
        reporter.note(f"weights: {decoder.where()}")
    decoder.drop_above(n_blocks)
    return decoder


def compare(prepared: Prepared, decoder: LoadedDecoder, capture: Capture, reporter: Reporter) -> None:
    """--check: compare the longest prompt and one of the middle length, read together as the run would, with each alone."""
    order = prepared.plan.lengths.argsort(kind="stable")
    chosen = sorted({int(order[place]) for place in (len(order) // 2, len(order) - 1)})
    allowed = tolerance(prepared.settings.store_dtype, prepared.settings.compute_dtype)
    # With so large a budget a pass costs more than any padding: only those that may never share a batch do not share one here.
    batches = prepared.plan.cut(chosen, 1 << 40)
    prompts = [[prepared.tokens.of(number) for number in batch] for batch in batches]
    worst = max(check_values(decoder, capture, prepared.layers, batch, allowed) for batch in prompts)
    how = "in a batch" if len(batches) == 1 else f"in {len(batches)} batches"
    reporter.note(f"checked: {len(chosen)} prompts {how} are within {worst:.1e} of what each gives alone ({allowed:.0e} is allowed)")
