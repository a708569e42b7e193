"""Pieces of markdown: tables, and figures as a reader wants them."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The first column is text, the others are figures."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def say_rate(value: float) -> str:
    """Return a rate without needless digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def say_ratio(value: float | None) -> str:
    """Return a ratio, or an empty string without one."""
    return "" if value is None else f"{value:.2f}"


def say_share(value: float | None) -> str:
    """Return a share as a percentage, or an empty string without one."""
    return "" if value is None else f"{value:.1%}"


def say_count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say_bytes(n_bytes: float) -> str:
    """Return a size in the unit that suits it."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
