"""What a run has written, checked outside the clock: each shard's checksum and token ids, and a sample of its rows.

Shapes: L layers, T tokens, W values a token.
"""

import math
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from engine import read_synchronously
from measuring import cores

from harvest.input.plan import Shard
from harvest.model.blocks import LoadedDecoder
from harvest.model.plain import tolerance
from harvest.model.transfer import from_bits
from harvest.output.folder import RunFolder
from harvest.prepare import Prepared
from harvest.reading.shard import open_shard

# How far the rows of a layer of a prompt may be from a second reading on a card, relative to their norm. Kernels need not repeat there.
_CARD_ERROR = 1e-2
# Prompts of a shard whose rows are compared.
_MOST_PROMPTS = 4


def check_written(run: RunFolder, prepared: Prepared, decoder: LoadedDecoder) -> dict[str, Any]:
    """Check all shards and compare rows of the first and the last one with a synchronous reading: bit for bit on a CPU.

    findings: what is wrong, a sentence each. worst_error: of a layer of a prompt, relative to its norm; None if no rows were compared.
    """
    with ThreadPoolExecutor(cores()) as pool:
        findings = [
            finding for found in pool.map(lambda shard: _check_shard(run, prepared, shard), prepared.plan.shards) for finding in found
        ]
    errors = {} if findings else dict(_compare_rows(run, prepared, decoder))
    # A second reading is not compiled.
    settings, is_repeatable = prepared.settings, decoder.device.type != "cuda" and not prepared.settings.compile
    allowed = 0.0 if is_repeatable else max(_CARD_ERROR, settings.compile * tolerance(settings.store_dtype, settings.compute_dtype))
    findings += [f"prompt {prompt} differs from a second reading by {error:.1e}" for prompt, error in errors.items() if error > allowed]
    return {
        "shards": len(prepared.plan.shards),
        "prompts": len(errors),
        "worst_error": max(errors.values(), default=None),
        "allowed_error": allowed,
        "findings": findings,
    }


def _check_shard(run: RunFolder, prepared: Prepared, shard: Shard) -> list[str]:
    """Return what is wrong with a shard's file, its record or its token ids."""
    findings: list[str] = []
    if run.finished(shard.index, prepared.fingerprint, findings.append) is None:
        return findings or [f"shard {shard.index} was not published"]
    offsets = prepared.tokens.offsets
    with zipfile.ZipFile(run.shard(shard.index)) as archive:
        ids = np.frombuffer(archive.read(prepared.layout.small_key("token_ids")), dtype="<i4")
    if not np.array_equal(ids, prepared.tokens.ids[offsets[shard.first] : offsets[shard.end]]):
        return [f"{run.shard(shard.index).name} has other token ids than the model read"]
    return []


def _compare_rows(run: RunFolder, prepared: Prepared, decoder: LoadedDecoder) -> Iterator[tuple[int, float]]:
    """Yield prompts with the largest relative error of a layer of theirs; it is 0 only if all bits are the same."""
    sample = _sample(prepared)
    for prompt, bits_LTW in read_synchronously(prepared, decoder, sample):
        with open_shard(run.shard(sample[prompt].index)) as shard:
            stored_LTW = shard[f"prompt_{prompt}"]
        read_LTW = from_bits(bits_LTW, stored_LTW.dtype)
        # Layer by layer: all of them in float32 take twice the memory.
        yield prompt, max(_error(stored_TW, read_TW) for stored_TW, read_TW in zip(stored_LTW, read_LTW, strict=True))


def _error(stored_TW: torch.Tensor, read_TW: torch.Tensor) -> float:
    if torch.equal(stored_TW.view(torch.uint8), read_TW.view(torch.uint8)):
        return 0.0
    error = float((stored_TW.float() - read_TW.float()).norm() / read_TW.float().norm())
    return error if math.isfinite(error) else math.inf


def _sample(prepared: Prepared) -> dict[int, Shard]:
    """Return prompts of the first and the last shard: those that share a batch with the run's first prompt, or with its last."""
    plan = prepared.plan
    chosen: dict[int, Shard] = {}
    for shard, own in ((plan.shards[0], plan.shards[0].first), (plan.shards[-1], plan.shards[-1].end - 1)):
        window = next(window for window in plan.windows if window.first <= own < window.end)
        batch = next(batch for batch in plan.batches(window) if own in batch)
        others = [prompt for prompt in batch if shard.first <= prompt < shard.end and prompt != own]
        chosen |= dict.fromkeys([own, *others[: _MOST_PROMPTS - 1]], shard)
    return chosen
