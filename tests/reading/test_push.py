"""A run pushed to a Hub over loopback, by the real client, in a process of its own; and read back from what lies there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from fake_hub import Hub

import harvest
from harvest.errors import NotARunError, RequestError
from harvest.reading.push import make_card, push


@pytest.fixture
def command(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_a", **environment}
        words = [sys.executable, "-m", "harvest", "push", *map(str, arguments)]
        return subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True)

    return call


def test_a_pushed_run_is_the_run(
    tiny_run: Path, hub: Hub, command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = command(tiny_run, "hf://datasets/me/run1")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["url"], answer["commit"], answer["files"]) == (f"{hub.url}/datasets/me/run1", "c" * 40, len(hub.pushed))
    assert [(made["name"], made["type"], made.get("private") or made["visibility"] == "private") for made in hub.made] == [
        ("run1", "dataset", True)
    ]
    assert "job.json" not in hub.pushed
    copy = tmp_path / "copy"
    for key, data in hub.pushed.items():
        (copy / key).parent.mkdir(parents=True, exist_ok=True)
        (copy / key).write_bytes(data)
    first, second = harvest.open(tiny_run), harvest.open(copy)
    assert second.manifest == first.manifest
    for prompt in range(first.n_prompts):
        assert torch.equal(first.prompt(prompt), second.prompt(prompt))
    head, body = hub.pushed["README.md"].decode().removeprefix("---\n").split("---\n", 1)
    assert "residual-stream" in yaml.safe_load(head)["tags"]
    assert "| tokens | 248 |" in body


def test_what_the_hub_refuses(tiny_run: Path, hub: Hub, command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    unknown = command(tiny_run, "hf://datasets/me/run1", HF_TOKEN="")
    assert unknown.returncode == 1
    assert "log in on this machine with `hf auth login`" in unknown.stderr
    hub.is_read_only = True
    forbidden = command(tiny_run, "hf://datasets/them/run1", "--public")
    assert forbidden.returncode == 1
    assert "does not let this user write there" in forbidden.stderr
    assert hub.pushed == {}


def test_what_cannot_be_pushed(tiny_run: Path, tmp_path: Path) -> None:
    for target in ("hf://me/run1", "me/run1", "hf://datasets/run1", "hf://datasets/me/run1/more"):
        with pytest.raises(RequestError, match="a dataset of the Hub is hf://datasets/USER/NAME"):
            push(tiny_run, target)
    with pytest.raises(NotARunError):
        push(tmp_path, "hf://datasets/me/run1")


def test_a_card_with_names_that_would_break_its_table(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    run.manifest = run.manifest.model_copy(update={"hf_repo": "a|b\nc"})
    assert "| model | a\\|b c, revision tiny-1 |" in make_card(run, "me/run1")
