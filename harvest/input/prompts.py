"""Prompts from a file: .jsonl, .json or .txt, each also .gz, or jsonl on standard input."""

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from harvest.errors import PromptsError

STDIN = "-"
FORMATS = (".jsonl", ".json", ".txt")
DEFAULT_FIELDS = ("prompt", "text")


@dataclass(frozen=True)
class Prompts:
    """The texts of a prompts file, in its order, and the number of blank lines that were left out."""

    texts: list[str]
    n_blank: int = 0


def read_prompts(source: str | Path, field: str | None = None) -> Prompts:
    """Read the prompts of a file, or of standard input for `-`.

    `field` names the key that holds the text where a prompt is an object; by default that is `prompt` or `text`.
    Raises PromptsError with the file, the line and what was expected there.
    """
    kind = ".jsonl" if source == STDIN else _format(Path(source))
    name = "standard input" if source == STDIN else str(source)
    with _reading(source, name) as file:
        if kind == ".json":
            texts, n_blank = _read_json(file, name, field), 0
        else:
            texts, n_blank = _read_lines(file, name, field, is_json=kind == ".jsonl")
    if not texts:
        raise PromptsError(f"{name}: holds no prompts; expected at least one")
    return Prompts(texts, n_blank)


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise PromptsError(f"{path}: a prompts file ends in {', '.join(FORMATS)}, each also with .gz; - reads jsonl from standard input")
    return suffixes[-1]


@contextmanager
def _reading(source: str | Path, name: str) -> Iterator[BinaryIO]:
    """The bytes of a prompts file; whatever goes wrong while they are read is a PromptsError."""
    try:
        if source == STDIN:
            if sys.stdin is None:
                raise PromptsError("standard input is closed; give the prompts as a file, or pipe them in")
            yield sys.stdin.buffer
            return
        with open(source, "rb") as raw:
            if name.lower().endswith(".gz"):
                with gzip.open(raw) as file:
                    yield io.BufferedReader(file)
            else:
                yield raw
    except FileNotFoundError:
        raise PromptsError(f"{name}: no such prompts file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PromptsError(f"{name}: is not a whole gzip file ({error})") from None
    except OSError as error:
        raise PromptsError(f"{name}: cannot be read ({error.strerror or error})") from None


def _read_lines(file: BinaryIO, name: str, field: str | None, is_json: bool) -> tuple[list[str], int]:
    texts: list[str] = []
    n_blank = 0
    # Only \n ends a line: str.splitlines would also cut at U+2028 and other characters that stand inside texts.
    for number, raw in enumerate(file, start=1):
        line = _decode(raw, f"{name}, line {number}", is_first=number == 1).removesuffix("\n").removesuffix("\r")
        if not line.strip():
            n_blank += 1
        elif is_json:
            where = f"{name}, line {number}"
            texts.append(_text(_parse(line, where, "a string or an object"), where, field))
        else:
            texts.append(line)
    return texts, n_blank


def _read_json(file: BinaryIO, name: str, field: str | None) -> list[str]:
    expected = "a list of strings or objects"
    entries = _parse(_decode(file.read(), name, is_first=True), name, expected)
    if not isinstance(entries, list):
        raise PromptsError(f"{name}: expected {expected}, found {_kind(entries)}")
    return [_text(entry, f"{name}, entry {index}", field) for index, entry in enumerate(entries)]


def _decode(raw: bytes, where: str, is_first: bool) -> str:
    # Some editors put a byte order mark before a file's first character.
    begin = len(codecs.BOM_UTF8) if is_first and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[begin:].decode()
    except UnicodeDecodeError as error:
        at = begin + error.start
        raise PromptsError(f"{where}: is not UTF-8 text (byte {raw[at]:#04x} at byte {at})") from None


def _parse(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        reason = f"{error.msg} at {at}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        # Python reads no number of more than 4,300 digits.
        reason = str(error)
    raise PromptsError(f"{where}: is not JSON that can be read ({reason}); expected {expected}")


def _text(entry: Any, where: str, field: str | None) -> str:
    """The text of one entry: itself where it is a string, else the named field."""
    if isinstance(entry, str):
        return _not_empty(entry, where)
    fields = DEFAULT_FIELDS if field is None else (field,)
    expected = f"a string, or an object with {' or '.join(map(repr, fields))}"
    if not isinstance(entry, dict):
        raise PromptsError(f"{where}: expected {expected}, found {_kind(entry)}")
    present = [name for name in fields if name in entry]
    if not present:
        keys = f"the keys {', '.join(map(repr, list(entry)[:8]))}" if entry else "an object without keys"
        raise PromptsError(f"{where}: expected {expected}, found {keys}; --field names another")
    if len(present) > 1:
        raise PromptsError(f"{where}: has both 'prompt' and 'text'; --field says which to read")
    text = entry[present[0]]
    if not isinstance(text, str):
        raise PromptsError(f"{where}: {present[0]!r} should hold a string, found {_kind(text)}")
    return _not_empty(text, where)


def _not_empty(text: str, where: str) -> str:
    if not text:
        raise PromptsError(f"{where}: '' was given: an empty prompt has nothing to read; leave it out")
    return text


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names[type(value)]
