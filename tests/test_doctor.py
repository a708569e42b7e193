"""What a machine has and a model needs, before a run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA_LIKE

from harvest.doctor import examine_machine, examine_model, needs
from harvest.errors import ModelError


def harvest_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "harvest", *arguments], capture_output=True, text=True)


def test_a_model_is_looked_at_without_its_weights(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    (folder / "model.safetensors").rename(tmp_path / "away")
    try:
        model = examine_model(str(folder))
    finally:
        (tmp_path / "away").rename(folder / "model.safetensors")
    assert (model["type"], model["class"], model["n_layers"], model["hidden_size"]) == ("llama", "LlamaForCausalLM", 4, 32)
    assert (model["context_length"], model["start_token"], model["quartiles"]) == (128, {"id": 256, "text": "<s>"}, [1, 2, 3])
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model["parameters"] == sum(weights.numel() for weights in whole.parameters())
    head = whole.lm_head.weight.numel()
    assert model["parameters"] - head == 4 * model["parameters_a_block"] + model["parameters_beside_the_blocks"]


def test_what_a_model_needs(save_model: Any) -> None:
    model = examine_model(str(save_model(transformers.LlamaConfig(**LLAMA_LIKE))))
    need = needs(model, "cpu")
    assert need["compute_dtype"] == "float32"
    assert need["quartiles"]["bytes_a_token_stored"] == 3 * 32 * 2
    assert need["all"]["bytes_a_token_stored"] == 4 * 32 * 2
    assert need["all"]["weight_bytes"] == 4 * (4 * model["parameters_a_block"] + model["parameters_beside_the_blocks"])
    assert need["all"]["fits"]


def test_the_machine(tmp_path: Path) -> None:
    machine = examine_machine(tmp_path)
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["cpus"] >= 1
    assert machine["memory_bytes"] > 1 << 30
    assert machine["write_bytes_s"] > 0
    assert not list(tmp_path.iterdir())


def test_the_commands(save_model: Any) -> None:
    folder = str(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))
    done = harvest_command("models", "--check", folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == examine_model(folder)
    done = harvest_command("doctor", "tiny")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"]["n_layers"] == 4
    assert answer["needs"]["all"]["fits"]
    assert answer["machine"]["hub_token"] in (True, False)


@pytest.mark.parametrize("arguments", [("models", "--check", "lama-8b"), ("doctor", "lama-8b")])
def test_a_mistyped_name(arguments: tuple[str, ...]) -> None:
    done = harvest_command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean llama-8b" in done.stderr


def test_a_model_that_is_no_decoder(save_model: Any) -> None:
    config = transformers.T5Config(vocab_size=257, d_model=32, d_ff=64, num_layers=2, num_heads=4)
    folder = Path(str(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))).with_name("t5")
    config.save_pretrained(folder)
    with pytest.raises(ModelError, match="encoder-decoder"):
        examine_model(str(folder))
