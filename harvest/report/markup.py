"""Pieces of HTML. Whatever text goes in is escaped here, and what is already markup says so by its type."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NewType

Html = NewType("Html", str)

# Pictures stand for characters that a page cannot hold or would not show.
_CONTROLS = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
# These would turn the direction of all that follows them.
_TURNS = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C), 0xFFFD)
_SHOWN = _CONTROLS | _TURNS


def text(value: object) -> Html:
    """Any text, to stand in an element or, between double quotes, in an attribute."""
    return Html(escape(str(value).translate(_SHOWN)))


def join(parts: Iterable[Html], separator: str = "\n") -> Html:
    """Pieces one after the other."""
    return Html(separator.join(parts))


def paragraph(content: Html) -> Html:
    """A paragraph of prose."""
    return Html(f"<p>{content}</p>")


def section(name: str, title: str, content: Iterable[Html]) -> Html:
    """A part of the page under a heading, with an id to link to."""
    return Html(f'<section id="{text(name)}">\n<h2>{text(title)}</h2>\n{join(content)}\n</section>')


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """Names and what they stand for; a row of which nothing is known is left out."""
    items = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows if value is not None)
    return Html(f'<dl class="facts">{"".join(items)}</dl>')


def tiles(rows: Iterable[tuple[str, str]]) -> Html:
    """A few figures in large type, each with what it is."""
    return Html(f'<ul class="tiles">{"".join(f"<li><b>{text(value)}</b> {text(name)}</li>" for name, value in rows)}</ul>')


def table(head: Sequence[str], rows: Iterable[Sequence[object]], n_left: int = 0) -> Html:
    """A table: numbers to the right, but the first `n_left` columns to the left. It scrolls by itself where it is wider than the page."""
    ranks = ['class="left"' if place < n_left else "" for place in range(len(head))]
    titles = "".join(f'<th scope="col" {rank}>{text(title)}</th>' for title, rank in zip(head, ranks, strict=True))
    lines = ("".join(f"<td {rank}>{text(cell)}</td>" for cell, rank in zip(row, ranks, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    markup = f'<div class="table" tabindex="0"><table><thead><tr>{titles}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    return Html(markup.replace(" >", ">"))


def figure(title: str, svg: str, note: str = "", legend: Sequence[tuple[str, str]] = ()) -> Html:
    """A plot under its title, with the names of its lines (a colour of the style sheet, and a text) and a note."""
    lines = "".join(f'<li class="{text(colour)}">{text(name)}</li>' for colour, name in legend)
    names = f'<ul class="legend">{lines}</ul>' if legend else ""
    said = f'<p class="note">{text(note)}</p>' if note else ""
    return Html(f"<figure>\n<figcaption>{text(title)}</figcaption>\n{names}{svg}\n{said}</figure>")


def grid(parts: Iterable[Html]) -> Html:
    """Things side by side where there is room."""
    return Html(f'<div class="grid">\n{join(parts)}\n</div>')


def details(title: str, content: Html, is_open: bool = False) -> Html:
    """What is shown when its title is asked for."""
    return Html(f"<details{' open' if is_open else ''}><summary>{text(title)}</summary>\n{content}\n</details>")
