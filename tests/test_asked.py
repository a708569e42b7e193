"""A finished run answers the command that made it at once, and no other."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import LLAMA_LIKE, TEXTS

import harvest
from harvest.asked import find_answer
from harvest.output.folder import RunFolder

# Runs the command, and says afterwards what it imported.
WATCHED = """
import atexit, sys
heavy = ("torch", "transformers", "zarr")
atexit.register(lambda: print("imported:", *[name for name in heavy if name in sys.modules], file=sys.stderr))
from harvest.cli import main
sys.argv[0] = "harvest"
main()
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WATCHED, "run", *arguments], capture_output=True, text=True, cwd=folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.mark.parametrize("where", [["--out", "run1"], [], ["--out-root", "elsewhere"]])
def test_the_same_command_is_answered_without_a_model(where: list[str], prompts: Path, tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--prompts", str(prompts), *where]
    first = command(tmp_path, *arguments)
    assert first.returncode == 0, first.stderr
    assert "imported: torch transformers zarr" in first.stderr
    began = time.monotonic()
    again = command(tmp_path, *arguments)
    assert time.monotonic() - began < 30
    assert again.returncode == 0, again.stderr
    assert "this run is finished already; nothing was done" in again.stderr
    assert again.stderr.splitlines()[-1] == "imported:"
    ended = {name: value for name, value in json.loads(first.stdout).items() if name != "urls_expire_at"}
    assert {name: value for name, value in json.loads(again.stdout).items() if name != "urls_expire_at"} == ended


@pytest.fixture
def run(save_model: Any, tmp_path: Path) -> tuple[harvest.HarvestRequest, Path]:
    """A finished run of a model in a folder, and its request."""
    model = tmp_path / "model"
    shutil.copytree(save_model(transformers.LlamaConfig(**LLAMA_LIKE)), model)
    request = harvest.HarvestRequest(model=str(model), prompts=TEXTS, layers=[1], shard_size=4)
    harvest.run(request, tmp_path / "run")
    return request, tmp_path / "run"


def answer(request: harvest.HarvestRequest, folder: Path, **engine: Any) -> harvest.HarvestJob | None:
    return find_answer(request, harvest.Engine(**engine), folder, Path("runs"))


def test_another_question_finds_no_answer(run: tuple[harvest.HarvestRequest, Path]) -> None:
    request, folder = run
    assert answer(request, folder) is not None
    for change in ({"layers": [2]}, {"prompts": TEXTS[1:]}, {"prompts": [*TEXTS[1:], TEXTS[0]]}, {"shard_size": 5}, {"batch_size": 3}):
        assert answer(request.model_copy(update=change), folder) is None, change
    assert answer(request, folder, codec="zstd") is None
    assert answer(request, folder.with_name("nowhere")) is None


@pytest.mark.parametrize("change", ["weights", "shard gone", "shard flipped", "manifest gone", "record gone", "job not done"])
def test_a_run_that_is_not_what_it_was_finds_no_answer(change: str, run: tuple[harvest.HarvestRequest, Path]) -> None:
    request, path = run
    folder = RunFolder(path)
    if change == "weights":
        weights = Path(request.model) / "model.safetensors"
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
    elif change == "shard gone":
        folder.shard(1).unlink()
    elif change == "shard flipped":
        raw = bytearray(folder.shard(1).read_bytes())
        raw[len(raw) // 2] ^= 1
        folder.shard(1).write_bytes(raw)
    elif change == "manifest gone":
        folder.manifest.unlink()
    elif change == "record gone":
        folder.record(2).unlink()
    else:
        folder.job.write_text(folder.job.read_text().replace('"done"', '"failed"'))
    assert answer(request, path) is None
    if change == "weights":
        with pytest.raises(harvest.HarvestError, match=r"holds shards of another request \(revision: 'sha256:"):
            harvest.run(request, path)
    else:
        assert harvest.run(request, path).status == "done"
        assert answer(request, path) is not None


def test_the_commit_of_the_hub_counts(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    from harvest.asked import note_asked

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    shutil.copytree(tiny_run, tmp_path / "run", copy_function=shutil.copy2)
    request = harvest.HarvestRequest(model="someone/model", prompts=TEXTS)
    note_asked(RunFolder(tmp_path / "run"), request, harvest.Engine())
    assert answer(request, tmp_path / "run") is None, "no commit is known, so it cannot be told"
    ref = tmp_path / "models--someone--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("a" * 40)
    note_asked(RunFolder(tmp_path / "run"), request, harvest.Engine())
    assert answer(request, tmp_path / "run") is not None
    ref.write_text("b" * 40)
    assert answer(request, tmp_path / "run") is None


def test_an_answer_needs_no_right_to_write(run: tuple[harvest.HarvestRequest, Path]) -> None:
    request, path = run
    RunFolder(path).asked.unlink()
    os.mkdir(RunFolder(path).asked)
    assert harvest.run(request, path).status == "done"
