"""harvest models, doctor and schema: what harvest knows, and what it finds here."""

from typing import Any

import click

from harvest.cli.group import cli


@cli.command(short_help="List the models with a short id, or look at one.", epilog="Example: harvest models --check llama-8b")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of a table.")
@click.option("--check", "checked", metavar="ID", help="Load a model's config and tokenizer alone, and print what harvest makes of them.")
@click.option("--revision", metavar="REF", help="With --check: a branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="With --check: run the code that the model's files bring along.")
def models(as_json: bool, checked: str | None, revision: str | None, trust_remote_code: bool) -> None:
    """List the models that have a short id, and whether their files are on this machine; or check any model.

    Your own go into ~/.config/harvest/models.toml, or the file that $HARVEST_MODELS names.
    """
    import json

    if checked is not None:
        from harvest.model.sources import find_model
        from harvest.settings import Engine

        # A mistyped name is an error before torch is imported.
        engine = Engine(revision=revision, trust_remote_code=trust_remote_code)
        find_model(checked, engine)
        from harvest.doctor import examine_model

        click.echo(json.dumps(examine_model(checked, engine), indent=2))
        return
    from harvest.model.registry import listing

    rows = listing()
    click.echo(json.dumps(rows, indent=2) if as_json else _table(rows))


@cli.command(short_help="What this machine has.", epilog="Example: harvest doctor llama-8b --folder /scratch")
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda, cuda:N or mps. [default: auto]")
@click.option("--folder", type=click.Path(exists=True, file_okay=False), default=".", help="Whose disk to try. [default: this one]")
def doctor(model: str | None, device: str, folder: str) -> None:
    """Print as JSON what this machine has, and what a run of MODEL would need here."""
    import json
    from pathlib import Path

    from harvest.model.sources import find_model

    if model is not None:
        find_model(model)
    from harvest.doctor import examine_machine, examine_model, needs

    answer = {"machine": examine_machine(Path(folder))}
    if model is not None:
        answer["model"] = examine_model(model)
        answer["needs"] = needs(answer["model"], device)
    click.echo(json.dumps(answer, indent=2))


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
