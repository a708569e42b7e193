"""The registry: harvest's own entries, and the user's over them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvest.errors import ModelError
from harvest.model.registry import registry
from harvest.model.sources import find_model


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the user's own models."""
    path = tmp_path / "models.toml"
    monkeypatch.setenv("HARVEST_MODELS", str(path))
    registry.cache_clear()
    yield path
    registry.cache_clear()


def test_the_base_models_of_the_api() -> None:
    entries = registry()
    facts = {
        name: (entries[name].repository, entries[name].context_length, entries[name].dtype, entries[name].n_layers) for name in entries
    }
    assert facts["llama-8b"] == ("meta-llama/Llama-3.1-8B", 8192, "bfloat16", 32)
    assert facts["llama-405b"] == ("meta-llama/Llama-3.1-405B", 32768, "bfloat16", 126)
    assert facts["trinity-truebase"] == ("arcee-ai/Trinity-Large-TrueBase", 8192, "bfloat16", None)


def test_the_user_s_models_join_harvest_s_and_win_over_them(own: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    own.write_text(f'[mine]\nfolder = "{tmp_path / "mine"}"\n[llama-8b]\nrepository = "me/my-llama"\ncontext_length = 100\n')
    assert find_model("mine").location == str(tmp_path / "mine")
    source = find_model("llama-8b")
    assert (source.location, source.context_length, source.dtype) == ("me/my-llama", 100, None)
    assert "llama-405b" in registry()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = = 1", "cannot be read"),
        ('[m]\nrepositry = "a/b"', r"\[m\] in .*repositry: no such field; did you mean repository\?"),
        ("[m]\ncontext_length = 5", "an entry has either a repository or a folder"),
        ('[m]\nrepository = "a/b"\ncontext_length = 1', "context_length: 1 was given"),
        ('[m]\nrepository = "a/b"\ndtype = "int8"', "dtype: 'int8' was given"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_entry_is_named(text: str | None, message: str, own: Path) -> None:
    if text is not None:
        own.write_text(text)
    with pytest.raises(ModelError, match=message):
        registry()


def test_a_folder_that_is_not_there_says_how_to_make_it(own: Path) -> None:
    own.write_text('[m]\nfolder = "/nowhere"\nmade_by = "make m"\n[n]\nfolder = "/nowhere"')
    with pytest.raises(ModelError, match=r"m is not on this machine yet \(/nowhere is missing\); make it with: make m"):
        find_model("m")
    with pytest.raises(ModelError, match="see to that folder"):
        find_model("n")


def test_the_command_lists_what_is_here(tmp_path: Path) -> None:
    (tmp_path / "cache" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "cache" / "smollm2-135m" / "config.json").write_text("{}")
    environment = {**os.environ, "HARVEST_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "harvest", "models"]
    listed = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, env=environment).stdout)
    here = {row["id"]: row["here"] for row in listed}
    assert here == {"llama-8b": False, "llama-405b": False, "trinity-truebase": False, "smollm2": True}
    table = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert table[0].split() == ["id", "repository", "context_length", "n_layers", "dtype", "here"]
    assert table[1].split() == ["llama-8b", "meta-llama/Llama-3.1-8B", "8192", "32", "bfloat16", "no"]
