"""Counts in bins that widen: the same as if the range had been known before."""

import math

import numpy as np
import pytest

from harvest.report.histogram import N_BINS, Histogram


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_a_histogram_with_the_last_edges(seed: int) -> None:
    random = np.random.default_rng(seed)
    # Columns of sizes from tiny to large, each growing from piece to piece.
    rows = random.standard_normal((3000, 6)) * 10.0 ** np.array([-12, -3, 0, 1, 4, 9]) * np.geomspace(1e-3, 30, 3000)[:, None]
    rows[5] = 0
    rows[6] = -(2.0 ** np.arange(6))
    rows[7] = 2.0 ** np.arange(6)
    histogram = Histogram(6)
    for piece in np.array_split(rows, [1, 7, 8, 100, 101, 2000, 2000]):
        histogram.add(piece)
    for column in range(6):
        edges = histogram.edges(column)
        counts, _ = np.histogram(rows[:, column], edges)
        assert histogram.counts_WN[column].tolist() == counts.tolist()
        assert counts.sum() == len(rows)
        # No wider than it has to be: a power of two above the largest.
        assert edges[-1] / 2 <= np.abs(rows[:, column]).max() < edges[-1]
        assert math.frexp(edges[-1])[0] == 0.5
        assert len(edges) == N_BINS + 1


def test_a_far_larger_value_leaves_the_others_in_the_two_middle_bins() -> None:
    histogram = Histogram(1)
    histogram.add(np.array([[1e-6], [-1e-6], [2e-6]]))
    histogram.add(np.array([[1e30]]))
    counts = histogram.counts_WN[0]
    assert (counts[N_BINS // 2 - 1], counts[N_BINS // 2], counts.sum()) == (1, 2, 4)


def test_quantiles_are_within_a_bin() -> None:
    values = np.random.default_rng(0).normal(3, 1, 10_000)
    histogram = Histogram(1)
    assert math.isnan(histogram.quantile(0, 0.5))
    histogram.add(values[:, None])
    for share in (0.05, 0.5, 0.95):
        assert histogram.quantile(0, share) == pytest.approx(np.quantile(values, share), abs=16 / N_BINS)
