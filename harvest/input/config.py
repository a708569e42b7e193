"""A config file: the API's request body as JSON, or the same fields in TOML, with a table for the engine."""

import json
import tomllib
from pathlib import Path
from typing import Any

from harvest.errors import RequestError
from harvest.request import MAX_BODY_BYTES


def read_config(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the request and those of the engine in a config file; neither is checked yet.

    JSON is a body of the API, up to 50 MiB, and has no engine; TOML may have an [engine] table. Raises RequestError.
    """
    path = Path(path)
    if path.suffix.lower() not in (".json", ".toml"):
        raise RequestError(f"config: {path} was given; a config is a .json file, a body of the API, or a .toml file of the same fields")
    try:
        if path.stat().st_size > MAX_BODY_BYTES:
            raise RequestError(f"config: {path} has {path.stat().st_size:,} bytes, and a body of the API at most {MAX_BODY_BYTES:,}")
        text = path.read_bytes().decode("utf-8-sig")
        body = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise RequestError(f"config: {path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"config: {path} is not {path.suffix[1:].upper()} that can be read ({error})") from None
    if not isinstance(body, dict):
        raise RequestError(f"config: {path} should hold an object with the request's fields")
    engine = body.pop("engine", {}) if path.suffix.lower() == ".toml" else {}
    if not isinstance(engine, dict):
        raise RequestError(f"config: engine in {path} should be a table, [engine]")
    return body, engine
