"""Models of a Hub: a real client against a Hub over loopback, in processes of their own, since its address is read once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA_LIKE
from fake_hub import Hub

import harvest

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def command(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `harvest run` on two prompts with an empty cache of the Hub's files below tmp_path."""
    (tmp_path / "prompts.jsonl").write_text('"hello"\n"there"\n')

    def call(model: str, out: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", **environment}
        words = ["run", "--model", model, "--prompts", str(tmp_path / "prompts.jsonl"), "--layers", "all", "--out", str(tmp_path / out)]
        return subprocess.run(
            [sys.executable, "-m", "harvest", *words, *arguments], env={**os.environ, **own}, capture_output=True, text=True
        )

    return call


@pytest.fixture
def folder(save_model: Any) -> Path:
    return Path(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))


def test_a_commit_is_written_down_and_stays_the_same_for_all_files(hub: Hub, command: Any, folder: Path, tmp_path: Path) -> None:
    hub.add("lab/model", folder, main=FIRST, v1=SECOND)
    for out, arguments, commit in (("main", (), FIRST), ("v1", ("--revision", "v1"), SECOND), ("hash", ("--revision", SECOND), SECOND)):
        done = command("lab/model", out, *arguments)
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("harvest: ") for line in done.stderr.splitlines()), done.stderr
        manifest = harvest.open(tmp_path / out).manifest
        assert (manifest.hf_repo, manifest.local["model"]["revision"]) == ("lab/model", commit)
    # The branch moves on: a finished run of it is no answer for the new commit.
    hub.add("lab/model", folder, main=SECOND)
    moved = command("lab/model", "moved")
    assert harvest.open(tmp_path / "moved").manifest.local["model"]["revision"] == SECOND, moved.stderr
    files = [path.split("/resolve/")[1].split("/")[0] for path in hub.asked if "/resolve/" in path]
    assert set(files) == {FIRST, SECOND}
    refused = command("lab/model", "main")
    assert refused.returncode == 2
    assert "revision" in refused.stderr


def test_the_cache_serves_without_a_network(hub: Hub, command: Any, folder: Path, tmp_path: Path) -> None:
    hub.add("lab/model", folder, main=FIRST)
    missing = command("lab/model", "run0", HF_HUB_OFFLINE="1")
    assert missing.returncode == 2
    assert "HF_HUB_OFFLINE is set, and the Hub's cache on this machine does not hold it; `hf download lab/model`" in missing.stderr
    assert command("lab/model", "run1").returncode == 0
    hub.asked.clear()
    offline = command("lab/model", "run2", HF_HUB_OFFLINE="1")
    assert (offline.returncode, hub.asked) == (0, []), offline.stderr
    # Nobody answers at this address; the client by itself would try for most of a minute.
    cut_off = command("lab/model", "run3", HF_ENDPOINT="http://127.0.0.1:9")
    assert cut_off.returncode == 0, cut_off.stderr
    assert "warning: the Hub cannot be reached from here; what its cache on this machine holds is used" in cut_off.stderr
    runs = [harvest.open(tmp_path / f"run{number}") for number in (1, 2, 3)]
    assert [run.manifest.local["model"]["revision"] for run in runs] == [FIRST] * 3
    unknown = command("lab/other", "run4", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="")
    assert unknown.returncode == 2
    assert (
        "the Hub cannot be reached from here, and the Hub's cache on this machine does not hold it; `hf download lab/other`"
        in unknown.stderr
    )


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("lab/model", ("--revision", "v9"), "lab/model has no revision v9 on the Hub; give a branch, a tag or a commit of it"),
        (
            "lab/nothing",
            (),
            "the Hub knows no lab/nothing, or it is private and this machine may not see it; check the id, log in with `hf auth",
        ),
        (
            "lab/gated",
            (),
            "lab/gated is gated: ask for access on the page of lab/gated on the Hub, then log in on this machine with `hf auth",
        ),
        ("lab/model", ("--adapter", "lab/nothing"), "adapter: the Hub knows no lab/nothing"),
    ],
)
def test_what_the_hub_refuses(model: str, arguments: Any, message: str, hub: Hub, command: Any, folder: Path, tmp_path: Path) -> None:
    hub.add("lab/model", folder, main=FIRST)
    hub.add("lab/gated", folder, main=FIRST)
    hub.gated.add("lab/gated")
    done = command(model, "run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_pickle_files_of_the_hub_take_their_flag(hub: Hub, command: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    hub.add("lab/pickled", tmp_path / "pickled", main=FIRST)
    refused = command("lab/pickled", "run")
    assert refused.returncode == 2
    assert "the weights of lab/pickled are pickle files (pytorch_model.bin)" in refused.stderr
    assert not any("pytorch_model.bin" in path and path.startswith("GET") for path in hub.asked)
    done = command("lab/pickled", "run", "--allow-pickle")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "job.json").read_text())["status"] == "done"
