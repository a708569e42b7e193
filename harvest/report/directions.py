"""The part of a report on projections: how each direction is spread, and its strongest tokens in their text, coloured by their values."""

from collections.abc import Iterator, Sequence

from harvest.reading.run import Run
from harvest.reading.summary import ranges, spread
from harvest.report import plots
from harvest.report.drawing import number
from harvest.report.markup import Html, details, figure, grid, join, paragraph, table, text
from harvest.report.measures import NOTHING_COUNTED, LayerMeasures, Measures
from harvest.report.strongest import RADIUS, Context, Token, read_contexts
from harvest.report.token_texts import TokenTexts

N_STRONGEST = 8
MAX_DIRECTIONS = 64
# Layers whose tokens are shown; fewer where there are many directions, so that the page stays one that a browser likes.
_MAX_LAYERS = 5
_MAX_CONTEXTS = 1280
_STEPS = 5
_PART_OF_A_CHARACTER = "◌"
_LINE_END = "↵"


def make_directions(run: Run, measures: Measures) -> Html:
    """The part of the page on directions; reads the tokens around the strongest ones. Raises NotARunError."""
    n_shown = min(run.width, MAX_DIRECTIONS)
    n_layers = max(1, min(_MAX_LAYERS, _MAX_CONTEXTS // (2 * N_STRONGEST * n_shown)))
    layers = [measures.layers[place] for place in _last_first(len(measures.layers), n_layers)]
    if not any(layer.n_counted for layer in measures.layers):
        return paragraph(text(NOTHING_COUNTED))
    texts = TokenTexts(run)
    contexts = {layer.layer: read_contexts(run, layer.layer, _tokens(layer, n_shown)) for layer in layers}
    parts = [paragraph(text(_introduction(run, [layer.layer for layer in layers], measures)))]
    if texts.note:
        parts.append(Html(f'<p class="note">{text(texts.note)}</p>'))
    parts.append(_scale())
    parts += [_direction(direction, measures, layers, contexts, texts) for direction in range(n_shown)]
    return join(parts)


def _last_first(n: int, n_shown: int) -> list[int]:
    """Places of the layers whose tokens are shown, the last layer first."""
    return [n - 1] if n_shown == 1 else spread(n, n_shown)[::-1]


def _introduction(run: Run, layers: Sequence[int], measures: Measures) -> str:
    some = f"The first {MAX_DIRECTIONS} of {run.width:,} directions. " if run.width > MAX_DIRECTIONS else ""
    whose = "of the tokens that were read" if measures.is_sample else "of all tokens"
    which = f"Tokens are shown of layers {ranges(sorted(layers))}. " if len(layers) < len(measures.layers) else ""
    return (
        f"{some}A token's value is its stream's component along a direction of length 1. Each direction has its distribution {whose}, "
        f"and its {N_STRONGEST} most positive and most negative tokens, of each prompt the strongest, with up to {RADIUS} tokens on either "
        f"side. {which}The first token of each prompt is left out of all but the text around others."
    )


def _scale() -> Html:
    negative = "".join(f'<i class="n{step}"></i>' for step in range(_STEPS, 0, -1))
    positive = "".join(f'<i class="p{step}"></i>' for step in range(1, _STEPS + 1))
    return Html(f'<p class="scale">negative <span>{negative}<i></i>{positive}</span> positive; by the largest in its list</p>')


def _tokens(layer: LayerMeasures, n_shown: int) -> Iterator[tuple[int, list[Token]]]:
    assert layer.strongest is not None, "a run that projects has them"
    for direction in range(n_shown):
        yield direction, layer.strongest.positive[direction] + layer.strongest.negative[direction]


def _direction(
    direction: int,
    measures: Measures,
    layers: Sequence[LayerMeasures],
    contexts: dict[int, dict[tuple[int, Token], Context]],
    texts: TokenTexts,
) -> Html:
    shown = plots.shown_layers(measures.layers)
    histogram = plots.direction_histogram(direction, measures.layers)
    drawn = figure("Share of tokens by value", histogram, legend=[(colour, f"layer {layer.layer}") for colour, layer in shown])
    parts = [grid([drawn, _numbers([layer for _, layer in shown], direction)])]
    if len(shown) < len(measures.layers):
        parts.append(details("Numbers of every layer", _numbers(measures.layers, direction)))
    for place, layer in enumerate(layers):
        assert layer.strongest is not None, "a run that projects has them"
        lists = join(
            _list(title, [contexts[layer.layer][direction, token] for token in tokens], texts)
            for title, tokens in (
                ("Most positive", layer.strongest.positive[direction]),
                ("Most negative", layer.strongest.negative[direction]),
            )
        )
        parts.append(details(f"Strongest tokens in layer {layer.layer}", lists, is_open=place == 0))
    return Html(f'<div class="direction">\n<h3>Direction {direction}</h3>\n{join(parts)}\n</div>')


def _numbers(layers: Sequence[LayerMeasures], direction: int) -> Html:
    rows = [
        (one.layer, *(number(figures[direction]) for figures in (one.mean_W, one.variance_W**0.5, one.low_W, one.high_W)))
        if one.n_counted
        else (one.layer, "-", "-", "-", "-")
        for one in layers
    ]
    return table(["layer", "mean", "std", "lowest", "highest"], rows)


def _list(title: str, contexts: Sequence[Context], texts: TokenTexts) -> Html:
    largest = max((abs(context.token.value) for context in contexts), default=0.0)
    items = join(_item(context, largest, texts) for context in contexts)
    return Html(f'<h4>{text(title)}</h4>\n<ol class="contexts">\n{items}\n</ol>')


def _item(context: Context, largest: float, texts: TokenTexts) -> Html:
    pieces = texts.pieces(context.ids)
    shown = "".join(
        _token(piece, value, largest, is_it=context.first + place == context.token.position)
        for place, (piece, value) in enumerate(zip(pieces, context.values, strict=True))
    )
    before = "…" if context.first else ""
    where = f"prompt {context.token.prompt}, position {context.token.position}"
    return Html(f'<li><b>{number(context.token.value)}</b><span class="text">{before}{shown}</span><small>{where}</small></li>')


def _token(piece: str, value: float, largest: float, *, is_it: bool) -> str:
    # A line's end is seen by its sign, and does not break the line here; a token that is a part of a character has a sign of its own.
    shown = text((piece or _PART_OF_A_CHARACTER).replace("\r\n", "\n").replace("\n", _LINE_END))
    step = min(round(abs(value) / largest * _STEPS), _STEPS) if largest else 0
    shade = f' class="{"p" if value > 0 else "n"}{step}"' if step else ""
    marks = f'{shade} title="{number(value)}"'
    if not is_it:
        return f"<i{marks}>{shown}</i>"
    # The frame is around the word, and not around the space in front of it.
    word = shown.lstrip(" ")
    space = f"<i{marks}>{shown[: len(shown) - len(word)]}</i>" if len(word) < len(shown) else ""
    return f"{space}<b{marks}>{word}</b>"
