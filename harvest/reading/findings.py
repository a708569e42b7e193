"""What is wrong with a run folder, one finding at a time.

A check is a generator of findings; a damaged file ends none with an exception.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. where: the file, below the run folder."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def guarded(where: str, check: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a check, and one more where a file was too broken for it to end."""
    try:
        yield from check
    except Exception as error:
        # Four libraries read a run's files, and what each raises on a broken one is its own.
        yield Finding(where, f"cannot be checked further ({type(error).__name__}: {str(error).strip() or 'no reason given'})")


def differing(where: str, fields: Mapping[str, tuple[object, object]], says: str) -> Iterator[Finding]:
    """A finding for each field whose value here is not what another document says. fields: by name, the value here and the one there."""
    for name, (here, there) in fields.items():
        if here == there:
            continue
        if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
            place = next(place for place, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
            name, here, there = f"{name}[{place}]", here[place], there[place]
        yield Finding(where, f"{name} is {_shown(here)}, and {says} {_shown(there)}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
