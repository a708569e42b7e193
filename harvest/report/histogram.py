"""Counts of values in bins that widen as they must: the range need not be known before, and no count is ever an estimate.

Shapes: T tokens, W values a token, N bins.
"""

import math

import numpy as np
import numpy.typing as npt

N_BINS = 1024
# Far below any value that matters, and far above where its bins would be subnormal.
_SMALLEST = -100


class Histogram:
    """Exact counts of each of W values in N bins of equal width from -R to R, R a power of two of its own for each of them.

    Where a value lies beyond R, R is doubled and each two neighbouring bins become one; their edges, being multiples of a power of two,
    stay edges, so that no count has to be divided.
    """

    def __init__(self, width: int) -> None:
        self.counts_WN = np.zeros((width, N_BINS), dtype=np.int64)
        self._exponent_W = np.full(width, _SMALLEST)

    def add(self, rows_TW: npt.NDArray[np.float64]) -> None:
        """Count rows, all of them finite."""
        if not len(rows_TW):
            return
        self._widen(np.maximum(np.frexp(np.abs(rows_TW).max(axis=0))[1], _SMALLEST))
        reach_W = np.ldexp(1.0, self._exponent_W)
        # A value is below R in size, or its exponent would be another: so the number is one of 0 to N - 1. A sum before the floor would
        # round the smallest of the negative ones up to zero.
        bin_TW = np.floor(rows_TW / reach_W * (N_BINS // 2)).astype(np.int64) + N_BINS // 2
        flat = (bin_TW + np.arange(rows_TW.shape[1]) * N_BINS).ravel()
        self.counts_WN += np.bincount(flat, minlength=self.counts_WN.size).reshape(self.counts_WN.shape)

    def edges(self, value: int) -> npt.NDArray[np.float64]:
        """The N + 1 edges of one value's bins."""
        reach = math.ldexp(1.0, int(self._exponent_W[value]))
        return np.linspace(-reach, reach, N_BINS + 1)

    def quantile(self, value: int, share: float) -> float:
        """The middle of the bin up to which that share of one value's counts lies; NaN where nothing was counted."""
        counts, edges = self.counts_WN[value], self.edges(value)
        if not counts.any():
            return math.nan
        place = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
        return float(edges[place] + edges[place + 1]) / 2

    def _widen(self, exponent_W: npt.NDArray[np.int32]) -> None:
        for value in np.flatnonzero(exponent_W > self._exponent_W):
            for _ in range(min(int(exponent_W[value] - self._exponent_W[value]), N_BINS.bit_length())):
                pairs = self.counts_WN[value].reshape(-1, 2).sum(axis=1)
                self.counts_WN[value] = 0
                self.counts_WN[value, N_BINS // 4 : 3 * N_BINS // 4] = pairs
            self._exponent_W[value] = exponent_W[value]
