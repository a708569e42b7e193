"""The README holds what is so: its code runs, its commands are those of the scripts, and its table is the errors' own."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from harvest import errors
from harvest.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RUN = "harvest run --model tiny --prompts prompts.jsonl --layers all --out run1"


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_the_python_of_the_readme_runs(code: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
