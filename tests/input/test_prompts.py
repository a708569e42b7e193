"""Prompts from real files of each format, whole and broken, and from standard input."""

import gzip
import io
import subprocess
import sys
from pathlib import Path

import pytest

from harvest.errors import PromptsError
from harvest.input.prompts import Prompts, read_prompts

BOM = b"\xef\xbb\xbf"

# name: (file name, content, texts, blank lines)
WHOLE = {
    "jsonl strings": ("p.jsonl", b'"a"\n"b"\n', ["a", "b"], 0),
    "jsonl objects": ("p.jsonl", b'{"prompt": "a", "id": 7}\n{"text": "b"}\n"c"', ["a", "b", "c"], 0),
    "jsonl blank lines": ("p.jsonl", b'\n"a"\n  \t\n"b"\n\n', ["a", "b"], 3),
    "jsonl CRLF": ("p.jsonl", b'"a"\r\n\r\n"b"\r\n', ["a", "b"], 1),
    "jsonl BOM": ("p.jsonl", BOM + b'{"text": "a"}\n"b"', ["a", "b"], 0),
    "jsonl U+2028 and U+0085": ("p.jsonl", '"a\u2028b\x85c"\n"d"\n'.encode(), ["a\u2028b\x85c", "d"], 0),
    "jsonl escapes": ("p.jsonl", rb'"a\nb \ud83d\ude00"', ["a\nb 😀"], 0),
    "jsonl spaces kept": ("p.jsonl", b' {"text": " a "} \n" "\n', [" a ", " "], 0),
    "txt": ("p.txt", b"a\nb", ["a", "b"], 0),
    "txt spaces kept": ("p.txt", b"  a \n\tb\n", ["  a ", "\tb"], 0),
    "txt blank lines": ("p.txt", b"\na\n \n\r\nb\n\n", ["a", "b"], 4),
    "txt CRLF": ("p.txt", b"a\r\nb\r\r\nc\rd\r\n", ["a", "b\r", "c\rd"], 0),
    "txt BOM": ("p.txt", BOM + b"a\n" + BOM + b"b\n", ["a", "\ufeffb"], 0),
    "txt U+2028 and others": ("p.txt", "a\u2028b\x0bc\x0cd\x1ce\x85f\ng".encode(), ["a\u2028b\x0bc\x0cd\x1ce\x85f", "g"], 0),
    "txt is no JSON": ("p.txt", b'"a"\n{"text": "b"}\n', ['"a"', '{"text": "b"}'], 0),
    "json": ("p.json", b'["a",\n {"prompt": "b"},\n {"text": "c", "id": [1]}]\n', ["a", "b", "c"], 0),
    "json BOM and CRLF": ("p.json", BOM + b'[\r\n"a"\r\n]\r\n', ["a"], 0),
    "capitals in the name": ("P.JSONL", b'"a"', ["a"], 0),
    "two dots in the name": ("p.txt.v2.json", b'["a"]', ["a"], 0),
}

# name: (file name, content, where after the path, what)
BROKEN = {
    "no lines": ("p.txt", b"", "", "holds no prompts"),
    "only blank lines": ("p.jsonl", b"\n \n\r\n", "", "holds no prompts"),
    "json without entries": ("p.json", b"[]", "", "holds no prompts"),
    "json empty": ("p.json", b"", "", "is not JSON that can be read (Expecting value at column 1)"),
    "json cut short": ("p.json", b'["a",\n"b"', "", "is not JSON that can be read (Expecting ',' delimiter at line 2, column 4)"),
    "json that is an object": ("p.json", b'{"prompts": ["a"]}', "", "expected a list of strings or objects, found an object"),
    "json that is a string": ("p.json", b'"a"', "", "expected a list of strings or objects, found a string"),
    "json in the name of jsonl": ("p.jsonl", b'["a",\n"b"]', ", line 1", "is not JSON"),
    "json nested too deeply": ("p.json", b"[" * 200_000, "", "is nested too deeply"),
    "json entry": ("p.json", b'["a", 3]', ", entry 1", "expected a string, or an object with 'prompt' or 'text', found a number"),
    "jsonl bad JSON": ("p.jsonl", b'"a"\n\n{"text": }\n', ", line 3", "is not JSON that can be read (Expecting value at column 10)"),
    "jsonl endless number": ("p.jsonl", b"1" * 5000, ", line 1", "is not JSON that can be read (Exceeds the limit"),
    "txt BOM and bad UTF-8": ("p.txt", b"\xef\xbb\xbfa\xff", ", line 1", "is not UTF-8 text (byte 0xff at byte 4)"),
    "jsonl empty text": ("p.jsonl", b'"a"\n{"text": ""}\n', ", line 2", "'' was given: an empty prompt has nothing to read; leave it out"),
    "jsonl raw text": ("p.jsonl", b"hello\n", ", line 1", "is not JSON"),
    "jsonl nested too deeply": ("p.jsonl", b'"a"\n' + b"[" * 200_000, ", line 2", "is nested too deeply"),
    "jsonl null": ("p.jsonl", b"null\n", ", line 1", "expected a string, or an object with 'prompt' or 'text', found null"),
    "jsonl true": ("p.jsonl", b"true\n", ", line 1", "found a truth value"),
    "jsonl NaN": ("p.jsonl", b"NaN\n", ", line 1", "found a number"),
    "jsonl list": ("p.jsonl", b"[1, 2]\n", ", line 1", "found a list"),
    "jsonl number in the field": ("p.jsonl", b'{"text": 5}\n', ", line 1", "'text' should hold a string, found a number"),
    "jsonl list in the field": ("p.jsonl", b'{"prompt": ["a"]}\n', ", line 1", "'prompt' should hold a string, found a list"),
    "jsonl null in the field": ("p.jsonl", b'{"text": null}\n', ", line 1", "'text' should hold a string, found null"),
    "jsonl missing field": ("p.jsonl", b'"a"\n{"q": "a", "r": 1}\n', ", line 2", "found the keys 'q', 'r'; --field names another"),
    "jsonl no keys": ("p.jsonl", b"{}\n", ", line 1", "found an object without keys"),
    "jsonl both fields": ("p.jsonl", b'{"prompt": "a", "text": "b"}\n', ", line 1", "has both 'prompt' and 'text'; --field says which"),
    "jsonl bad UTF-8": ("p.jsonl", b'"a"\n"b\xff"\n', ", line 2", "is not UTF-8 text (byte 0xff at byte 2)"),
    "txt bad UTF-8": ("p.txt", b"a\n\nb \xe9 c\n", ", line 3", "is not UTF-8 text (byte 0xe9 at byte 2)"),
    "txt UTF-16": ("p.txt", "a\n".encode("utf-16"), ", line 1", "is not UTF-8 text"),
    "json bad UTF-8": ("p.json", b'["a\xff"]', "", "is not UTF-8 text (byte 0xff at byte 3)"),
}

MEMBER = gzip.compress(b"a line of text\n" * 1000)
BROKEN_GZIP = {
    "cut in its end": MEMBER[:-4],
    "cut in its data": MEMBER[:-20],
    "cut in its head": MEMBER[:5],
    "a flipped bit in its data": MEMBER[:15] + bytes([MEMBER[15] ^ 0xFF]) + MEMBER[16:],
    "a flipped bit in its checksum": MEMBER[:-7] + bytes([MEMBER[-7] ^ 1]) + MEMBER[-6:],
    "no gzip file": b"a line of text\n",
    "more behind it": MEMBER + b"a line of text\n",
}


def write(path: Path, content: bytes) -> str:
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith(".gz") else content)
    return str(path)


def fail(source: str, field: str | None = None) -> str:
    """What read_prompts says of a source that it cannot read."""
    with pytest.raises(PromptsError) as caught:
        read_prompts(source, field)
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz", ".GZ"])
@pytest.mark.parametrize(("name", "content", "texts", "n_blank"), WHOLE.values(), ids=WHOLE)
def test_read_a_whole_file(tmp_path: Path, name: str, content: bytes, texts: list[str], n_blank: int, suffix: str) -> None:
    assert read_prompts(write(tmp_path / (name + suffix), content)) == Prompts(texts, n_blank)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("name", "content", "where", "what"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_an_error_that_names_its_place(
    tmp_path: Path, name: str, content: bytes, where: str, what: str, suffix: str
) -> None:
    source = write(tmp_path / (name + suffix), content)
    message = fail(source)
    assert message.startswith(f"{source}{where}: ")
    assert what in message


@pytest.mark.parametrize("content", BROKEN_GZIP.values(), ids=BROKEN_GZIP)
def test_a_broken_gzip_file_gives_no_prompts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.txt.gz"
    path.write_bytes(content)
    assert fail(str(path)).startswith(f"{path}: is not a whole gzip file (")


def test_gzip_files_end_to_end_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\nd\n"))
    assert read_prompts(str(path)).texts == ["a", "bc", "d"]


@pytest.mark.parametrize("line", [b'{"q": "a", "prompt": "b", "text": "c"}', b'"a"'], ids=["object", "string"])
@pytest.mark.parametrize(("name", "form"), [("p.jsonl", b"%s\n"), ("p.json", b"[%s]")])
def test_the_field_asked_for_is_read(tmp_path: Path, name: str, form: bytes, line: bytes) -> None:
    assert read_prompts(write(tmp_path / name, form % line), field="q").texts == ["a"]


@pytest.mark.parametrize(("field", "text"), [("prompt", "a"), ("text", "b")])
def test_a_field_decides_between_prompt_and_text(tmp_path: Path, field: str, text: str) -> None:
    assert read_prompts(write(tmp_path / "p.jsonl", b'{"prompt": "a", "text": "b"}\n'), field).texts == [text]


def test_the_field_asked_for_has_no_substitute(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", b'{"q": "a"}\n{"prompt": "b"}\n')
    assert fail(source, "q") == (
        f"{source}, line 2: expected a string, or an object with 'q', found the keys 'prompt'; --field names another"
    )


def test_of_many_keys_eight_are_named(tmp_path: Path) -> None:
    line = b"{" + b", ".join(b'"k%d": 1' % number for number in range(9)) + b"}"
    message = fail(write(tmp_path / "p.jsonl", line))
    assert "'k7'" in message
    assert "'k8'" not in message


@pytest.mark.parametrize("name", ["p", "p.csv", "p.gz", "p.jsonl.zst", "p.jsonl.gz.gz", "jsonl"])
def test_another_format_is_an_error_that_names_those_there_are(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, b'"a"\n')
    assert fail(source) == f"{source}: a prompts file ends in .jsonl, .json, .txt, each also with .gz; - reads jsonl from standard input"


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt.gz", "missing/p.json"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    assert fail(str(tmp_path / name)) == f"{tmp_path / name}: no such prompts file"


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt.gz"])
def test_a_directory_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert fail(str(tmp_path / name)) == f"{tmp_path / name}: cannot be read (Is a directory)"


def test_a_file_in_place_of_a_directory_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "p.txt", b"a\n")
    assert fail(str(tmp_path / "p.txt" / "q.txt")).endswith("q.txt: cannot be read (Not a directory)")


def test_standard_input_of_a_process() -> None:
    program = "from harvest.input.prompts import read_prompts; print(ascii(read_prompts('-', 'q')))"
    given = BOM + '"a\u2028b"\r\n\n{"q": "é"}\n'.encode()
    answer = subprocess.run([sys.executable, "-W", "error", "-c", program], input=given, capture_output=True, check=True, timeout=60)
    assert answer.stdout.decode() == ascii(Prompts(["a\u2028b", "é"], 1)) + "\n"
    assert answer.stderr == b""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "standard input: holds no prompts; expected at least one"),
        (b'"a"\nb\n', "standard input, line 2: is not JSON that can be read (Expecting value at column 1); expected a string or an object"),
        (b'"a\xff"\n', "standard input, line 1: is not UTF-8 text (byte 0xff at byte 2)"),
        (MEMBER, "standard input, line 1: is not UTF-8 text (byte 0x8b at byte 1)"),
    ],
    ids=["empty", "bad JSON", "bad UTF-8", "gzip"],
)
def test_broken_standard_input(monkeypatch: pytest.MonkeyPatch, given: bytes, message: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert fail("-") == message


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PromptsError, match="standard input is closed"):
        read_prompts("-")
