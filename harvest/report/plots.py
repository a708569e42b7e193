"""The plots of a report, each as an `svg` element.

Shapes: L layers, P bins of positions, W values a token.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from harvest.reading.summary import spread
from harvest.report.drawing import COLOURS, draw, number, plain_ticks
from harvest.report.histogram import Histogram
from harvest.report.measures import LayerMeasures, Measures

_Floats = npt.NDArray[np.float64]

# Lines that can be told apart by their shade.
MAX_LINES = 5
# Up to so many layers each has a dot: more would be a string of pearls.
_DOTS = 16
_SMALL_HEIGHT = 150
_DIRECTION_HEIGHT = 190
_BARS = 60
# The share of the values at either end that lies beyond a histogram's axis.
_TAIL = 0.001


def shown_layers(layers: Sequence[LayerMeasures]) -> list[tuple[str, LayerMeasures]]:
    """The few layers that have a line where each layer would have one, with the names of their colours, from the first to the last."""
    chosen = [layers[place] for place in spread(len(layers), MAX_LINES)]
    shades = spread(MAX_LINES, len(chosen)) if len(chosen) > 1 else [MAX_LINES - 2]
    return [(f"depth{shade + 1}", layer) for shade, layer in zip(shades, chosen, strict=True)]


def norms_by_layer(measures: Measures) -> str:
    """Mean norm and its spread by layer, and that of the first tokens."""
    layers = [one.layer for one in measures.layers]
    mean_L = np.array([one.mean_norm for one in measures.layers])
    start_L = np.array([one.start_norm for one in measures.layers])

    def paint(axes: Axes) -> None:
        low_L, high_L = [one.low_norm for one in measures.layers], [one.high_norm for one in measures.layers]
        axes.fill_between(layers, low_L, high_L, color=COLOURS["accent"], alpha=0.18, linewidth=0)
        _line(axes, layers, mean_L, "accent")
        _line(axes, layers, start_L, "warm")
        plain_ticks(axes, is_log=bool((mean_L > 0).all()))
        _layer_axis(axes)

    return draw("norms-layer", f"Mean norm by layer, from {number(mean_L[0])} to {number(mean_L[-1])}.", paint)


def norms_by_position(measures: Measures) -> str:
    """Mean norm by position, of a few layers."""
    edges = measures.position_edges
    centre_P = (edges[:-1] + edges[1:] - 1) / 2

    def paint(axes: Axes) -> None:
        for colour, layer in shown_layers(measures.layers):
            is_known_P = np.isfinite(layer.position_norm_P)
            _line(axes, centre_P[is_known_P] + 1, layer.position_norm_P[is_known_P], colour)
        plain_ticks(axes, is_log=all(np.nanmin(one.position_norm_P) > 0 for one in measures.layers))
        # Position 0 has a place on a logarithmic axis where each is moved by one.
        axes.set_xscale("log")
        ticks = [0, *(tick for tick in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000) if tick < edges[-1])]
        axes.xaxis.set_major_locator(FixedLocator([tick + 1 for tick in ticks]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value) - 1:,}"))
        axes.set_xlabel("position in the prompt")

    return draw("norms-position", "Mean norm by position in the prompt, a line for each of a few layers.", paint)


def variance_shares(layers: Sequence[int], shares: dict[int, list[float]]) -> str:
    """The share of variance that the top dimensions have, by layer; a line for each number of dimensions."""

    def paint(axes: Axes) -> None:
        for place, share in enumerate(shares.values(), 1):
            _line(axes, layers, np.array(share) * 100, f"kind{place}")
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
        _layer_axis(axes)

    return draw("variance", "Share of variance in the top dimensions by layer.", paint)


def outlier_ratios(layers: Sequence[int], ratios: dict[int, list[float]]) -> str:
    """The size of a few dimensions against the median dimension, by layer."""

    def paint(axes: Axes) -> None:
        for place, ratio in enumerate(ratios.values(), 1):
            _line(axes, layers, np.array(ratio), f"kind{place}")
        plain_ticks(axes, is_log=min(map(min, ratios.values())) > 0)
        _layer_axis(axes)

    return draw("outliers", "Mean size of the largest dimensions over that of the median dimension, by layer.", paint)


def token_lengths(lengths: Sequence[int]) -> str:
    """How many prompts have how many tokens."""
    low, high = min(lengths), max(lengths)
    # Whole tokens a bar, so that none has one length more than its neighbours.
    step = max(1, -(-(high - low + 1) // 30))
    edges = np.arange(low, high + step + 1, step) - 0.5

    def paint(axes: Axes) -> None:
        axes.hist(lengths, bins=list(edges), color=COLOURS["accent"], rwidth=0.86)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        plain_ticks(axes)
        axes.set_xlabel("tokens of a prompt")

    return draw("lengths", f"Histogram of prompt lengths, {low:,} to {high:,} tokens.", paint)


def timings(seconds: dict[str, float]) -> str:
    """A bar for each part of a run."""
    names = list(seconds)[::-1]

    def paint(axes: Axes) -> None:
        bars = axes.barh(names, [seconds[name] for name in names], color=COLOURS["accent"], height=0.55)
        axes.bar_label(bars, [f"{number(seconds[name])} s" for name in names], padding=4, color=COLOURS["muted"])
        axes.margins(x=0.2)
        axes.grid(visible=False)
        axes.xaxis.set_visible(False)
        axes.spines.bottom.set_visible(False)

    return draw("timings", "; ".join(f"{name}: {number(value)} s" for name, value in seconds.items()), paint, _SMALL_HEIGHT)


def direction_histogram(direction: int, layers: Sequence[LayerMeasures]) -> str:
    """How the tokens' values along a direction are spread, a line for each of a few layers."""
    shown = [(colour, layer.histogram) for colour, layer in shown_layers(layers) if layer.histogram is not None and layer.n_counted]
    spans = [_span(histogram, direction) for _, histogram in shown]
    low, high = min((low for low, _ in spans), default=-1.0), max((high for _, high in spans), default=1.0)
    # A power of two, so that a bar is so many whole bins; and the same for all layers, so that their heights compare.
    widths = [np.diff(histogram.edges(direction)[:2]).item() for _, histogram in shown]
    width = 2.0 ** math.ceil(math.log2(max([(high - low) / _BARS, *widths])))

    def paint(axes: Axes) -> None:
        for colour, histogram in shown:
            edges, share = _bars(histogram, direction, low, high, width)
            axes.stairs(share, edges, color=COLOURS[colour], linewidth=1.4)
        axes.set_xlim(low, high)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}%"))
        axes.set_xlabel("value along the direction")

    text = f"Distribution of direction {direction}, from {number(low)} to {number(high)}, a line for each of a few layers."
    return draw(f"direction-{direction}", text, paint, _DIRECTION_HEIGHT)


def _span(histogram: Histogram, direction: int) -> tuple[float, float]:
    """Where the values of a direction lie, a few at either end left out: edges of bins."""
    counts, edges = histogram.counts_WN[direction], histogram.edges(direction)
    reached = np.cumsum(counts) / counts.sum()
    first, last = int(np.searchsorted(reached, _TAIL, side="right")), int(np.searchsorted(reached, 1 - _TAIL))
    return float(edges[first]), float(edges[min(last + 1, len(edges) - 1)])


def _bars(histogram: Histogram, direction: int, low: float, high: float, width: float) -> tuple[_Floats, _Floats]:
    """The edges of bars that reach from low to high, and the percentage of all values in each: whole bins of the histogram."""
    counts, edges = histogram.counts_WN[direction], histogram.edges(direction)
    first = int(np.floor(low / width))
    n_bars = max(int(np.ceil(high / width)) - first, 1)
    place = np.floor((edges[:-1] + edges[1:]) / 2 / width).astype(np.int64) - first
    is_inside = (place >= 0) & (place < n_bars)
    share: _Floats = np.bincount(place[is_inside], counts[is_inside], n_bars) / counts.sum() * 100
    edges_of_bars = np.arange(first, first + n_bars + 1, dtype=np.float64) * width
    return edges_of_bars, share


def _line(axes: Axes, x: Sequence[float] | _Floats, y: _Floats, colour: str) -> None:
    axes.plot(x, y, color=COLOURS[colour], marker="o" if len(x) <= _DOTS else None)


def _layer_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
    axes.set_xlabel("layer")
