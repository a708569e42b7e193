"""A run folder checked: what is sound, and each thing that can be wrong, found and named."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL, TEXTS, read_96, tiny_request

import harvest
from harvest.errors import ModelError, NotARunError, RequestError
from harvest.input.directions import tensor_object
from harvest.output import durable
from harvest.output.archive import Archive
from harvest.output.process import Process
from harvest.reading.export import export_safetensors
from harvest.reading.verify import Verification, verify

SHARD = "shards/shard_00001.zarr.zip"
RECORD = "records/shard_00001.json"


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the tiny run, to be damaged."""
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose values stand in its shards as they are: float32, no codec. Not to be written to."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    harvest.run(tiny_request(shard_size=4), folder, harvest.Engine(store_dtype="float32"))
    return folder


def edit(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON document of a run."""
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))


def setting(*keys: str | int, to: Any) -> Callable[[Any], None]:
    """A change of one value, by its keys."""

    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


def put(name: str, *keys: str | int, to: Any) -> Callable[[Path], None]:
    """A fault: one value of a JSON document of a run is another."""
    return lambda folder: edit(folder, name, setting(*keys, to=to))


def seal(folder: Path, name: str) -> None:
    """Make the checksums of the manifest and the record those of a changed file."""
    sha256, n_bytes = durable.file_sha256(folder / name), (folder / name).stat().st_size
    edit(folder, "manifest.json", setting("local", "checksums", name, to=f"sha256:{sha256}"))
    if name == SHARD:
        edit(folder, RECORD, lambda record: record.update(sha256=sha256, bytes=n_bytes))


def rewrite(folder: Path, entry: str, change: Callable[[bytes], bytes]) -> None:
    """Change one entry of shard 1, all checksums being made to fit."""
    with zipfile.ZipFile(folder / SHARD) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    assert entry in entries
    with open(folder / SHARD, "wb") as file:
        new = Archive(file)
        for name, data in entries.items():
            new.add(name, change(data) if name == entry else data)
        new.close()
    seal(folder, SHARD)


def values(dtype: str, place: int, value: float) -> Callable[[bytes], bytes]:
    """A change of one value of an entry."""

    def change(data: bytes) -> bytes:
        array = np.frombuffer(data, dtype=dtype).copy()
        array[place] = value
        return array.tobytes()

    return change


def alter_stats(folder: Path, name: str = "mean") -> None:
    stats = safetensors.numpy.load_file(folder / "stats.safetensors")
    stats[name] = stats[name] + np.float32(1e-4)
    safetensors.numpy.save_file(stats, folder / "stats.safetensors")


def found(verification: Verification) -> list[tuple[str, str]]:
    return [(finding.where, finding.what) for finding in verification.findings]


def test_a_sound_run_and_what_is_said_of_it(tiny_run: Path, plain: Path) -> None:
    for folder in (tiny_run, plain):
        result = verify(folder)
        assert found(result) == []
        assert (result.n_shards, result.n_prompts, result.n_tokens, result.notes, result.reread) == (3, 9, 248, [], None)
        assert result.to_text() == f"{folder}: sound (3 shards, 9 prompts, 248 tokens, {result.n_bytes} bytes)"
        assert result.n_bytes == sum(path.stat().st_size for path in (folder / "shards").iterdir())


# What is done to a run, the file that must be named, and words that must be said of it.
FAULTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a missing shard": (lambda run: (run / SHARD).unlink(), SHARD, "is missing"),
    "a truncated shard": (lambda run: (run / SHARD).write_bytes((run / SHARD).read_bytes()[:-100]), SHARD, "directory cannot be read"),
    "an empty shard": (lambda run: (run / SHARD).write_bytes(b""), SHARD, "0 bytes of"),
    "another shard of the run": (lambda run: shutil.copy(run / SHARD.replace("1", "0"), run / SHARD), SHARD, "it is another shard"),
    "a missing record": (lambda run: (run / RECORD).unlink(), RECORD, "is missing"),
    "a record that is none": (lambda run: (run / RECORD).write_text("{}"), RECORD, "is no record"),
    "the record of another shard": (lambda run: shutil.copy(run / RECORD.replace("1", "0"), run / RECORD), RECORD, "shard is 0, and"),
    "a record's tokens": (put(RECORD, "tokens", to=7), RECORD, "tokens is 7, and manifest.json says 145"),
    "a record's bytes": (put(RECORD, "bytes", to=7), RECORD, "has 7 bytes, and it has"),
    "a record's checksum": (put(RECORD, "sha256", to="0" * 64), RECORD, "says that the checksum of shards/"),
    "a record's fingerprint": (put(RECORD, "fingerprint", "revision", to="x"), RECORD, "revision: 'x' here"),
    "a shard too many": (lambda run: shutil.copy(run / SHARD, run / SHARD.replace("1", "9")), SHARD.replace("1", "9"), "belongs to no"),
    "altered stats": (alter_stats, "stats.safetensors", "is not what was published"),
    "missing stats": (lambda run: (run / "stats.safetensors").unlink(), "stats.safetensors", "is missing"),
    "altered mean": (lambda run: (alter_stats(run), seal(run, "stats.safetensors")), "stats.safetensors", "mean is not that of the stored"),
    "altered std": (lambda run: (alter_stats(run, "std"), seal(run, "stats.safetensors")), "stats.safetensors", "std is not that of"),
    "a missing job": (lambda run: (run / "job.json").unlink(), "job.json", "is missing"),
    "a job that is none": (lambda run: (run / "job.json").write_text("{"), "job.json", "is no job"),
    "an unfinished job": (put("job.json", "status", to="running"), "job.json", "its status is running"),
    "a job's tokens": (put("job.json", "result", "tokens", to=7), "job.json", "tokens is 7, and"),
    "a job's bytes": (put("job.json", "result", "bytes_written", to=7), "job.json", "bytes_written is 7"),
    "another run's job": (put("job.json", "run_id", to="0" * 32), "job.json", "run_id is 00000000-"),
    "a missing request": (lambda run: (run / "request.json").unlink(), "request.json", "is missing"),
    "a request that is none": (lambda run: (run / "request.json").write_text('{"model": 5}'), "request.json", "is no request"),
    "a request's prompts": (put("request.json", "prompts", 1, to="b"), "request.json", "prompts[1] is b, and manifest.json says a"),
    "a missing manifest": (lambda run: (run / "manifest.json").unlink(), "manifest.json", "its job is done"),
    "a manifest that is none": (put("manifest.json", "dtype", to="int8"), "manifest.json", "dtype: Input"),
    "a manifest's checksum": (put("manifest.json", "local", "checksums", SHARD, to="sha256:0"), "manifest.json", "says that the checksum"),
    "a manifest's prompts": (put("manifest.json", "n_prompts", to=8), "manifest.json", "number of prompts is 9"),
    "a manifest's layers": (put("manifest.json", "layer_indices", to=[0, 2, 1, 3]), "manifest.json", "ascend"),
    "a manifest's shapes": (put("manifest.json", "shards", 1, "tensors", 0, "shape", to=[4, 5, 64]), "manifest.json", "shape [4, 5, 64]"),
    "a manifest's norms": (put("manifest.json", "mean_token_norm", "2", to=1.0), "manifest.json", "in layers [2]"),
    "a manifest's checksums": (put("manifest.json", "local", "checksums", to={}), "manifest.json", "with a checksum is [], and it needs"),
    "a manifest's engine": (put("manifest.json", "local", "engine", "compute_dtype", to="int8"), "manifest.json", "dtype is 'int8'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_file_named(fault: str, run: Path) -> None:
    damage, where, words = FAULTS[fault]
    damage(run)
    result = verify(run, deep=1)
    assert any(place == where and words in what for place, what in found(result)), found(result)
    assert not result.is_sound
    assert json.loads(result.to_json())["findings"][0]["where"]


def test_a_shard_of_another_run_is_found_also_with_its_record(run: Path, tmp_path: Path) -> None:
    harvest.run(tiny_request([text.upper() for text in TEXTS], shard_size=4), tmp_path / "other")
    for name in (SHARD, RECORD):
        shutil.copy(tmp_path / "other" / name, run / name)
    places = found(verify(run))
    assert [where for where, _ in places] == ["job.json", RECORD, SHARD]
    assert "is of another run than manifest.json (prompts: 'sha256:" in places[1][1]
    assert "it is another shard" in places[2][1]


def bits(path: Path) -> dict[str, tuple[int, str]]:
    """A place in each part of a shard file, and what must be said where a bit is flipped there."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        directory = archive.start_dir
    size = path.stat().st_size
    chunk = entries["activations/c/2/0/0"]
    data = {name: entry.header_offset + 30 + len(name) for name, entry in entries.items()}
    return {
        "signature": (chunk.header_offset, "the entry activations/c/2/0/0 is damaged"),
        "size in a local header": (chunk.header_offset + 20, "a header is damaged"),
        "name in a local header": (chunk.header_offset + 32, "the entry activations/c/2/0/0 is damaged"),
        "chunk": (data["activations/c/2/0/0"] + chunk.file_size // 2, "the entry activations/c/2/0/0 is damaged"),
        "end of a chunk": (data["activations/c/2/0/0"] + chunk.file_size - 1, "the entry activations/c/2/0/0 is damaged"),
        "zarr.json": (data["zarr.json"] + 5, "the entry zarr.json is damaged"),
        "an array's zarr.json": (data["activations/zarr.json"] + 50, "the entry activations/zarr.json is damaged"),
        "token_ids": (data["token_ids/c/0"] + 9, "the entry token_ids/c/0 is damaged"),
        "checksum in the directory": (directory + 16, "the entry zarr.json is damaged"),
        "time in the directory": (directory + 12, "a header is damaged"),
        "name in the directory": (directory + 46, "is damaged"),
        "end record": (size - 22, "directory cannot be read"),
        "place of the directory": (size - 4, "is not what was published"),
    }


@pytest.mark.parametrize(
    "part",
    ["signature", "size in a local header", "name in a local header", "chunk", "end of a chunk", "zarr.json", "an array's zarr.json",
     "token_ids", "checksum in the directory", "time in the directory", "name in the directory", "end record", "place of the directory"],
)  # fmt: skip
@pytest.mark.parametrize("bit", [0, 6])
def test_a_flipped_bit_is_found_and_placed(part: str, bit: int, run: Path) -> None:
    data = bytearray((run / SHARD).read_bytes())
    place, words = bits(run / SHARD)[part]
    data[place] ^= 1 << bit
    (run / SHARD).write_bytes(data)
    ((where, what),) = found(verify(run))
    assert where == SHARD
    assert words in what, what
    # The same without a manifest, by the record alone.
    (run / "manifest.json").unlink()
    assert [where for where, _ in found(verify(run))] == ["manifest.json", SHARD]


# An entry of a shard, its change, and what is said where all checksums fit what it became.
CHANGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a value": ("activations/c/2/0/0", values("<f4", 64 * 3 + 5, 0.5), "token_sum is not that of the stored values in layers [2]"),
    "a value that is not finite": ("activations/c/2/0/0", values("<f4", 64 * 63, np.nan), "is not finite, first at prompt 5, position 2"),
    "token_sum": ("token_sum/c/0/0", values("<f8", 64, 1e9), "token_sum is not that of the stored values in layers [1]"),
    "token_sum_sq": ("token_sum_sq/c/0/0", values("<f8", 0, -1), "token_sum_sq is not that of the stored values in layers [0]"),
    "token_norm_sum": ("token_norm_sum/c/0", values("<f8", 3, np.nan), "token_norm_sum is not that of the stored values in layers [3]"),
    "prompt_offsets": ("prompt_offsets/c/0", values("<i8", 1, 60), "prompt_lengths[0] is 60, and manifest.json says 61"),
    "prompt_indices": ("prompt_indices/c/0", values("<i8", 1, 8), "prompts[1] is 8, and"),
    "layer_indices": ("layer_indices/c/0", values("<i4", 3, 5), "layers[3] is 5, and"),
    "a start token": ("token_ids/c/0", values("<i4", 61, 7), "prompt 5 begins with token 7, and not with the start token 256"),
    "a negative id": ("token_ids/c/0", values("<i4", 5, -7), "prompt 4 has the token id -7"),
    "its origin": ("zarr.json", lambda data: data.replace(b"tiny-1", b"tiny-0"), "revision: 'tiny-0' here, 'tiny-1' there"),
    "an array's shape": ("token_sum/zarr.json", lambda data: data.replace(b"[4,64]", b"[4,32]"), "array token_sum is ((4, 32), 'float64')"),
    "no JSON": ("zarr.json", lambda data: data[:-1], "cannot be checked further"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_shard_holds_is_checked_also_where_all_checksums_fit(change: str, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")
    entry, alter, words = CHANGES[change]
    rewrite(tmp_path / "run", entry, alter)
    result = verify(tmp_path / "run")
    assert any(where == SHARD and words in what for where, what in found(result)), found(result)


def test_leftovers_are_named_and_are_no_damage(run: Path) -> None:
    (run / "shards" / "shard_00003.tmp-1.zarr.zip").touch()
    claim = run / "processes" / "part-0-of-1-1.json"
    claim.parent.mkdir()
    claim.write_text(json.dumps(asdict(replace(Process.this(""), birth="1"))))
    result = verify(run)
    assert result.is_sound
    assert [note.partition(":")[0] for note in result.notes] == ["shards/shard_00003.tmp-1.zarr.zip", "processes/part-0-of-1-1.json"]
    assert "note: processes/part-0-of-1-1.json: left by a process that ended" in result.to_text()


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="no such run folder"):
        verify(tmp_path / "nowhere")
    assert found(verify(tmp_path)) == [("manifest.json", "is missing, so the run is not whole; the command that began it finishes it")]


@pytest.mark.parametrize("own", ["tiny_run", "plain"])
def test_files_of_the_api_are_checked_by_their_shapes_values_and_stats(own: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder, path = tmp_path / "api", tmp_path / "api" / "shard_00001.safetensors"
    export_safetensors(harvest.open(request.getfixturevalue(own)), folder)
    result = verify(folder, deep=2)
    assert (found(result), result.n_tokens) == ([], 248)
    tensors = safetensors.torch.load_file(path)
    whole = tensors["prompt_5"].clone()
    for changed, where, words in (
        (whole * 2, "stats.safetensors", "mean is not that of the stored values in layers [0, 1, 2, 3]"),
        (whole / 0, path.name, "layer 0 holds a value that is not finite, first at prompt 5, position 0"),
        (whole[:, :3], path.name, "NotARunError"),
    ):
        safetensors.torch.save_file({**tensors, "prompt_5": changed.contiguous()}, path)
        places = found(verify(folder))
        assert any(place == where and words in what for place, what in places), places
    path.unlink()
    assert found(verify(folder)) == [(path.name, "is missing")]


@pytest.mark.parametrize("store_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_prompts_read_anew_are_what_is_on_disk(compute_dtype: Any, store_dtype: Any, tmp_path: Path) -> None:
    engine = harvest.Engine(compute_dtype=compute_dtype, store_dtype=store_dtype, batch_tokens=160)
    harvest.run(tiny_request(shard_size=4), tmp_path / "run", engine)
    result = verify(tmp_path / "run", deep=9)
    assert result.is_sound, result.to_text()
    assert result.reread is not None
    assert (result.reread.prompts, result.reread.compute_dtype) == (list(range(9)), compute_dtype)
    assert [row.layer for row in result.reread.layers] == [0, 1, 2, 3]
    rounding = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}[store_dtype]
    if compute_dtype == "float32":
        assert max(row.worst_error for row in result.reread.layers) < rounding + 1e-5
    assert f"read anew in {compute_dtype} on cpu: prompts 0, 1, 2, 3, 4, 5, 6, 7, 8\nlayer  mean cosine" in result.to_text()


def test_projections_are_read_anew_in_float64(tmp_path: Path) -> None:
    directions = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    harvest.run(tiny_request(project_onto=tensor_object(directions)), tmp_path / "run")
    result = verify(tmp_path / "run", deep=3)
    assert result.is_sound, result.to_text()
    export_safetensors(harvest.open(tmp_path / "run"), tmp_path / "api")
    with pytest.raises(RequestError, match="stand in its request"):
        verify(tmp_path / "api", deep=1)
    # Other directions in the request are other values.
    edit(tmp_path / "run", "request.json", setting("project_onto", to=tensor_object(directions[::-1])))
    result = verify(tmp_path / "run", deep=3)
    assert len([what for _, what in found(result) if "is not what the model computes" in what]) == 4, found(result)


@pytest.mark.parametrize("make_config", [
    lambda: transformers.LlamaConfig(**LLAMA_LIKE),
    lambda: transformers.GPT2Config(**SMALL, n_embd=32, n_layer=4, n_head=4, n_positions=128),
], ids=["llama", "gpt2"])  # fmt: skip
def test_another_model_than_the_run_s_is_found_from_the_layer_on_where_it_differs(
    make_config: Any, save_model: Any, tmp_path: Path
) -> None:
    model = save_model(make_config())
    harvest.run(harvest.HarvestRequest(model=str(model), prompts=TEXTS, layers="all"), tmp_path / "run")
    assert verify(tmp_path / "run", deep=2).is_sound
    weights = safetensors.torch.load_file(model / "model.safetensors")
    changed = {name: tensor + 0.1 if ".2." in name else tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    result = verify(tmp_path / "run", deep=2)
    assert [what.partition(":")[0] for _, what in found(result)] == [f"layer {layer} is not what the model computes" for layer in (2, 3)]
    assert "the run was made with revision" in result.notes[0]
    shutil.rmtree(model)
    with pytest.raises(ModelError, match="there is no file or folder"):
        verify(tmp_path / "run", deep=2)
    assert verify(tmp_path / "run").is_sound


def test_another_text_than_that_of_the_ids_is_found(run: Path) -> None:
    for name in ("manifest.json", "request.json"):
        edit(run, name, setting("prompts", 3, to="2 + 2 = 5"))
    assert verify(run).is_sound
    ((where, what),) = found(verify(run, deep=9))
    assert where == "shards/shard_00000.zarr.zip"
    assert what == "prompt 3 has other token ids than its text, from position 9: 10 of them, anew 10"


def test_one_row_that_belongs_elsewhere_is_found(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")

    def swap(data: bytes) -> bytes:
        rows = np.frombuffer(data, dtype="<f4").reshape(-1, 64).copy()
        rows[[10, 11]] = rows[[11, 10]]
        return rows.tobytes()

    # A sum over rows does not tell their order.
    rewrite(tmp_path / "run", "activations/c/2/0/0", swap)
    assert verify(tmp_path / "run").is_sound
    ((where, what),) = found(verify(tmp_path / "run", deep=9))
    assert where == SHARD
    assert "layer 2 is not what the model computes" in what
    assert "at worst (prompt 4, position 1" in what


def test_the_command_prints_its_findings_and_exits_with_0_or_1(run: Path) -> None:
    def command(*arguments: str | Path) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "harvest", "verify", *map(str, arguments)], capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout, done.stderr

    code, out, err = command(run, "--deep", "2", "--quiet")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "read anew in float32 on cpu: prompts 0, 8"
    assert out.splitlines()[-1].startswith(f"{run}: sound (3 shards, 9 prompts, 248 tokens, ")
    (run / SHARD).unlink()
    code, out, err = command(run)
    assert (code, out.splitlines()[0]) == (1, f"{SHARD}: is missing")
    assert err.startswith("harvest: 248 of 248 tokens")
    code, out, _ = command(run, "--json")
    assert (code, json.loads(out)["findings"]) == (1, [{"where": SHARD, "what": "is missing"}])


@pytest.mark.smollm2
def test_smollm2_read_anew_is_what_is_on_disk(smollm2: Path, tmp_path: Path) -> None:
    request = harvest.HarvestRequest(model=str(smollm2), prompts=read_96()[:6], layers=[7, 15, 28, 29])
    harvest.run(request, tmp_path / "run", harvest.Engine(store_dtype="float32"))
    result = verify(tmp_path / "run", deep=3)
    assert result.is_sound, result.to_text()
    assert result.reread is not None
    # Measured: 9e-7.
    assert max(row.worst_error for row in result.reread.layers) < 1e-5
    assert torch.get_float32_matmul_precision() == "highest"
