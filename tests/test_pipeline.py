"""A run from end to end: its documents, its states, what it answers again, and what it refuses."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import url2pathname, urlopen

import jsonschema
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from conftest import DATA, LLAMA_LIKE, TEXTS, tiny_request

import harvest
from harvest.errors import CancelledError, FolderError, RequestError, StorageError, ValueRangeError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.progress import Silent

SCHEMA = json.loads((DATA / "harvest_job.schema.json").read_text())
MANIFEST_KEYS = {
    "run_id", "layout_version", "model_id", "hf_repo", "dtype", "compression", "capture", "add_special_tokens", "layer_indices",
    "residual_stream_convention", "n_prompts", "batch_size", "prompts", "shards", "contents", "tensor_layout", "tokens_layout",
    "statistics", "mean_token_norm", "local",
}  # fmt: skip


def check_job(text: str) -> dict[str, Any]:
    job = json.loads(text)
    jsonschema.validate(job, SCHEMA, format_checker=jsonschema.FormatChecker())
    return dict(job)


class JobStates(Silent):
    """A reporter that reads job.json whenever the run says something, and keeps each state that it meets."""

    def __init__(self, folder: Path, interrupt: bool = False) -> None:
        self.folder, self.interrupt = folder, interrupt
        self.jobs: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def look(self) -> None:
        path = self.folder / "job.json"
        if path.exists():
            job = check_job(path.read_text())
            if not self.jobs or self.jobs[-1]["status"] != job["status"]:
                self.jobs.append(job)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.look()

    def begin(self, n_tokens: int, n_done: int) -> None:
        self.look()

    def advance(self, n_tokens: int) -> None:
        self.look()
        if self.interrupt:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.look()

    @property
    def states(self) -> list[str]:
        self.look()
        return [job["status"] for job in self.jobs]


def test_a_done_job_and_its_links(tmp_path: Path) -> None:
    states = JobStates(tmp_path / "run")
    answer = harvest.run(tiny_request(shard_size=4, batch_size=8), tmp_path / "run", reporter=states)
    assert states.states == ["running", "done"]
    job = check_job(answer.to_json())
    assert (job["n_prompts"], job["layers"]) == (len(TEXTS), [0, 1, 2, 3])
    assert job["reserved_tokens"] == sum(len(text.encode()) + 1 for text in TEXTS) == job["tokens"]
    result = job["result"]
    for url in [result["manifest_url"], result["stats_url"], *result["shard_urls"]]:
        with urlopen(url) as answer_file:
            assert answer_file.read(), url
    assert [Path(url2pathname(url)).name for url in result["shard_urls"]] == [f"shard_{i:05d}.zarr.zip" for i in range(3)]
    files = [tmp_path / "run" / "stats.safetensors", *(tmp_path / "run" / "shards").iterdir()]
    assert result["bytes_written"] == sum(path.stat().st_size for path in files)
    left = datetime.fromisoformat(job["urls_expire_at"]) - datetime.now(UTC)
    assert timedelta(days=6, hours=23) < left <= timedelta(days=7)


def test_the_manifest_has_the_keys_of_the_api_and_local(tiny_run: Path) -> None:
    manifest = json.loads((tiny_run / "manifest.json").read_text())
    assert set(manifest) == MANIFEST_KEYS
    assert manifest["layout_version"] == 2
    assert manifest["prompts"] == TEXTS
    assert manifest["dtype"] == "bfloat16"
    assert [entry["key"] for entry in manifest["shards"]] == [f"shards/shard_{i:05d}.zarr.zip" for i in range(3)]
    second = manifest["shards"][1]
    assert second["prompt_indices"] == [4, 5, 6, 7]
    assert {"name": "prompt_6", "shape": [4, 70, 64]} in second["tensors"]
    assert {"name": "tokens_6", "shape": [70]} in second["tensors"]
    for name, digest in manifest["local"]["checksums"].items():
        assert digest == "sha256:" + durable.file_sha256(tiny_run / name)
    assert set(manifest["local"]["checksums"]) == {entry["key"] for entry in manifest["shards"]} | {"stats.safetensors"}
    assert manifest["local"]["start_token"] == {"id": 256, "text": "<s>"}
    assert manifest["local"]["engine"]["device"] == "cpu"


def test_the_request_on_disk_is_a_body_of_the_api(tiny_run: Path) -> None:
    body = json.loads((tiny_run / "request.json").read_text())
    assert body["layers"] == [0, 1, 2, 3]
    assert harvest.HarvestRequest.check(body).prompts == TEXTS


def test_stats_are_those_of_the_stored_values_without_position_0(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    values = np.concatenate([run.prompt(i)[:, 1:].double().numpy() for i in range(run.n_prompts)], axis=1)
    stats = safetensors.numpy.load_file(tiny_run / "stats.safetensors")
    assert {name: tensor.dtype for name, tensor in stats.items()} == {"mean": "float32", "std": "float32", "layer_indices": "int32"}
    np.testing.assert_allclose(stats["mean"], values.mean(axis=1), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(stats["std"], values.std(axis=1), rtol=1e-6)
    norms = np.linalg.norm(values, axis=2).mean(axis=1)
    assert run.manifest.mean_token_norm == {str(layer): round(float(norm), 4) for layer, norm in enumerate(norms)}


def test_a_run_of_one_token_prompts_has_stats_of_zero(tmp_path: Path) -> None:
    harvest.run(tiny_request(["a", "b"], add_special_tokens=False), tmp_path / "run")
    run = harvest.open(tmp_path / "run")
    assert run.token_ids(1).tolist() == [ord("b")]
    assert not run.stats.mean.any()
    assert not run.stats.std.any()
    assert set(run.stats.mean_token_norm.values()) == {0.0}


def test_a_prompt_keeps_its_first_context_minus_one_tokens(tmp_path: Path) -> None:
    states = JobStates(tmp_path / "run")
    harvest.run(tiny_request(["abcdefgh", "abcdef", "xy"]), tmp_path / "run", harvest.Engine(context_length=8), states)
    run = harvest.open(tmp_path / "run")
    assert run.token_ids(0).tolist() == [256, *b"abcdef"]
    assert run.token_ids(1).tolist() == [256, *b"abcdef"]
    assert run.manifest.local["truncated_prompts"] == [0]
    assert any("cut to the first 7 tokens, the context length less one: prompt 0" in note for note in states.notes)


def test_text_that_begins_with_the_start_token_is_named(tmp_path: Path) -> None:
    states = JobStates(tmp_path / "run")
    harvest.run(tiny_request(["one", "<s>two", "three"]), tmp_path / "run", reporter=states)
    run = harvest.open(tmp_path / "run")
    assert run.token_ids(1).tolist() == [256, 256, *b"two"]
    assert run.manifest.local["prompts_with_two_start_tokens"] == [1]
    assert any("now has two, so every position is off by one: prompt 1;" in note for note in states.notes)


@pytest.mark.parametrize(("layers", "expected"), [(None, [1, 2, 3]), ("all", [0, 1, 2, 3]), ([3, 0, 3], [0, 3]), ([2], [2])])
def test_layers_are_answered_ascending_each_once(layers: Any, expected: list[int], tiny_run: Path, tmp_path: Path) -> None:
    harvest.run(tiny_request(layers=layers, shard_size=4), tmp_path / "run")
    run, whole = harvest.open(tmp_path / "run"), harvest.open(tiny_run)
    assert run.layers == expected
    for number in range(run.n_prompts):
        assert torch.equal(run.prompt(number), whole.prompt(number)[expected])


def test_the_same_request_again_answers_the_first_answer(tmp_path: Path) -> None:
    first = harvest.run(tiny_request(), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = harvest.run(tiny_request(), tmp_path / "run")
    assert (again.job_id, again.completed_at) == (first.job_id, first.completed_at)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


def test_a_moved_run_answers_links_to_where_it_lies_now(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "moved")
    job = harvest.run(tiny_request(shard_size=4), tmp_path / "moved")
    assert job.result is not None
    assert job.result.manifest_url == (tmp_path / "moved" / "manifest.json").as_uri()


@pytest.mark.parametrize("damage", ["shard missing", "record missing", "shard flipped", "record torn", "manifest missing"])
def test_an_unfinished_run_is_finished_with_the_same_bytes(damage: str, tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    (folder / "manifest.json").unlink()
    shard, record = folder / "shards" / "shard_00001.zarr.zip", folder / "records" / "shard_00001.json"
    if damage == "shard missing":
        shard.unlink()
    elif damage == "record missing":
        record.unlink()
    elif damage == "shard flipped":
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
    elif damage == "record torn":
        record.write_bytes(record.read_bytes()[:100])
    (folder / "shards" / "shard_00002.tmp-1.zarr.zip").write_bytes(b"left by a process that was killed")
    untouched = (folder / "shards" / "shard_00000.zarr.zip").stat().st_mtime_ns
    harvest.run(tiny_request(shard_size=4), folder)
    for path in [*(tiny_run / "shards").iterdir(), tiny_run / "stats.safetensors"]:
        assert path.read_bytes() == (folder / path.relative_to(tiny_run)).read_bytes(), path.name
    assert (folder / "shards" / "shard_00000.zarr.zip").stat().st_mtime_ns == untouched
    assert len(list((folder / "shards").iterdir())) == 3


@pytest.mark.parametrize(
    ("fields", "engine", "difference"),
    [
        ({"shard_size": 5}, {}, "shard_size: 4 there, 5 here"),
        ({"shard_size": 4, "layers": [1]}, {}, r"layers: \[0, 1, 2, 3\] there, \[1\] here"),
        ({"shard_size": 4, "prompts": ["other"]}, {}, "prompts: 'sha256:"),
        ({"shard_size": 4}, {"codec": "zstd"}, "codec: 'lz4' there, 'zstd' here"),
    ],
)
def test_another_request_on_the_folder_is_an_error_that_names_the_difference(
    fields: Any, engine: Any, difference: str, tiny_run: Path
) -> None:
    with pytest.raises(FolderError, match=difference):
        harvest.run(tiny_request(**fields), tiny_run, harvest.Engine(**engine))


def test_a_folder_without_a_finished_shard_goes_to_the_next_request_and_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(CancelledError):
        harvest.run(tiny_request(), tmp_path / "run", reporter=JobStates(tmp_path / "run", interrupt=True))
    states = JobStates(tmp_path / "run")
    harvest.run(tiny_request(shard_size=3), tmp_path / "run", reporter=states)
    assert any("finished no shard (shard_size: 32 there, 3 here)" in note for note in states.notes)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_finished_run_that_lost_a_shard_is_mended_by_the_same_command(damage: str, tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    shard = tmp_path / "run" / "shards" / "shard_00001.zarr.zip"
    whole = shard.read_bytes()
    shard.unlink() if damage == "missing" else shard.write_bytes(whole[:-1])
    harvest.run(tiny_request(shard_size=4), tmp_path / "run")
    assert shard.read_bytes() == whole
    assert harvest.open(tmp_path / "run").n_shards == 3


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FolderError, match="is not empty and holds no run"):
        harvest.run(tiny_request(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="is a file"):
        harvest.run(tiny_request(), tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis.tex"]


def test_a_value_beyond_float16_fails_the_run_and_names_its_place(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # One token's embedding beyond float16: the residual stream carries it through every block.
    model.get_input_embeddings().weight.data[ord("Q")] = 70_000.0
    model.save_pretrained(folder)
    request = harvest.HarvestRequest(model=str(folder), prompts=["fine", "the letter Q", "fine too"], layers=[2])
    with pytest.raises(ValueRangeError, match=r"layer 2, prompt 1, position 12: the stream reaches 70,\d\d\d.*float16 ends at 65,504"):
        harvest.run(request, tmp_path / "run", harvest.Engine(store_dtype="float16"))
    job = check_job((tmp_path / "run" / "job.json").read_text())
    assert (job["status"], job["tokens"]) == ("failed", 0)
    assert "layer 2, prompt 1, position 12" in job["error"]
    assert not list((tmp_path / "run" / "shards").iterdir())

    harvest.run(request, tmp_path / "run", harvest.Engine(store_dtype="bfloat16"))
    assert harvest.open(tmp_path / "run").prompt(1).float().abs().max() > 65_504


def test_a_stream_that_is_not_finite_fails_the_run(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.get_input_embeddings().weight.data[ord("Q")] = torch.nan
    model.save_pretrained(folder)
    request = harvest.HarvestRequest(model=str(folder), prompts=["fine", "Quite"], layers="all", add_special_tokens=False)
    with pytest.raises(
        ValueRangeError, match="layer 0, prompt 1, position 0: the model itself computed a value that is not finite in float32"
    ):
        harvest.run(request, tmp_path / "run")


def test_an_interrupted_run_says_cancelled_and_can_be_finished(tiny_run: Path, tmp_path: Path) -> None:
    states = JobStates(tmp_path / "run", interrupt=True)
    with pytest.raises(CancelledError):
        harvest.run(tiny_request(shard_size=4), tmp_path / "run", reporter=states)
    assert states.states == ["running", "cancelled"]
    cancelled = states.jobs[-1]
    assert cancelled["tokens"] == cancelled["reserved_tokens"]
    job = harvest.run(tiny_request(shard_size=4), tmp_path / "run")
    assert str(job.job_id) == cancelled["job_id"]
    for path in (tiny_run / "shards").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "shards" / path.name).read_bytes()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.request.touch()
    # A folder in the place of a shard's file: even root cannot rename a file over it.
    folder.shard(0).mkdir()
    with pytest.raises(StorageError, match=r"shard_00000\.zarr\.zip: cannot be written"):
        harvest.run(tiny_request(), tmp_path / "run")
    assert check_job(folder.job.read_text())["status"] == "failed"
    assert not folder.manifest.exists()


@pytest.mark.parametrize(
    ("fields", "engine", "message"),
    [
        ({"layers": [4]}, {}, "4 was given, but tiny has 4 decoder blocks, numbered 0 to 3"),
        ({"model": "llama-9b"}, {}, "llama-9b is unknown; did you mean llama-8b"),
        ({"model": "./nowhere"}, {}, "there is no file or folder ./nowhere"),
        ({}, {"context_length": 2000}, "2000 was given, but tiny has 1024 positions"),
        ({}, {"device": "cuda:7"}, "cuda:7 was given, but torch"),
    ],
)
def test_what_cannot_be_run_is_an_error_before_anything_is_written(fields: Any, engine: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        harvest.run(tiny_request().model_copy(update=fields), tmp_path / "run", harvest.Engine(**engine))
    assert not (tmp_path / "run").exists()


def test_the_default_folder_is_the_same_for_the_same_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, other, again = (harvest.run(tiny_request(layers=layers)) for layers in ([1], [2], [1]))
    assert again.job_id == first.job_id != other.job_id
    assert len(list((tmp_path / "runs").iterdir())) == 2
