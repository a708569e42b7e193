"""The shape of the package: the list in CONTRIBUTING.md names every module, and imports point only to what stands before."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import harvest

ROOT = Path(__file__).parent.parent
LISTED = re.findall(r"^\s+([\w/]+\.py)\s{2,}", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
MODULES = sorted(
    path.relative_to(ROOT / "harvest").as_posix()
    for path in (ROOT / "harvest").rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def imported_modules(path: Path) -> set[str]:
    """The modules of harvest that a file imports, wherever in it, as paths below the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("harvest"):
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        files = [name.removeprefix("harvest.").replace(".", "/") + ".py" for name in names if name.startswith("harvest.")]
        found |= {file for file in files if file in MODULES}
    return found


def test_contributing_lists_every_module_once() -> None:
    assert sorted(LISTED) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_only_to_modules_that_stand_before(module: str) -> None:
    before = LISTED[: LISTED.index(module)]
    assert imported_modules(ROOT / "harvest" / module) <= set(before)


def test_nothing_that_makes_a_run_imports_what_reads_one() -> None:
    for module in MODULES:
        # A report is made of what was read, and the command calls all.
        if not module.startswith(("reading/", "report/", "cli/")):
            assert not {name for name in imported_modules(ROOT / "harvest" / module) if name.startswith("reading/")}, module


@pytest.mark.parametrize("module", MODULES)
def test_a_file_is_one_idea_and_begins_with_it(module: str) -> None:
    text = (ROOT / "harvest" / module).read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text))


def test_every_public_name_is_there_and_documented() -> None:
    for name in harvest.__all__:
        assert getattr(harvest, name).__doc__, name
    assert set(harvest.__all__) == set(harvest._PUBLIC) <= set(dir(harvest))


def test_only_one_module_renames_and_flushes() -> None:
    for module in MODULES:
        text = (ROOT / "harvest" / module).read_text()
        assert module == "output/durable.py" or not re.search(r"\bos\.(replace|rename|fsync)\b", text), module


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_have_docstrings(module: str) -> None:
    loaded = importlib.import_module("harvest." + module.removesuffix(".py").replace("/", "."))
    for name, value in vars(loaded).items():
        is_own = getattr(value, "__module__", None) == loaded.__name__
        if is_own and not name.startswith("_") and (isinstance(value, type) or callable(value)):
            assert value.__doc__, f"{module}: {name}"
