"""Requests that cannot be run, as a user gives them: each exits with 2, names what is wrong, and leaves nothing behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_request import BAD_FIELDS, BAD_TENSORS, BODY, LIMITED

from harvest.cli import cli

# Bodies of the API. A number of thousands of digits cannot be written as JSON by Python, so that row is left to the request's own tests.
BODIES: list[tuple[dict[str, Any], str]] = [
    *((body, message) for body, message in BAD_FIELDS if body.get("shard_size") != 10**5000),
    *(({"project_onto": tensor}, message) for tensor, message in BAD_TENSORS),
    *LIMITED,
    ({"layers": [0, 4]}, "layers: 4 was given, but tiny has 4 decoder blocks, numbered 0 to 3"),
    ({"project_onto": {"data": "AACAPw==", "dtype": "float32", "shape": [1, 1]}}, "directions of 1 values were given, but the hidden size"),
    ({"model": "no-such-folder/"}, "model: "),
    ({"model": "nemo"}, "model: the config of nemo cannot be loaded"),
]

# Arguments beside a good body, and what the message must say.
ARGUMENTS = [
    (["--layers", "4"], "layers: 4 was given, but tiny has 4 decoder blocks, numbered 0 to 3"),
    (["--layers", "ALL"], "--layers: 'ALL' was given; allowed are \"all\", numbers such as 8,16,24 and ranges such as 0-3, counted from 0"),
    (["--layers", "3-1"], "--layers: the range 3-1 runs backwards; write 1-3"),
    (["--shard-size", "0"], "shard_size: 0 was given: input should be greater than or equal to 1"),
    (["--shard-size", "4097"], "shard_size: 4097 was given: input should be less than or equal to 4096"),
    (["--shard-size", "many"], "'many' is not a valid integer"),
    (["--batch-size", "65"], "batch_size: 65 was given: input should be less than or equal to 64"),
    (["--context-length", "1"], "context_length: 1 was given: input should be greater than or equal to 2"),
    (["--context-length", "1025"], "context_length: 1025 was given, but tiny has 1024 positions; give 2 to 1024"),
    (["--batch-tokens", "0"], "batch_tokens: 0 was given: input should be greater than or equal to 1"),
    (["--window-bytes", "-1"], "window_bytes: -1 was given: input should be greater than or equal to 1"),
    (["--device", "tpu"], "device: 'tpu' was given: a device is auto, cpu, cuda, cuda:N or mps"),
    (["--device", "cuda:99"], "device: cuda:99 was given, but torch"),
    (["--compute-dtype", "int8"], "compute_dtype: 'int8' was given: input should be 'auto', 'bfloat16', 'float16' or 'float32'"),
    (["--store-dtype", "double"], "store_dtype: 'double' was given: input should be 'auto', 'bfloat16', 'float16' or 'float32'"),
    (["--codec", "gzip"], "codec: 'gzip' was given: input should be 'auto', 'lz4', 'zstd' or 'none'"),
    (["--model", "lama-8b"], "model: lama-8b is unknown; did you mean llama-8b?"),
    (["--model", "/no/such/folder"], "model: there is no file or folder /no/such/folder"),
    (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such prompts file"),
    (["--prompts", "body.csv"], "body.csv: a prompts file ends in .jsonl, .json, .txt"),
    (["--project-onto", "nowhere.npy"], "project_onto: there is no file nowhere.npy"),
    (["--project-onto", "body.csv"], "a file of directions ends in .json, .npy, .safetensors, .pt"),
    (["--out", "run", "--out-root", "runs"], "out: it names the folder itself"),
    (["--idempotency-key", "k" * 256], "idempotency_key: a key of 256 characters was given; a key has 1 to 255"),
    (["--idempotency-key", ""], "idempotency_key: a key of 0 characters was given"),
    (["--config", "nowhere.toml"], "config: nowhere.toml cannot be read"),
    (["--batchsize", "3"], "No such option '--batchsize'"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(body: dict[str, Any], *arguments: str) -> Result:
    Path("body.json").write_text(json.dumps({**BODY, **body}))
    return CliRunner().invoke(cli, ["run", "--config", "body.json", *arguments])


def check(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message.removesuffix("...") in result.stderr
    assert result.stdout == ""
    assert sorted(path.name for path in Path().iterdir() if path.name != ".idempotency") in (["body.json"], ["body.json", "runs"])
    assert not list(Path().rglob("job.json"))


@pytest.mark.parametrize(("body", "message"), BODIES, ids=[message[:50] for _, message in BODIES])
def test_a_bad_body(body: dict[str, Any], message: str) -> None:
    check(run(body), message)


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=[" ".join(arguments)[:40] for arguments, _ in ARGUMENTS])
def test_bad_arguments(arguments: list[str], message: str) -> None:
    check(run({}, *arguments), message)


def test_the_table_is_long_enough() -> None:
    assert len(BODIES) + len(ARGUMENTS) >= 60


def test_options_override_the_config(folder: Path) -> None:
    Path("body.json").write_text(json.dumps({**BODY, "layers": [9], "shard_size": 7}))
    done = CliRunner().invoke(cli, ["run", "--config", "body.json", "--layers", "1-2", "--out", "run", "--quiet"])
    assert done.exit_code == 0, done.stderr
    request = json.loads((folder / "run" / "request.json").read_text())
    assert (request["layers"], request["shard_size"], request["prompts"]) == ([1, 2], 7, ["a", "b"])


def test_no_limits_lifts_the_limits(folder: Path) -> None:
    done = run({"prompts": ["a"] * 4097, "layers": [0]}, "--no-limits", "--shard-size", "4096", "--out", "run", "--quiet")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["result"]["n_shards"] == 2
