"""Config files: a body of the API, or its fields in TOML with a table for the engine."""

import json
from pathlib import Path

import pytest

from harvest.errors import RequestError
from harvest.input.config import read_config


def test_json_is_a_body_and_has_no_engine(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompts": ["a"], "engine": {"device": "cpu"}}
    (tmp_path / "body.json").write_text(json.dumps(body))
    assert read_config(tmp_path / "body.json") == (body, {}), "engine is no field of the API, and the request's check says so"


def test_toml_has_the_same_fields_and_an_engine(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('model = "tiny"\nlayers = "all"\nprompts = ["a"]\n[engine]\ndevice = "cpu"\nbatch_tokens = 64\n')
    body, engine = read_config(tmp_path / "c.toml")
    assert body == {"model": "tiny", "layers": "all", "prompts": ["a"]}
    assert engine == {"device": "cpu", "batch_tokens": 64}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "a: 1", r"a config is a \.json file, a body of the API, or a \.toml file"),
        ("c.json", "{", "is not JSON that can be read"),
        ("c.json", "[1]", "should hold an object"),
        ("c.toml", "a = = 1", "is not TOML that can be read"),
        ("c.toml", "engine = 3", "should be a table"),
        ("c.json", " " * (50 << 20) + "{}", "has 52,428,802 bytes, and a body of the API at most 52,428,800"),
        (None, "", r"cannot be read \(No such file or directory\)"),
    ],
)
def test_what_is_no_config(name: str | None, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / (name or "nowhere.json")
    if name:
        path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_config(path)


def test_the_presets_are_configs_of_registry_models() -> None:
    from harvest.model.sources import registry
    from harvest.request import HarvestRequest

    presets = sorted(path for path in (Path(__file__).parents[2] / "configs").glob("*.toml") if path.name != "models.toml")
    assert {path.stem for path in presets} == set(registry())
    for path in presets:
        body, _ = read_config(path)
        assert HarvestRequest.check({**body, "prompts": ["a"]}).model == path.stem
