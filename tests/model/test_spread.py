"""A model that is spread over memory and disk: every layer as when it is whole in one place."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL, TEXTS, Notes, tiny_request

import harvest
from harvest.errors import RequestError
from harvest.input.directions import read_directions
from harvest.model.device import Placement, place

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False),
    "gemma3": transformers.Gemma3TextConfig(**LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8}),
    # Its experts are put together as they are loaded, so what goes to disk is not in the model's own files.
    "mixtral": transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": transformers.GPT2Config(**SMALL, n_embd=32, n_layer=4, n_head=4, n_positions=128),
    "mamba": transformers.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=4),
}


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("layers", ["all", [1], [0, 2]])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_on_memory_and_disk_is_read_to_the_bit(family: str, layers: Any, save_model: Any, tmp_path: Path) -> None:
    folder = save_model(CONFIGS[family])
    request = harvest.HarvestRequest(model=str(folder), prompts=TEXTS, layers=layers)
    harvest.run(request, tmp_path / "whole", harvest.Engine(store_dtype="float32"))
    whole = harvest.open(tmp_path / "whole")
    deepest = max(whole.layers)
    for share in (0.65, 0.3):
        notes, out = Notes(), tmp_path / f"spread-{share}"
        limit = f"cpu={int(share * weight_bytes(folder) * (deepest + 1) / 4)}"
        engine = harvest.Engine(store_dtype="float32", device_map="auto", max_memory=limit)
        harvest.run(request, out, engine, notes)
        (where,) = [text for text in notes.said if text.startswith("weights: blocks ")]
        assert f"{deepest} on disk" in where
        spread = harvest.open(out)
        for prompt in range(len(TEXTS)):
            assert torch.equal(spread.prompt(prompt), whole.prompt(prompt))
    # Where the weights lay meanwhile is no difference: either folder is gone on with by the other's command.
    assert harvest.run(request, tmp_path / "whole", engine).status == "done"


def test_projections_of_a_spread_model(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(CONFIGS["llama"])
    np.save(tmp_path / "directions.npy", np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32))
    tensor = read_directions(str(tmp_path / "directions.npy"))
    request = harvest.HarvestRequest.check({"model": str(folder), "prompts": TEXTS, "layers": "all", "project_onto": tensor})
    harvest.run(request, tmp_path / "whole")
    limit = f"cpu={weight_bytes(folder) // 2}"
    harvest.run(request, tmp_path / "spread", harvest.Engine(device_map="auto", max_memory=limit))
    for prompt in range(len(TEXTS)):
        assert torch.equal(harvest.open(tmp_path / "spread").prompt(prompt), harvest.open(tmp_path / "whole").prompt(prompt))


def test_what_is_written_for_the_disk_is_removed(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / "cache"))
    folder = save_model(CONFIGS["mixtral"])
    engine = harvest.Engine(device_map="auto", max_memory=f"cpu={weight_bytes(folder) // 3}")
    harvest.run(harvest.HarvestRequest(model=str(folder), prompts=["a"], layers="all"), tmp_path / "run", engine)
    assert (tmp_path / "cache" / "offload").is_dir()
    gc.collect()
    assert not list((tmp_path / "cache" / "offload").iterdir())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_memory": "cpu=1GiB"}, "max_memory: it bounds where --device-map auto puts weights"),
        ({"device": "cpu", "device_map": "auto", "max_memory": "cuda:0=1GiB"}, "max_memory: cuda:0 was given, but this run may use cpu"),
    ],
)
def test_limits_that_mean_nothing(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(**fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("limits", ["cpu", "cpu=1TB", "cpu=-1", "gpu=1", "cpu=1,cpu=2", "", "cpu=1GiB, cuda:0=1"])
def test_limits_that_cannot_be_read(limits: str) -> None:
    with pytest.raises(ValueError, match="limits of memory are DEVICE=SIZE"):
        harvest.Engine(device_map="auto", max_memory=limits)


def test_limits_in_bytes() -> None:
    engine = harvest.Engine(device_map="auto", max_memory="cuda:0=1.5GiB,cuda:1=2GB,cpu=7")
    assert engine.memory_limits() == {"cuda:0": 3 << 29, "cuda:1": 2 * 10**9, "cpu": 7}


def test_the_cards_that_a_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # No card is here; what is asked of torch is how many there are, and what is free on each.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (card.index * 100 + 60, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _card: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _card: 30)
    engine = harvest.Engine(device_map="auto", max_memory="cuda:1=7,cpu=50")
    assert place(engine, torch.device("cuda")) == Placement(torch.device("cuda", 0), {0: 80, 1: 7, 2: 240, "cpu": 50})
    assert place(engine, torch.device("cuda", 1)) == Placement(torch.device("cuda", 1), {1: 7, "cpu": 50})
    assert place(harvest.Engine(), torch.device("cuda", 2)) == Placement(torch.device("cuda", 2))
