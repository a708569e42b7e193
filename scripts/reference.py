"""The pages of docs/ that are made from the code: commands.md from the command itself, python.md from the docstrings of its public names.

python scripts/reference.py            write both
python scripts/reference.py --check    exit with 1 where one is not what the code says
"""

import argparse
import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import harvest
from harvest.cli import cli

DOCS = Path(__file__).parent.parent / "docs"
NOTE = "<!-- Made by scripts/reference.py; do not edit. -->"
# A line of a docstring that begins a point of its own: of a name and what it is, or of an error.
_POINT = re.compile(r"(?:[\w{}]+(?:(?:, | and )[\w{}]+)*: |Raises )")


def commands_page() -> str:
    """The reference of the command: what --help says of each subcommand."""
    lines = [NOTE, "", "# The command", "", cli.help or "", ""]
    lines += [f"- [`harvest {name}`](#harvest-{name}): {command.get_short_help_str(200)}" for name, command in sorted(cli.commands.items())]
    top = click.Context(cli, info_name="harvest")
    for name, command in sorted(cli.commands.items()):
        context = click.Context(command, info_name=name, parent=top)
        lines += ["", f"## harvest {name}", "", "```text", " ".join(command.get_usage(context).split()).removeprefix("Usage: "), "```"]
        lines += ["", inspect.cleandoc(command.help or ""), *_options(command, context)]
        example = " ".join((command.epilog or "").split()).removeprefix("Example: ")
        lines += ["", "Example:", "", "```text", example, "```"]
    return "\n".join(lines) + "\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """A table of options for each section of a command's help."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if "--help" not in parameter.opts and (record := parameter.get_help_record(context)) and record[1]:
            sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
    for title, records in sections.items():
        yield from ("", f"| {title} | |", "| --- | --- |")
        for option, text in records:
            yield f"| `{_bar(option)}` | {_bar(text)} |"


def _bar(text: str) -> str:
    """A text in a cell of a table, where a bar would end it."""
    return text.replace("|", "\\|").replace("  ", " ")


def python_page() -> str:
    """The reference of the library: signature and docstring of each name of harvest.__all__, and of what a class offers."""
    lines = [NOTE, "", "# The Python library", "", "`import harvest` gives these names; nothing heavy is loaded before one is used.", ""]
    nodes = {name: _find(*harvest._PUBLIC[name]) for name in harvest.__all__}
    # Run and run would have one anchor without the word.
    titles = {name: f"{'class' if isinstance(node, ast.ClassDef) else 'function'} harvest.{name}" for name, node in nodes.items()}
    lines += [f"- [{title}](#{title.lower().replace(' ', '-').replace('.', '')})" for title in titles.values()]
    for name, node in nodes.items():
        lines += ["", f"## {titles[name]}", ""]
        lines += _function(node, f"harvest.{name}") if isinstance(node, ast.FunctionDef) else _class(node, name)
    return "\n".join(lines) + "\n"


def _find(module: str, attribute: str) -> ast.FunctionDef | ast.ClassDef:
    """The source of a function or class, read and not imported: what Python says of a signature differs from release to release."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    body = ast.parse(Path(spec.origin).read_text()).body
    # A class may have a second name, by an assignment.
    names = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in body if isinstance(node, ast.Assign)}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == names.get(attribute, attribute):
            return node
    raise LookupError(f"{module} has no {attribute}")


def _function(node: ast.FunctionDef, name: str) -> list[str]:
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    answer = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return ["```text", f"{name}({arguments}){answer}", "```", "", *_prose(node)]


def _class(node: ast.ClassDef, name: str) -> list[str]:
    lines = _prose(node)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) != "model_config"]
    if fields:
        lines += ["", *(_field(item) for item in fields)]
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or (item.name.startswith("_") and item.name != "__init__"):
            continue
        decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
        if any("validator" in decorator or "serializer" in decorator for decorator in decorators) or ast.get_docstring(item) is None:
            continue
        is_property = bool(decorators & {"property", "functools.cached_property", "cached_property"})
        lines += ["", f"### {name}{'' if item.name == '__init__' else '.' + item.name}", ""]
        if is_property:
            answer = f": {ast.unparse(item.returns)}" if item.returns else ""
            lines += ["```text", f"{item.name}{answer}", "```", "", *_prose(item)]
        else:
            lines += _function(item, f"harvest.{name}" if item.name == "__init__" else item.name)
    return lines


def _field(item: ast.AnnAssign) -> str:
    """A field of a model as a point: its name, type, default and description."""
    kind, default, about = item.annotation, item.value, ""
    while isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated" and isinstance(kind.slice, ast.Tuple):
        kind = kind.slice.elts[0]
    if isinstance(default, ast.Call):
        given = {word.arg: word.value for word in default.keywords}
        about = str(ast.literal_eval(given["description"])) if "description" in given else ""
        default = given.get("default")
    text = f"- `{ast.unparse(item.target)}: {ast.unparse(kind)}{'' if default is None else ' = ' + ast.unparse(default)}`"
    return f"{text}: {about}" if about else text


def _prose(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """A docstring as Markdown: a line that says what a name is, or what is raised, becomes a point of a list."""
    lines: list[str] = []
    for line in (ast.get_docstring(node) or "").splitlines():
        is_point = _POINT.match(line) is not None
        # A new sentence that is not set in is no longer of the point before.
        if lines and lines[-1].startswith(("- ", "  ")) and lines[-1].endswith(".") and line[:1].isupper() and not is_point:
            lines.append("")
        if is_point and lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
            lines.append("")
        in_list = bool(lines) and lines[-1].startswith(("- ", "  ")) and bool(line) and not is_point and not line.startswith("    ")
        lines.append(f"- {line}" if is_point else f"  {line}" if in_list else line)
    return lines


def main() -> None:
    """Write the pages, or say which of them are not what the code says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page differs")
    args = parser.parse_args()
    for name, text in (("commands.md", commands_page()), ("python.md", python_page())):
        path = DOCS / name
        if args.check and (not path.is_file() or path.read_text() != text):
            sys.exit(f"{path} is not what the code says; run: bash scripts/docs")
        if not args.check:
            path.write_text(text)


if __name__ == "__main__":
    main()
