"""A run written as the API's first version has it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import TEXTS, tiny_request

import harvest
from harvest.errors import CancelledError, FolderError, NotARunError
from harvest.input.directions import read_directions
from harvest.progress import StderrReporter
from harvest.reading import export as export_module
from harvest.reading.export import Exported, export_safetensors
from harvest.settings import Engine
from harvest.stop import StopFlag

# The keys that the API's manifest has, in facts known of it.
KEYS = [
    *["run_id", "layout_version", "model_id", "hf_repo", "dtype", "compression", "capture", "add_special_tokens", "layer_indices"],
    *["residual_stream_convention", "n_prompts", "batch_size", "prompts", "shards", "contents", "tensor_layout", "tokens_layout"],
    *["statistics", "mean_token_norm"],
]


def export(run: Path, out: Path) -> Exported:
    return export_safetensors(harvest.open(run), out)


def assert_holds(out: Path, run: harvest.Run, dtype: torch.dtype) -> None:
    """The exported shards, read by safetensors itself, hold each prompt of the run exactly."""
    manifest = json.loads((out / "manifest.json").read_text())
    seen = []
    for index, entry in enumerate(manifest["shards"]):
        assert entry["key"] == f"shard_{index:05d}.safetensors"
        tensors = safetensors.torch.load_file(out / entry["key"])
        names = [name for i in entry["prompt_indices"] for name in (f"prompt_{i}", f"tokens_{i}")]
        assert set(tensors) == set(names)
        assert entry["tensors"] == [{"name": name, "shape": list(tensors[name].shape)} for name in names]
        for i in entry["prompt_indices"]:
            assert tensors[f"prompt_{i}"].dtype == dtype
            assert torch.equal(tensors[f"prompt_{i}"], run.prompt(i))
            assert tensors[f"tokens_{i}"].dtype == torch.int32
            assert torch.equal(tensors[f"tokens_{i}"], run.token_ids(i))
        seen += entry["prompt_indices"]
    assert seen == list(range(run.n_prompts))


def test_an_export_is_the_api_s_files(tiny_run: Path, tmp_path: Path) -> None:
    run = harvest.open(tiny_run)
    done = export(tiny_run, tmp_path / "out")
    assert_holds(tmp_path / "out", run, torch.bfloat16)
    names = ["manifest.json", *(f"shard_0000{index}.safetensors" for index in range(3)), "stats.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert (tmp_path / "out" / "stats.safetensors").read_bytes() == (tiny_run / "stats.safetensors").read_bytes()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list(manifest) == KEYS
    kept = set(KEYS) - {"shards", "tensor_layout", "tokens_layout"}
    assert {key: manifest[key] for key in kept} == {key: json.loads(run.manifest.to_json())[key] for key in kept}
    assert (manifest["layout_version"], manifest["dtype"], manifest["compression"]) == (2, "bfloat16", "none")
    n_bytes = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert (done.n_prompts, done.n_shards, done.n_shards_written, done.bytes) == (len(TEXTS), 3, 3, n_bytes)
    with safetensors.safe_open(tmp_path / "out" / "shard_00000.safetensors", "pt") as file:
        assert file.metadata() is None


def test_every_tensor_begins_at_a_multiple_of_its_values_size(tiny_run: Path, tmp_path: Path) -> None:
    export(tiny_run, tmp_path / "out")
    data = (tmp_path / "out" / "shard_00000.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    for entry in header.values():
        assert entry["data_offsets"][0] % {"BF16": 2, "I32": 4}[entry["dtype"]] == 0
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - size


def test_projections_are_float32_and_say_so(tmp_path: Path) -> None:
    directions = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    np.save(tmp_path / "d.npy", directions)
    harvest.run(tiny_request(shard_size=4, project_onto=read_directions(str(tmp_path / "d.npy"))), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    assert_holds(tmp_path / "out", harvest.open(tmp_path / "run"), torch.float32)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(manifest) == {*KEYS, "projection"}
    assert (manifest["contents"], manifest["dtype"], manifest["projection"]["n_directions"]) == ("projections", "float32", 3)
    assert manifest["projection"]["normalized"] is True


@pytest.mark.parametrize("store_dtype", ["float16", "float32"])
def test_another_stored_type_stays_what_it_is(store_dtype: str, tmp_path: Path) -> None:
    harvest.run(tiny_request(layers=[1, 3]), tmp_path / "run", Engine.model_validate({"store_dtype": store_dtype}))
    export(tmp_path / "run", tmp_path / "out")
    assert_holds(tmp_path / "out", harvest.open(tmp_path / "run"), getattr(torch, store_dtype))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["dtype"] == store_dtype


@pytest.mark.parametrize("group_bytes", [1, 10_000, 20_000])
def test_the_bytes_do_not_depend_on_how_much_is_held_in_memory(
    group_bytes: int, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tiny_run, tmp_path / "whole")
    monkeypatch.setattr(export_module, "_GROUP_BYTES", group_bytes)
    export(tiny_run, tmp_path / "parts")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name


def test_an_export_reads_as_the_run_and_exports_to_itself(tiny_run: Path, tmp_path: Path) -> None:
    export(tiny_run, tmp_path / "out")
    run, exported = harvest.open(tiny_run), harvest.open(tmp_path / "out")
    for i in range(run.n_prompts):
        assert torch.equal(run.prompt(i), exported.prompt(i))
    assert torch.equal(torch.cat(list(exported.layer(2))), run.layer(2)[:])
    export(tmp_path / "out", tmp_path / "again")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_second_export_writes_what_is_missing_and_nothing_else(tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(tiny_run, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert export(tiny_run, out).n_shards_written == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "shard_00001.safetensors").unlink()
    (out / "shard_00002.safetensors").write_bytes((out / "shard_00002.safetensors").read_bytes()[:-1])
    (out / "stats.safetensors").unlink()
    assert export(tiny_run, out).n_shards_written == 2
    assert_holds(out, harvest.open(tiny_run), torch.bfloat16)
    assert (out / "shard_00000.safetensors").stat().st_mtime_ns == before["shard_00000.safetensors"]


class StopAfterOne(StderrReporter):
    """Asks for a stop when the first shard is written."""

    def __init__(self, stop: StopFlag) -> None:
        super().__init__()
        self._stop = stop

    def wrote(self, n_bytes: int) -> None:
        self._stop.ask(CancelledError("stopped"))


def test_an_export_that_was_stopped_goes_on(tiny_run: Path, tmp_path: Path) -> None:
    out, stop = tmp_path / "out", StopFlag()
    with pytest.raises(CancelledError):
        export_safetensors(harvest.open(tiny_run), out, StopAfterOne(stop), stop)
    assert sorted(path.name for path in out.iterdir()) == ["copying.json", "shard_00000.safetensors"]
    with pytest.raises(NotARunError, match="a copy of a run was begun there; run the same harvest export"):
        harvest.open(out)
    assert export(tiny_run, out).n_shards_written == 2
    assert_holds(out, harvest.open(tiny_run), torch.bfloat16)
    assert not (out / "copying.json").exists()


# Files may not grow over 30,000 bytes, then the command.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
from harvest.cli import main
main()
"""


def test_a_full_disk_leaves_no_half_shard(tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    failed = subprocess.run([sys.executable, "-c", FULL_DISK, "export", str(tiny_run), str(out)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "shard_00000.safetensors: cannot be written (File too large)" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert [path.name for path in out.iterdir()] == ["copying.json"]
    export(tiny_run, out)
    assert_holds(out, harvest.open(tiny_run), torch.bfloat16)


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tiny_run: Path, tmp_path: Path) -> None:
    harvest.run(tiny_request(["another run"]), tmp_path / "other")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").touch()
    stop = StopFlag()
    with pytest.raises(CancelledError):
        export_safetensors(harvest.open(tiny_run), tmp_path / "unfinished", StopAfterOne(stop), stop)
    for name, message in [
        ("notes", "is not empty, and what it holds is no copy of this run"),
        ("file", "is a file"),
        ("other", "holds another run, or the same in other files"),
    ]:
        with pytest.raises(FolderError, match=message):
            export(tiny_run, tmp_path / name)
    with pytest.raises(FolderError, match="the same in other files"):
        export(tiny_run, tiny_run)
    with pytest.raises(FolderError, match="an unfinished copy of another run"):
        export(tmp_path / "other", tmp_path / "unfinished")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_a_run_whose_files_do_not_fit_its_manifest_is_not_exported(tmp_path: Path) -> None:
    harvest.run(tiny_request(shard_size=4), tmp_path / "run")
    shards = tmp_path / "run" / "shards"
    (shards / "shard_00001.zarr.zip").write_bytes((shards / "shard_00000.zarr.zip").read_bytes())
    with pytest.raises(NotARunError, match=r"shard_00001\.zarr\.zip: does not hold the tensors that manifest\.json says"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "run" / "stats.safetensors").unlink()
    with pytest.raises(NotARunError, match="stats are gone"):
        export(tmp_path / "run", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_the_command_prints_a_summary_on_stdout_and_notes_on_stderr(tiny_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harvest", "export", str(tiny_run), "--format", "safetensors", "out"]
    for n_written in (3, 0):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["out"], summary["n_shards_written"]) == (str(tmp_path / "out"), n_written)
        assert all(line.startswith("harvest: ") for line in done.stderr.splitlines())
    assert "3 of 3 shards are there already" in done.stderr
    refused = subprocess.run([*command[:4], str(tmp_path / "nowhere"), "out2"], capture_output=True, text=True, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no such run folder" in refused.stderr
