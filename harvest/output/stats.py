"""Mean, standard deviation and mean norm of the stored rows, in float64, each prompt's first token left out.

A token that holds a value that is not finite, which a run stores only where it is allowed to, is left out too, in that layer.

Position 0 is an attention sink whose norm would swamp the others. Sums over chunks make a shard's, and sums over shards, in shard
order, the run's; so the stats depend on the stored bytes alone.

Shapes: L layers, T tokens, W values a token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

# Values widened to float64 at a time: a block that stays in a core's cache.
_BLOCK_VALUES = 1 << 16


@dataclass(frozen=True)
class ChunkSums:
    """Over the rows of one chunk: sum_W and sum_sq_W float64 [W], and the sum of L2 norms.

    n_counted: the rows that these add up. n_nonfinite: rows with a value that is not finite, the first of a prompt among them.
    """

    sum_W: npt.NDArray[np.float64]
    sum_sq_W: npt.NDArray[np.float64]
    norm_sum: float
    n_counted: int
    n_nonfinite: int


@dataclass(frozen=True)
class RunStats:
    """mean_LW and std_LW (population), float64 [L, W]; mean_norm_L, float64 [L]. All zero where no token counts."""

    mean_LW: npt.NDArray[np.float64]
    std_LW: npt.NDArray[np.float64]
    mean_norm_L: npt.NDArray[np.float64]

    def to_safetensors(self, layers: list[int]) -> bytes:
        """stats.safetensors as the API writes it: mean and std, float32, and layer_indices, int32."""
        return safetensors.numpy.save(
            {
                "mean": self.mean_LW.astype(np.float32),
                "std": self.std_LW.astype(np.float32),
                "layer_indices": np.array(layers, dtype=np.int32),
            }
        )


def widen(rows: npt.NDArray[Any], store_dtype: str) -> npt.NDArray[np.float64]:
    """Stored rows as float64, exactly."""
    if store_dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    # A NaN may be of the signalling kind, for which numpy warns; what to do about a NaN is the caller's matter.
    with np.errstate(invalid="ignore"):
        return rows.astype(np.float64)


def sum_rows(rows_TW: npt.NDArray[Any], left_out: npt.NDArray[np.int64], store_dtype: str) -> ChunkSums:
    """The sums over stored rows [T, W], the rows numbered in `left_out` (ascending) not counted."""
    width = rows_TW.shape[1]
    sum_W, sum_sq_W, norm_sum, n_nonfinite = np.zeros(width), np.zeros(width), 0.0, 0
    n_counted = len(rows_TW) - len(left_out)
    step = max(1, _BLOCK_VALUES // width)
    for start in range(0, len(rows_TW), step):
        block_TW = widen(rows_TW[start : start + step], store_dtype)
        low, high = np.searchsorted(left_out, (start, start + step))
        first_tokens = left_out[low:high] - start
        # One sum tells whether all are finite: they are float64, where nothing that was stored can add up to an overflow.
        with np.errstate(invalid="ignore"):
            is_finite = np.isfinite(block_TW.sum())
        if not is_finite:
            bad = np.flatnonzero(~np.isfinite(block_TW).all(axis=1))
            block_TW[bad] = 0
            n_nonfinite += len(bad)
            n_counted -= len(np.setdiff1d(bad, first_tokens))
        block_TW[first_tokens] = 0
        sum_W += block_TW.sum(axis=0)
        np.multiply(block_TW, block_TW, out=block_TW)
        sum_sq_W += block_TW.sum(axis=0)
        norm_sum += float(np.sqrt(block_TW.sum(axis=1)).sum())
    return ChunkSums(sum_W, sum_sq_W, norm_sum, n_counted, n_nonfinite)


def combine(shards: Iterable[Sequence[npt.NDArray[np.float64]]]) -> RunStats:
    """The run's stats from each shard's token_sum, token_sum_sq [L, W], token_norm_sum [L] and token_count [L]."""
    totals: list[npt.NDArray[np.float64]] | None = None
    for parts in shards:
        if totals is None:
            totals = [np.zeros_like(part) for part in parts]
        for total, part in zip(totals, parts, strict=True):
            total += part
    assert totals is not None, "a run has at least one shard"
    sum_LW, sum_sq_LW, norm_sum_L, count_L = totals
    # Where no token counts, the sums are zero, and so is what they are divided into.
    counted_L = np.maximum(count_L, 1)
    mean_LW, mean_sq_LW, mean_norm_L = sum_LW / counted_L[:, None], sum_sq_LW / counted_L[:, None], norm_sum_L / counted_L
    return RunStats(mean_LW, np.sqrt(np.maximum(mean_sq_LW - mean_LW**2, 0)), mean_norm_L)
