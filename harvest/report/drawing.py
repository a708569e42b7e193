"""A matplotlib figure as SVG to stand in a page: drawn in the page's own colours and font, whichever they are, light or dark.

Nothing else of harvest imports matplotlib, which comes with the extra `report`.
"""

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Colours of the page by their name in its style sheet. matplotlib takes only true colours, so each is drawn in one that nothing else has
# and that becomes the name afterwards: the style sheet says what it is, once for light and once for dark.
_NAMES = (
    "ink",
    "muted",
    "line",
    "accent",
    "warm",
    "depth1",
    "depth2",
    "depth3",
    "depth4",
    "depth5",
    "kind1",
    "kind2",
    "kind3",
    "kind4",
    "kind5",
)
COLOURS = {name: f"#0102{place:02x}" for place, name in enumerate(_NAMES, 0x10)}

# In points, which are the SVG's units; on a phone one is about a pixel, beside another figure on a desk 1.4.
WIDTH, HEIGHT = 344, 216
_FONT = 9.5
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "harvest",
    "font.size": _FONT,
    "axes.labelsize": _FONT,
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.minor.visible": False,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "path.simplify": True,
}


def draw(name: str, text: str, paint: Callable[[Axes], None], height: int = HEIGHT) -> str:
    """A figure of one pair of axes, which `paint` fills, as an `svg` element.

    name: its ids begin with it, so it stands once on a page. text: what it shows, for those who do not see it.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return _for_page(stream.getvalue(), name, text)


def plain_ticks(axes: Axes, *, is_log: bool = False) -> None:
    """Numbers of the value axis as one writes them, and not as powers of ten; where it is logarithmic, at few places."""
    if is_log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        # The more decades, the fewer numbers in each.
        subs = (1.0,) if high / low > 1000 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def number(value: float) -> str:
    """A number in four digits, with commas, and without an exponent unless it is very small or large."""
    return f"{value:,.4g}" if not 1e4 <= abs(value) < 1e9 else f"{value:,.0f}"


def _for_page(svg: str, name: str, text: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # Several figures stand in one page, so each has ids of its own, and only those that something refers to.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    for role, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r"\n\s*", "\n", svg).replace("<defs>\n</defs>\n", "")
    # Six digits after the point are more than a screen has pixels; what is written between the tags stays as it is.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag[0]), svg)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None
    head = f'<svg viewBox="0 0 {size[1]} {size[2]}" width="{size[1]}" height="{size[2]}" role="img" aria-label="{escape(text)}">'
    return head + svg[svg.index(">") + 1 :].strip()
