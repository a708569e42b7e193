"""The parts of a report on the residual stream itself: norms, and the dimensions that stand out."""

import itertools
from collections.abc import Iterator

import numpy as np

from harvest.report import plots
from harvest.report.drawing import number
from harvest.report.markup import Html, details, figure, grid, paragraph, table, text
from harvest.report.measures import NOTHING_COUNTED, LayerMeasures, Measures

_TOP_DIMENSIONS = (1, 5, 10, 50)
_OUTLIER_ROWS = 10


def make_norms(measures: Measures) -> Iterator[Html]:
    """Norms by layer and by position, drawn and in numbers."""
    yield paragraph(
        text(
            "The length (L2 norm) of a token's residual stream. The first token of a prompt is an attention sink in most models, and its "
            "norm would swamp the others: it is left out of every mean here unless it stands by itself."
        )
    )
    shown = plots.shown_layers(measures.layers)
    yield grid(
        [
            figure(
                "By layer",
                plots.norms_by_layer(measures),
                "The band holds nine tokens in ten: from the 5th to the 95th percentile of their norms.",
                [("accent", "mean"), ("warm", "first tokens alone")],
            ),
            figure(
                "By position",
                plots.norms_by_position(measures),
                "Position 0 is the first token. Later positions are averaged in steps of growing width.",
                [(colour, f"layer {layer.layer}") for colour, layer in shown],
            ),
        ]
    )
    rows = [
        (one.layer, *map(_known, (one.mean_norm, one.std_norm, one.low_norm, one.high_norm, one.start_norm)))
        if one.n_counted
        else (one.layer, "-", "-", "-", "-", _known(one.start_norm))
        for one in measures.layers
    ]
    yield details(
        "Numbers by layer", table(["layer", "mean norm", "standard deviation", "5th percentile", "95th percentile", "first tokens"], rows)
    )
    edges = measures.position_edges
    bins = [str(low) if high - low == 1 else f"{low}-{high - 1}" for low, high in itertools.pairwise(edges.tolist())]
    rows_P = [[name, *(_known(layer.position_norm_P[place]) for _, layer in shown)] for place, name in enumerate(bins)]
    yield details("Numbers by position", table(["position", *(f"layer {layer.layer}" for _, layer in shown)], rows_P))


def make_dimensions(measures: Measures) -> Iterator[Html]:
    """Which dimensions hold the variance, and which are much larger than the rest, drawn and in numbers."""
    if not any(layer.n_counted for layer in measures.layers):
        yield paragraph(text(NOTHING_COUNTED))
        return
    layers = [one.layer for one in measures.layers]
    width = len(measures.layers[0].variance_W)
    counts = [count for count in _TOP_DIMENSIONS if count < width]
    shares = {count: [_top_share(one, count) for one in measures.layers] for count in counts}
    ratio_LW = np.stack([one.mean_abs_W / (np.median(one.mean_abs_W) or 1) for one in measures.layers])
    top = np.argsort(-ratio_LW.max(axis=0), kind="stable")[:_OUTLIER_ROWS]
    drawn = top[: plots.MAX_LINES]
    yield paragraph(
        text(
            "Dimensions of the stream as the model has them, without a change of basis. A few of them are much larger than the rest in "
            "most models; what is measured by length or by mean squared error is then mostly about these. First tokens left out."
        )
    )
    yield grid(
        [
            figure(
                "Share of variance in the top dimensions",
                plots.variance_shares(layers, shares),
                f"The variances of the dimensions with the most, over the sum of all {width:,}.",
                [(f"kind{place}", f"top {count}" if count > 1 else "the first") for place, count in enumerate(counts, 1)],
            ),
            figure(
                "Outlier dimensions",
                plots.outlier_ratios(layers, {int(dimension): ratio_LW[:, dimension].tolist() for dimension in drawn}),
                "A dimension's mean absolute value over that of the layer's median dimension.",
                [(f"kind{place}", f"dimension {dimension}") for place, dimension in enumerate(drawn, 1)],
            ),
        ]
    )
    best_L = ratio_LW.argmax(axis=0)
    rows = [
        (
            dimension,
            number(ratio_LW[best_L[dimension], dimension]),
            layers[best_L[dimension]],
            number(measures.layers[best_L[dimension]].mean_abs_W[dimension]),
            number(measures.layers[best_L[dimension]].mean_W[dimension]),
        )
        for dimension in top.tolist()
    ]
    yield Html("<h3>The largest dimensions</h3>")
    yield table(["dimension", "largest ratio", "in layer", "mean absolute value there", "mean there"], rows)
    by_layer = [(layer, *(f"{shares[count][place]:.1%}" for count in counts)) for place, layer in enumerate(layers)]
    yield details("Share of variance by layer", table(["layer", *(f"top {count}" for count in counts)], by_layer))


def _top_share(layer: LayerMeasures, count: int) -> float:
    total = float(layer.variance_W.sum())
    return float(np.sort(layer.variance_W)[-count:].sum()) / total if total else 0.0


def _known(value: float) -> str:
    return number(value) if np.isfinite(value) else "-"
