"""The schemas that `harvest schema` prints hold for what a run writes, and refuse what is no such document."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from harvest.cli import cli

DOCUMENTS = {"request": "request.json", "job": "job.json", "manifest": "manifest.json"}


def printed(document: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["schema", document])
    assert done.exit_code == 0, done.stderr
    schema: dict[str, Any] = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_run_writes_is_what_the_schema_says(document: str, tiny_run: Path) -> None:
    schema, body = printed(document), json.loads((tiny_run / DOCUMENTS[document]).read_text())
    jsonschema.validate(body, schema, format_checker=jsonschema.FormatChecker())
    for wrong in (body | {"mistyped": 1}, {name: value for name, value in body.items() if name not in ("model", "model_id")}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    "fields", [{"shard_size": 0}, {"shard_size": 4097}, {"batch_size": 65}, {"layers": "ALL"}, {"prompts": []}, {"prompts": ["a"] * 4097}]
)
def test_the_request_s_schema_has_the_api_s_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "tiny", "prompts": ["a"], **fields}, printed("request"))
