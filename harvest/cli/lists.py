"""harvest models and harvest schema: what harvest knows."""

from typing import Any

import click

from harvest.cli.group import cli


@cli.command(short_help="List the models with a short id.", epilog="Example: harvest models --json")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of a table.")
def models(as_json: bool) -> None:
    """List the models that have a short id, and whether their files are on this machine.

    Your own go into ~/.config/harvest/models.toml, or the file that $HARVEST_MODELS names.
    """
    import json

    from harvest.model.registry import listing

    rows = listing()
    click.echo(json.dumps(rows, indent=2) if as_json else _table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as aligned columns under those keys."""
    words = {"None": "-", "True": "yes", "False": "no"}
    cells = [list(rows[0]), *([words.get(str(value), str(value)) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells)


@cli.command(short_help="Print a JSON schema.", epilog="Example: harvest schema request > request.schema.json")
@click.argument("document", type=click.Choice(["request", "job", "manifest"]))
def schema(document: str) -> None:
    """Print the JSON schema of a request, a job or a manifest, as harvest checks and writes it."""
    import json

    from pydantic import BaseModel

    from harvest.contract import HarvestJob, Manifest
    from harvest.request import HarvestRequest

    models: dict[str, type[BaseModel]] = {"request": HarvestRequest, "job": HarvestJob, "manifest": Manifest}
    click.echo(json.dumps(models[document].model_json_schema(), indent=2))
