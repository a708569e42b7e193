"""The figures of a report, by one pass over a run's rows, a block at a time; of a very large run a seeded sample of its blocks is read.

Shapes: L layers, T tokens, W values a token, P bins of positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harvest.progress import Reporter, Silent
from harvest.reading.blocks import read_blocks, widened
from harvest.reading.run import Run
from harvest.report.histogram import Histogram
from harvest.report.strongest import Strongest

_Floats = npt.NDArray[np.float64]

# Positions up to this one have a bin each; beyond, each octave has this many.
_SINGLE_POSITIONS = 32
_BINS_AN_OCTAVE = 8
# So many shards at least are part of a sample, so that a few long stretches of prompts do not stand for all.
_SAMPLED_SHARDS = 16
SEED = 0
NOTHING_COUNTED = "There is no token to say something of: each prompt has its first token alone, or values that are not finite."
_SMALLEST_NORM = 2.0**-15


@dataclass(frozen=True)
class LayerMeasures:
    """One layer. Unless it says so, the first token of each prompt is left out, as in the stats, and so is what is not finite.

    mean_norm, std_norm: of the tokens' L2 norms; low_norm, high_norm: their 5th and 95th percentile, to within 3%.
    start_norm: the mean norm of the first tokens, NaN where none is finite.
    position_norm_P: the mean norm by position, the first included, NaN where a bin has no token.
    mean_W, variance_W, mean_abs_W, low_W, high_W: of each value.
    n_counted: tokens that these figures are of. n_nonfinite: tokens with a value that is not finite, the first of a prompt among them.
    histogram, positive, negative: for projections alone.
    """

    layer: int
    n_counted: int
    n_nonfinite: int
    mean_norm: float
    std_norm: float
    low_norm: float
    high_norm: float
    start_norm: float
    position_norm_P: _Floats
    mean_W: _Floats
    variance_W: _Floats
    mean_abs_W: _Floats
    low_W: _Floats
    high_W: _Floats
    histogram: Histogram | None
    strongest: Strongest | None


@dataclass(frozen=True)
class Measures:
    """What the pass found. n_read, n_tokens: tokens that were read, and all. position_edges: bin p is positions edges[p] to edges[p+1]."""

    layers: list[LayerMeasures]
    position_edges: npt.NDArray[np.int64]
    n_read: int
    n_tokens: int

    @property
    def is_sample(self) -> bool:
        """Whether only a part of the tokens was read."""
        return self.n_read < self.n_tokens


def measure(run: Run, layers: Sequence[int], max_values: int, n_strongest: int, reporter: Reporter | None = None) -> Measures:
    """Read the given layers of a run once, and answer their figures.

    max_values: where the run holds more values than that in these layers, a seeded draw of its shards, and of these
    evenly spread blocks, are read to about so many.
    n_strongest: tokens to keep for each direction of a run that projects, at either end.
    Memory is bounded by a block, and by the layers times the width. Raises NotARunError where a shard cannot be read.
    """
    reporter = reporter or Silent()
    positions = [run.layer_position(layer) for layer in layers]
    edges = position_edges(int(np.diff(run.axis.prompt_offsets).max()))
    tallies = [_Tally(run, edges, n_strongest) for _ in layers]
    n_read = 0
    reporter.begin(run.n_tokens, 0)
    try:
        for index, is_wanted in _chosen(run, run.n_tokens * len(layers) * run.width, max_values):
            with run.shard(index) as shard:
                prompts_T, positions_T = _places(shard.prompts, shard.token_offsets)
                for start, rows_LTW in read_blocks(shard, positions, is_wanted):
                    for tally, rows_TW in zip(tallies, rows_LTW, strict=True):
                        for first, piece_TW in widened(rows_TW):
                            here = slice(start + first, start + first + len(piece_TW))
                            tally.add(piece_TW, prompts_T[here], positions_T[here])
                    n_read += rows_LTW.shape[1]
                    reporter.advance(rows_LTW.shape[1])
    finally:
        reporter.end()
    return Measures([tally.figures(layer) for layer, tally in zip(layers, tallies, strict=True)], edges, n_read, run.n_tokens)


def position_edges(longest: int) -> npt.NDArray[np.int64]:
    """Edges of bins of positions 0 to longest - 1: one a position at first, then eight an octave."""
    edges = list(range(min(longest, _SINGLE_POSITIONS) + 1))
    step = 1
    while edges[-1] < longest:
        edge = round(_SINGLE_POSITIONS * 2 ** (step / _BINS_AN_OCTAVE))
        edges.append(min(edge, longest))
        step += 1
    return np.array(edges)


def _chosen(run: Run, n_values: int, max_values: int) -> Iterator[tuple[int, Callable[[int], bool]]]:
    """The shards to read, ascending, each with what says which of its blocks."""
    if n_values <= max_values:
        yield from ((index, _always) for index in range(run.n_shards))
        return
    sizes = np.diff(run.shard_token_offsets)
    wanted = run.n_tokens * max_values / n_values
    order = np.random.default_rng(SEED).permutation(run.n_shards)
    enough = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    chosen = np.sort(order[: max(enough, _SAMPLED_SHARDS)])
    is_wanted = _Share(wanted / float(sizes[chosen].sum()))
    yield from ((int(index), is_wanted) for index in chosen)


def _always(_: int) -> bool:
    return True


class _Share:
    """Says of one block after the other whether it is read: the first is, and then a share of them, spread evenly."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._due = 1.0

    def __call__(self, _: int) -> bool:
        is_due = self._due >= 1
        self._due += self._share - is_due
        return is_due


def _places(prompts: list[int], offsets: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The prompt, and the position in it, of each token of a shard."""
    lengths = np.diff(offsets)
    return np.repeat(prompts, lengths), np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)


class _Tally:
    """The sums of one layer."""

    def __init__(self, run: Run, edges: npt.NDArray[np.int64], n_strongest: int) -> None:
        width = run.width
        self._edges = edges
        self._n_counted = self._n_nonfinite = 0
        self._sum_W, self._sq_W, self._abs_W = np.zeros(width), np.zeros(width), np.zeros(width)
        self._low_W, self._high_W = np.full(width, np.inf), np.full(width, -np.inf)
        self._norm_sum = self._norm_sq_sum = 0.0
        # Of the logarithms to base 2: a bin is 1/32 wide for norms of up to 65,536, which is 2.2 in a hundred.
        self._log_norms = Histogram(1)
        self._position_sum_P, self._position_count_P = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
        is_projection = run.manifest.contents == "projections"
        self._histogram = Histogram(width) if is_projection else None
        self._strongest = Strongest(width, n_strongest, run.n_prompts) if is_projection else None

    def add(self, rows_TW: _Floats, prompt_T: npt.NDArray[np.int64], position_T: npt.NDArray[np.int64]) -> None:
        """Add rows, with the prompt and the position of each."""
        with np.errstate(invalid="ignore", over="ignore"):
            sq_TW = np.square(rows_TW)
            norm_T = np.sqrt(sq_TW.sum(axis=1))
        is_finite_T = np.isfinite(norm_T)
        self._n_nonfinite += int((~is_finite_T).sum())
        place_T = np.searchsorted(self._edges, position_T[is_finite_T], side="right") - 1
        self._position_sum_P += np.bincount(place_T, norm_T[is_finite_T], len(self._position_sum_P))
        self._position_count_P += np.bincount(place_T, minlength=len(self._position_sum_P))
        counts_T = is_finite_T & (position_T > 0)
        if not counts_T.all():
            rows_TW, sq_TW, norm_T = rows_TW[counts_T], sq_TW[counts_T], norm_T[counts_T]
        if not len(rows_TW):
            return
        self._n_counted += len(rows_TW)
        self._sum_W += rows_TW.sum(axis=0)
        self._sq_W += sq_TW.sum(axis=0)
        self._abs_W += np.abs(rows_TW).sum(axis=0)
        self._norm_sum += float(norm_T.sum())
        self._norm_sq_sum += float(np.square(norm_T).sum())
        self._log_norms.add(np.log2(np.maximum(norm_T, _SMALLEST_NORM))[:, None])
        if self._histogram is not None and self._strongest is not None:
            np.minimum(self._low_W, rows_TW.min(axis=0), out=self._low_W)
            np.maximum(self._high_W, rows_TW.max(axis=0), out=self._high_W)
            self._histogram.add(rows_TW)
            self._strongest.add(rows_TW, prompt_T[counts_T], position_T[counts_T])

    def figures(self, layer: int) -> LayerMeasures:
        """The layer's figures; zero where no token counts."""
        n = max(self._n_counted, 1)
        mean_W, mean_norm = self._sum_W / n, self._norm_sum / n
        with np.errstate(invalid="ignore"):
            position_norm_P = self._position_sum_P / self._position_count_P
        return LayerMeasures(
            layer=layer,
            n_counted=self._n_counted,
            n_nonfinite=self._n_nonfinite,
            mean_norm=mean_norm,
            std_norm=float(np.sqrt(max(self._norm_sq_sum / n - mean_norm**2, 0))),
            low_norm=2 ** self._log_norms.quantile(0, 0.05),
            high_norm=2 ** self._log_norms.quantile(0, 0.95),
            start_norm=float(position_norm_P[0]),
            position_norm_P=position_norm_P,
            mean_W=mean_W,
            variance_W=np.maximum(self._sq_W / n - mean_W**2, 0),
            mean_abs_W=self._abs_W / n,
            low_W=self._low_W,
            high_W=self._high_W,
            histogram=self._histogram,
            strongest=self._strongest,
        )
