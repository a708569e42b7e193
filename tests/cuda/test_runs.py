"""Runs on a card: each way through the program gives what the CPU gives."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL, Notes, wait_for

import harvest
import harvest.stream
import harvest.window
from harvest.errors import CancelledError, DeviceError, FolderError, RequestError
from harvest.forecast import forecast
from harvest.input.directions import read_directions
from harvest.model import device as devices
from harvest.model.waiting import InFile, InMemory, OnDevice
from harvest.output.folder import RunFolder
from harvest.progress import Silent
from harvest.stop import StopFlag

from .conftest import PROMPTS, Card, agree, asking, digests, run_all, settings

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_each_name_of_the_first_card(device: str, llama: Path, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    held_against_cpu(asking(llama), settings(device=device))
    assert harvest.open(tmp_path / "card").manifest.local["engine"]["device"] == "cuda:0"


@pytest.mark.parametrize("weights", ["resident", "stream"])
def test_the_second_card(weights: str, llama: Path, card: Card, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    card.need(2)
    held_against_cpu(asking(llama), settings(device="cuda:1", weights=weights))
    assert harvest.open(tmp_path / "card").manifest.local["engine"]["device"] == "cuda:1"
    with pytest.raises(RequestError, match=r"device: cuda:7 .*cuda:0 to cuda:"):
        harvest.run(asking(llama), tmp_path / "none", settings(device="cuda:7"))


def test_cuda_is_the_current_card_of_a_process(llama: Path, card: Card, tmp_path: Path) -> None:
    card.need(2)
    harvest.run(asking(llama), tmp_path / "other", settings(device="cuda:1"))
    assert torch.cuda.current_device() == 0, "a run leaves the current card as it was"
    torch.cuda.set_device(1)
    harvest.run(asking(llama), tmp_path / "run", settings())
    assert harvest.open(tmp_path / "run").manifest.local["engine"]["device"] == "cuda:1"


def test_the_command_with_its_defaults(card: Card, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(text)}\n" for text in PROMPTS))
    command = card.command("run", "--model", "tiny", "--prompts", prompts, "--layers", "all", "--out", tmp_path / "card")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    local = harvest.open(tmp_path / "card").manifest.local["engine"]
    assert local["device"] == "cuda:0"
    engine = harvest.Engine(device="cuda", compute_dtype=local["compute_dtype"], window_bytes=local["window_bytes"])
    held_against_cpu(asking("tiny", shard_size=32), engine, tmp_path / "card")


@pytest.mark.parametrize("store_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layers", ["all", [1]])
def test_all_stored_types(store_dtype: str, layers: Any, llama: Path, held_against_cpu: Callable[..., Notes]) -> None:
    held_against_cpu(asking(llama, layers=layers), settings(store_dtype=store_dtype))


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_half_types_are_computed(compute_dtype: str, llama: Path, held_against_cpu: Callable[..., Notes]) -> None:
    held_against_cpu(asking(llama), settings(compute_dtype=compute_dtype, store_dtype="float32"))


@pytest.mark.parametrize("weights", ["resident", "stream"])
def test_projections(weights: str, llama: Path, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    np.save(tmp_path / "directions.npy", np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32))
    request = asking(llama, project_onto=read_directions(str(tmp_path / "directions.npy")))
    held_against_cpu(request, settings(weights=weights))


# One family a kind: a sliding window's mask, experts, learned positions, blocks of two kinds.
FAMILIES: dict[str, Any] = {
    "gemma3": transformers.Gemma3TextConfig(**LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8}),
    "mixtral": transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": transformers.GPT2Config(**SMALL, n_embd=32, n_layer=4, n_head=4, n_positions=128),
}


@pytest.mark.parametrize("weights", ["resident", "stream"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family: str, weights: str, save_model: Any, held_against_cpu: Callable[..., Notes]) -> None:
    # The simulator's layer norm is another of the CPU's kernels, and rounds otherwise.
    held_against_cpu(asking(save_model(FAMILIES[family])), settings(weights=weights), exact=family != "gpt2")


@pytest.mark.parametrize("way", ["staged", "run by run", "through a pinned buffer", "nothing pinned"])
def test_each_way_of_rows_to_host_memory(
    way: str, llama: Path, held_against_cpu: Callable[..., Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = []
    stage = harvest.window.WindowReader._stage
    monkeypatch.setattr(harvest.window.WindowReader, "_stage", lambda self, target: staged.append(found := stage(self, target)) or found)
    if way == "run by run":
        monkeypatch.setattr(harvest.window, "_STAGED_SHARE", 0)
    host_empty = devices.host_empty
    if way != "staged":
        least = {"run by run": 1 << 60, "through a pinned buffer": 60_000, "nothing pinned": 0}[way]

        def pin_small(shape: Any, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
            return host_empty(shape, dtype, pinned and int(np.prod(shape)) * dtype.itemsize < least)

        for module in ("harvest.model.transfer", "harvest.output.writers"):
            monkeypatch.setattr(f"{module}.host_empty", pin_small)
    notes = held_against_cpu(asking(llama), settings(store_dtype="float32", window_tokens=600))
    assert any(found is not None for found in staged) == (way == "staged")
    assert any("no memory could be pinned" in note for note in notes.said) == (way in ("through a pinned buffer", "nothing pinned"))


@pytest.mark.parametrize("place", ["card", "host", "file"])
def test_streams_between_two_blocks(
    place: str, llama: Path, held_against_cpu: Callable[..., Notes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    for kind in (OnDevice, InMemory, InFile):
        monkeypatch.setattr(harvest.stream, kind.__name__, lambda *arguments, kind=kind: made.append(kind(*arguments)) or made[-1])
    if place == "host":
        monkeypatch.setattr(harvest.stream, "_STAYS", 0)
    scratch = {"scratch": str(tmp_path), "window_bytes": 1000} if place == "file" else {}
    monkeypatch.setattr(harvest.stream.StreamReader, "_make_room", lambda *_: pytest.fail("there is room enough"))
    held_against_cpu(asking(llama), settings(weights="stream", store_dtype="float32", **scratch))
    assert {type(store) for store in made} == {{"card": OnDevice, "host": InMemory, "file": InFile}[place]}


def test_weights_over_two_cards(llama: Path, card: Card, held_against_cpu: Callable[..., Notes]) -> None:
    card.need(2)
    notes = held_against_cpu(asking(llama), settings(device_map="auto", max_memory="cuda:0=150KB,cuda:1=1GB,cpu=0"))
    assert any("on cuda:0" in note and "on cuda:1" in note for note in notes.said), notes.said


def test_weights_on_a_card_and_the_host(llama: Path, card: Card, held_against_cpu: Callable[..., Notes]) -> None:
    notes = held_against_cpu(asking(llama), settings(device="cuda:0", device_map="auto", max_memory="cuda:0=150KB,cpu=1GB"))
    assert any("on cuda:0" in note and "on cpu" in note for note in notes.said), notes.said


def test_weights_that_come_to_lie_on_the_second_card_alone(llama: Path, card: Card, held_against_cpu: Callable[..., Notes]) -> None:
    card.need(2)
    notes = held_against_cpu(asking(llama), settings(device_map="auto", max_memory="cuda:0=1KB,cuda:1=1GB,cpu=0"))
    assert "weights: blocks 0-3 on cuda:1" in notes.said


def test_limits_that_leave_nothing_to_a_card_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"device_map: no part of .* fits .*Raise --max-memory, or pass --device cpu"):
        harvest.run(asking(llama), tmp_path / "run", settings(device="cuda:0", device_map="auto", max_memory="cuda:0=1KB,cpu=1GB"))


def test_a_run_of_a_cpu_is_not_gone_on_with_on_a_card(llama: Path, tmp_path: Path) -> None:
    harvest.run(asking(llama), tmp_path / "run", settings(device="cpu"))
    with pytest.raises(FolderError, match=r"\(device: 'cpu' there, 'cuda' here\)"):
        harvest.run(asking(llama), tmp_path / "run", settings())


def test_two_ranks_take_a_card_each(llama: Path, card: Card, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    card.need(2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(text)}\n" for text in PROMPTS))
    command = card.command(
        "run", "--model", llama, "--prompts", prompts, "--layers", "all", "--shard-size", "4", "--out", tmp_path / "card",
        "--compute-dtype", "float32", "--batch-tokens", "160", "--window-tokens", "400",
    )  # fmt: skip
    launcher = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "FAKECUDA_DEVICES": "2"}
    env = [{**os.environ, **launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    run_all([command, command], env)
    held_against_cpu(asking(llama), settings(), tmp_path / "card")


def test_a_check_and_a_deep_look(llama: Path, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    for weights in ("resident", "stream"):
        folder = tmp_path / weights
        notes = Notes()
        harvest.run(asking(llama), folder, settings(check=True, weights=weights), notes)
        assert any(note.startswith("checked: 2 prompts") for note in notes.said)
    agree(tmp_path / "resident", tmp_path / "stream", exact=True)
    assert harvest.verify(tmp_path / "resident", deep=2, engine=harvest.Engine(device="cuda")).is_sound


def test_a_run_repeated_gives_the_same_values(llama: Path, card: Card, tmp_path: Path) -> None:
    for name in ("one", "two"):
        harvest.run(asking(llama), tmp_path / name, settings())
    if card.is_simulated:
        assert digests(tmp_path / "one") == digests(tmp_path / "two")
    agree(tmp_path / "one", tmp_path / "two", exact=card.is_simulated, allowed=1e-5)


def test_two_runs_in_one_process_are_both_resident(llama: Path, card: Card, tmp_path: Path) -> None:
    """What the first run leaves in torch's cache is free to the second: its weights fit as they did before."""
    harvest.run(asking(llama), tmp_path / "one", settings())
    before = torch.cuda.memory_reserved(0)
    assert before > 0
    weights = 4 * sum(tensor.numel() for tensor in transformers.AutoModel.from_pretrained(llama).parameters())
    if card.is_simulated:
        # Room for little more than what is cached, which the driver says is taken.
        card._set_up(BYTES=before + weights // 2)
    for name in ("two", "three"):
        harvest.run(asking(llama), tmp_path / name, settings(weights="auto"))
        engine = harvest.open(tmp_path / name).manifest.local["engine"]
        assert engine["weights"] == "resident", f"{torch.cuda.mem_get_info(0)} and {torch.cuda.memory_reserved(0)}"
    agree(tmp_path / "one", tmp_path / "three", exact=card.is_simulated)


def test_a_plan_says_what_the_run_takes(llama: Path, tmp_path: Path) -> None:
    for weights in ("resident", "stream"):
        engine = settings(weights=weights, window_tokens=None)
        plan = forecast(asking(llama), tmp_path / weights, engine, Silent(), StopFlag())
        harvest.run(asking(llama), tmp_path / weights, engine)
        run = harvest.open(tmp_path / weights)
        assert (plan.device, plan.tokens, plan.n_shards) == ("cuda:0", run.n_tokens, run.n_shards)
        assert plan.problems == []
        # Pinned memory comes in powers of two.
        rows = plan.rows_bytes if weights == "resident" else plan.buffer_bytes - (128 << 20)
        assert plan.buffer_bytes >= plan.rows_bytes
        if weights == "resident":
            assert plan.buffer_bytes == 1 << (rows - 1).bit_length()


def test_a_stopped_run_is_finished_by_the_same_command(llama: Path, held_against_cpu: Callable[..., Notes], tmp_path: Path) -> None:
    class Stops(Silent):
        def __init__(self) -> None:
            self.flag, self.n_told = StopFlag(), 0

        def advance(self, n_tokens: int) -> None:
            self.n_told += 1
            if self.n_told == 4:
                self.flag.ask(CancelledError("stopped by the test"))

    for weights in ("resident", "stream"):
        stops, folder = Stops(), tmp_path / weights
        with pytest.raises(CancelledError):
            harvest.run(asking(llama), folder, settings(weights=weights), stops, stops.flag)
        assert harvest.run(asking(llama), folder, settings(weights=weights)).status == "done"
        held_against_cpu(asking(llama), settings(weights=weights), folder)


def test_a_killed_run_is_finished_by_the_same_command(
    llama: Path, card: Card, held_against_cpu: Callable[..., Notes], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(text)}\n" for text in PROMPTS * 20))
    command = card.command(
        "run", "--model", llama, "--prompts", prompts, "--layers", "all", "--shard-size", "4", "--out", tmp_path / "card",
        "--compute-dtype", "float32", "--batch-tokens", "160", "--window-tokens", "400",
    )  # fmt: skip
    folder = RunFolder(tmp_path / "card")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: process.poll() is not None or folder.recorded())
        assert process.poll() is None, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
    assert not folder.has(folder.manifest)
    run_all([command], [dict(os.environ)])
    held_against_cpu(asking(llama, prompts=PROMPTS * 20), settings(), folder.path)
