"""Prompts read anew of runs with a start token that their user chose, and of those whose texts bring one along."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS, tiny_request

import harvest
from harvest.reading.export import export_safetensors
from harvest.reading.verify import Verification, verify

WITH_START = {"prompts": [f"<s>{text}" for text in TEXTS]}

# Fields of the request, those of the engine, and what each prompt begins with before its own bytes. tiny's own start token is 256.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "its own": ({}, {}, [256]),
    "none": ({}, {"start_token": "none"}, []),
    "an id": ({}, {"start_token": "65"}, [65]),
    "a text": ({}, {"start_token": "Z"}, [90]),
    "not wanted": ({"add_special_tokens": False}, {}, []),
    "cut": ({}, {"start_token": "65", "context_length": 16}, [65]),
    "cut, none": ({}, {"start_token": "none", "context_length": 16}, []),
    "twice": (WITH_START, {}, [256, 256]),
    "by the text alone": (WITH_START | {"add_special_tokens": False}, {}, [256]),
    "another before that of the text": (WITH_START, {"start_token": "65"}, [65, 256]),
    "only that of the text": (WITH_START, {"start_token": "none"}, [256]),
}


def read_anew(folder: Path) -> tuple[Verification, list[str]]:
    result = verify(folder, deep=3)
    assert result.reread is not None
    return result, [note for note in result.reread.notes if "start token" in note]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_sound_with_the_start_token_that_it_was_made_with(name: str, tmp_path: Path) -> None:
    request, engine, beginning = RUNS[name]
    harvest.run(tiny_request(**request), tmp_path / "run", harvest.Engine(**engine))
    run = harvest.open(tmp_path / "run")
    for prompt, text in enumerate(TEXTS):
        assert run.token_ids(prompt).tolist() == (beginning + list(text.encode()))[: 15 if "context_length" in engine else None]
    result, notes = read_anew(tmp_path / "run")
    assert result.is_sound, result.to_text()
    assert notes == []
    # The API's files do not say which start token was chosen: where it is not the model's own, a note does.
    export_safetensors(run, tmp_path / "api")
    result, notes = read_anew(tmp_path / "api")
    assert result.is_sound, result.to_text()
    begun_with = {"none": None, "65": 65, "Z": 90}.get(engine.get("start_token"), 256)
    assert notes == [
        f"prompt {prompt} begins with the start token {begun_with}, and the model's own is 256" for prompt in (0, 4, 8) if begun_with != 256
    ]


@pytest.mark.parametrize("said", [None, {"id": 66, "text": "B"}], ids=["none", "another"])
def test_another_start_token_than_the_manifest_says_is_found(said: dict[str, Any] | None, tmp_path: Path) -> None:
    harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(start_token="65"))
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["local"]["start_token"] = said
    path.write_text(json.dumps(manifest))
    result, _ = read_anew(tmp_path / "run")
    assert [finding.what.partition(":")[0] for finding in result.findings if "token ids" in finding.what] == [
        f"prompt {prompt} has other token ids than its text, from position 0" for prompt in (0, 4, 8)
    ]


def test_the_command_finds_a_run_without_a_start_token_sound(tmp_path: Path) -> None:
    harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(start_token="none"))
    command = [sys.executable, "-m", "harvest", "verify", str(tmp_path / "run"), "--deep", "3", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "sound (1 shards, 9 prompts" in done.stdout
