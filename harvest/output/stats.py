"""Mean, standard deviation and mean norm of the stored rows, in float64, each prompt's first token left out.

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
    """Over the rows of one chunk: sum_W and sum_sq_W float64 [W], and the sum of L2 norms."""

    sum_W: npt.NDArray[np.float64]
    sum_sq_W: npt.NDArray[np.float64]
    norm_sum: float


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
    sum_W, sum_sq_W, norm_sum = np.zeros(width), np.zeros(width), 0.0
    step = max(1, _BLOCK_VALUES // width)
    for start in range(0, len(rows_TW), step):
        block_TW = widen(rows_TW[start : start + step], store_dtype)
        low, high = np.searchsorted(left_out, (start, start + step))
        block_TW[left_out[low:high] - start] = 0
        sum_W += block_TW.sum(axis=0)
        np.multiply(block_TW, block_TW, out=block_TW)
        sum_sq_W += block_TW.sum(axis=0)
        norm_sum += float(np.sqrt(block_TW.sum(axis=1)).sum())
    return ChunkSums(sum_W, sum_sq_W, norm_sum)


def combine(shards: Iterable[Sequence[npt.NDArray[np.float64]]], n_counted: int) -> RunStats:
    """The run's stats from each shard's token_sum, token_sum_sq [L, W] and token_norm_sum [L], over `n_counted` tokens."""
    totals: list[npt.NDArray[np.float64]] | None = None
    for parts in shards:
        if totals is None:
            totals = [np.zeros_like(part) for part in parts]
        for total, part in zip(totals, parts, strict=True):
            total += part
    assert totals is not None, "a run has at least one shard"
    if n_counted == 0:
        return RunStats(*(np.zeros_like(total) for total in totals))
    mean_LW, mean_sq_LW, mean_norm_L = (total / n_counted for total in totals)
    return RunStats(mean_LW, np.sqrt(np.maximum(mean_sq_LW - mean_LW**2, 0)), mean_norm_L)
