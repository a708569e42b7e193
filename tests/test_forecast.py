"""What a plan says against what a run then does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import LLAMA_LIKE, TEXTS, Notes, tiny_request

import harvest
from harvest import speed
from harvest.forecast import forecast
from harvest.progress import Silent
from harvest.stop import StopFlag


def look_ahead(request: harvest.HarvestRequest, out: Path, engine: harvest.Engine | None = None) -> Any:
    return forecast(request, out, engine or harvest.Engine(), Silent(), StopFlag())


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "harvest", *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("engine", [{}, {"store_dtype": "float32"}, {"codec": "zstd", "context_length": 20, "batch_tokens": 80}])
def test_a_plan_holds(engine: dict[str, Any], tmp_path: Path) -> None:
    ahead = look_ahead(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(**engine))
    assert not (tmp_path / "run").exists()
    assert ahead.problems == []
    job = harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(**engine))
    run = harvest.open(tmp_path / "run")
    assert job.result is not None
    assert (ahead.tokens, ahead.n_shards, ahead.layers) == (job.result.tokens, job.result.n_shards, run.layers)
    assert ahead.n_cut == len(run.manifest.local["truncated_prompts"])
    assert ahead.longest_prompt == max(len(run.token_ids(prompt)) for prompt in range(run.n_prompts))
    assert ahead.rows_bytes == sum(run.prompt(prompt).nbytes for prompt in range(run.n_prompts))
    assert job.result.bytes_written <= ahead.most_bytes
    assert ahead.padding >= 1
    assert ahead.start_token == "<s>"


def test_finished_shards_count_and_a_strangers_folder_is_a_problem(tiny_run: Path) -> None:
    same = look_ahead(tiny_request(shard_size=4), tiny_run)
    assert (same.n_shards_done, same.problems) == (3, [])
    (problem,) = look_ahead(tiny_request(shard_size=5), tiny_run).problems
    assert "holds shards of another request (shard_size: 4 there, 5 here)" in problem


def test_weights_are_counted_up_to_the_deepest_block(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).model
    for layers in ([1], [0, 3]):
        ahead = look_ahead(harvest.HarvestRequest(model=str(folder), prompts=TEXTS, layers=layers), tmp_path / "run")
        blocks = sum(weights.numel() for block in model.layers[: layers[-1] + 1] for weights in block.parameters())
        beside = sum(weights.numel() for name, weights in model.named_parameters() if not name.startswith("layers."))
        assert ahead.weight_bytes == 4 * (blocks + beside)


def test_time_is_known_once_this_machine_has_read_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / "cache"))
    assert look_ahead(tiny_request(), tmp_path / "one").seconds is None
    monkeypatch.setattr(speed, "_LEAST_S", 0.0)
    harvest.run(tiny_request(), tmp_path / "one")
    seconds = look_ahead(tiny_request(), tmp_path / "two").seconds
    assert seconds is not None
    assert 0 <= seconds < 60
    # Twice the tokens take longer; another type is another speed.
    known = speed.Speed(tokens=1000, n_blocks=4, load_s=3, read_s=10, at="")
    assert (known.estimate_s(2000, 4), known.estimate_s(2000, 2)) == (23, 13)
    assert look_ahead(tiny_request(), tmp_path / "two", harvest.Engine(compute_dtype="bfloat16")).seconds is None


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    words = ("plan", "--model", "tiny", "--prompts", tmp_path / "prompts.jsonl", "--layers", "all", "--out")
    done = command(*words, tmp_path / "run", "--json")
    assert (done.returncode, json.loads(done.stdout)["tokens"]) == (0, 248)
    assert "prompts      9, the longest of 70 tokens" in command(*words, tmp_path / "run", "--quiet").stdout
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    refused = command(*words, tmp_path / "full")
    assert refused.returncode == 2
    assert "problem      out: " in refused.stdout
    assert "is not empty and holds no run of harvest" in refused.stdout
    assert command("plan", "--prompts", tmp_path / "nothing.jsonl").returncode == 2


def test_events_for_a_program_that_watches(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"one"\n"two"\n')
    done = command("run", "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "run", "--progress", "json")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["event"] for event in events if event["event"] != "note"] == ["begin", "progress", "end"]
    assert (events[-2]["event"], events[-2]["tokens"], events[-1]["event"]) == ("end", 8, "note")
    assert json.loads(done.stdout)["status"] == "done"


def test_nothing_is_left_out_of_a_forecast_that_is_read(tmp_path: Path) -> None:
    notes = Notes()
    ahead = forecast(tiny_request(), tmp_path / "run", harvest.Engine(), notes, StopFlag())
    assert [line.split("  ")[0] for line in ahead.to_text().splitlines()] == [
        "run folder", "model", "prompts", "start token", "tokens", "batches", "shards", "stored", "disk", "weights", "host memory", "time",
    ]  # fmt: skip
    assert notes.said == ["tiny has random weights: it shows how harvest works, and its numbers mean nothing"]
