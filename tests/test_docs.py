"""README and docs/ hold what is so: their code runs, their commands and options are there, their links lead somewhere.

Blocks of docs/tutorial.md after the line <!-- tested --> are run as they stand, one after the other in one folder; what stands in a block
after <!-- output --> must be in what the block before printed, with … for anything at all.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from harvest import errors
from harvest.cli import cli
from harvest.output.codecs import CODECS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
# Those of the tutorial work on runs of its own.
PYTHON = [
    code
    for text in (README, *(PAGES[name] for name in PAGES if name != "tutorial.md"))
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
# Lines that begin with a subcommand, indented as code in the README or not.
SHOWN = [
    line
    for text in (README, *PAGES.values())
    for line in re.findall(rf"^(?: {{4}})?(harvest (?:{'|'.join(cli.commands)}) .*)$", text, re.MULTILINE)
]
RUN = "harvest run --model tiny --prompts prompts.jsonl --layers all --out run1"


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_the_python_of_readme_and_docs_runs(code: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run1").symlink_to(tiny_run)
    monkeypatch.chdir(tmp_path)
    exec(code, {})


def test_the_first_screen_is_what_the_scripts_and_ci_run() -> None:
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    for line in ("bash scripts/first-run", "bash scripts/test"):
        assert line in README.split("##")[0]
        assert line in ci
    assert RUN in README
    assert RUN in (ROOT / "scripts" / "first-run").read_text()


def test_every_file_and_script_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"\b(?:scripts|configs|tests)/[\w./-]*\w", README):
        assert (ROOT / name).exists(), name
    examples = set(re.findall(r"`(?:examples/)?([\w-]+\.(?:py|mjs))`", README))
    scripts = [path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".mjs")]
    assert examples == {path.name for path in scripts if re.search("argparse|parseArgs", path.read_text())}


def test_get_smollm2_answers_the_folder_that_it_made(smollm2: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "get-smollm2"], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == smollm2


def test_the_table_of_exit_codes_is_that_of_the_errors() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.HarvestError)]
    assert table == {0} | {value.exit_code for value in classes}
    for value in classes:
        assert re.search(rf"\b{value.__name__}\s+{value.exit_code}\b", errors.__doc__ or ""), value


def test_every_command_and_option_has_help_and_every_command_an_example() -> None:
    for command in cli.commands.values():
        assert command.help
        assert "Example: harvest" in (command.epilog or "")
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, option.name


def test_the_generated_pages_are_what_the_code_says() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "reference.py", "--check"], check=True, env=environment())


def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    printed, n_run, n_compared = "", 0, 0
    for mark, kind, block in re.findall(r"<!-- (tested|output) -->\n```(\w+)\n(.*?)```", PAGES["tutorial.md"], re.DOTALL):
        if mark == "tested":
            command = ["bash", "-euc", block] if kind == "bash" else [sys.executable, "-c", block]
            done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, f"{block}\n{done.stderr}"
            printed = done.stdout + done.stderr
            n_run += 1
            continue
        for line in block.splitlines():
            pattern = ".*".join(re.escape(part) for part in line.split("…"))
            assert re.search(pattern, printed), f"{line!r} is not in:\n{printed}"
            n_compared += 1
    # So that a changed way of marking blocks does not leave them out unseen.
    assert n_run >= 8
    assert n_compared >= 12


# Several blocks with a last one that is smaller; values that are no multiple of 8, which are not shuffled; what does not shrink; unsplit.
@pytest.mark.parametrize(
    ("shape", "is_noise"), [((2000, 64), False), ((40, 577), False), ((333, 77), False), ((30, 64), True), ((16, 5), False)]
)
def test_the_decoder_of_the_format_page_reads_what_the_codec_writes(shape: tuple[int, int], is_noise: bool) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGES["format.md"], re.DOTALL)[0].partition("rows = read_layer")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    random = np.random.default_rng(0)
    values = random.integers(0, 1 << 16 if is_noise else 40, shape).astype(np.uint16)
    assert names["blosc"](bytes(CODECS["lz4"].encode(values))) == values.tobytes()


def test_every_link_of_the_docs_leads_to_a_page_and_a_heading() -> None:
    found = 0
    for name, text in {**PAGES, "../README.md": README}.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            if re.match(r"https?://", target):
                continue
            file, _, anchor = target.partition("#")
            path = (DOCS / name).parent / file if file else DOCS / name
            assert path.exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(path.read_text()), f"{name}: {target}"
            found += 1
    assert found > 20


def test_every_page_is_in_the_index_and_on_the_site() -> None:
    pages = set(PAGES) - {"index.md"}
    assert set(re.findall(r"\((\w+\.md)\)", PAGES["index.md"])) == pages
    assert set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == set(PAGES)


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_and_options_that_are_shown_are_there(line: str) -> None:
    # In a list what a command does stands two spaces or more after it.
    words = shlex.split(re.split(" {2,}", line)[0])
    command = cli.commands[words[1]]
    known = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)} | {"-h", "--help"}
    own = words[: words.index("--")] if "--" in words else words
    for word in own:
        assert not word.startswith("-") or word == "-" or word in known, word


def test_every_file_that_the_docs_name_is_there() -> None:
    for name, text in PAGES.items():
        for path in re.findall(r"\b(?:scripts|configs|tests|examples)/[\w./-]*\w", text):
            assert (ROOT / path).exists(), f"{name}: {path}"


def environment() -> dict[str, str]:
    """The variables of a shell in which `harvest` is this very one."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def without_code(text: str) -> str:
    """A page without its blocks of code and code in lines."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(text: str) -> set[str]:
    """The names under which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
