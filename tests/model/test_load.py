"""What a model's folder must hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from conftest import LLAMA_LIKE

import harvest
from harvest.errors import ModelError
from harvest.model.revision import folder_revision

DOWN = "model.layers.1.mlp.down_proj.weight"


def without(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(DOWN), rf"lack 1 of the decoder's tensors \({DOWN}\), which would be random numbers"),
        (without("model.embed_tokens.weight"), r"lack 1 of the decoder's tensors \(model\.embed_tokens\.weight\)"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(5, 5)}), "the weights of .* cannot be loaded"),
    ],
)
def test_weights_that_are_not_there_are_never_made_up(damage: Any, message: str, save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    damage(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        harvest.run(harvest.HarvestRequest(model=str(folder), prompts=["a"], layers="all"), tmp_path / "run")
    assert not list((tmp_path / "run" / "shards").iterdir())


def test_a_head_that_is_not_there_is_not_missed(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    request = harvest.HarvestRequest(model=str(folder), prompts=["a"], layers="all")
    assert harvest.run(request, tmp_path / "run").status == "done"


def test_a_revision_changes_with_the_weights_and_not_with_the_place(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    weights = bytearray(torch.randint(0, 256, (8 << 20,), dtype=torch.uint8).numpy().tobytes())
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    assert folder_revision(folders[0]) == folder_revision(folders[1])
    weights[5 << 20 : (5 << 20) + (64 << 10)] = bytes(64 << 10)
    (folders[1] / "model.safetensors").write_bytes(weights)
    assert folder_revision(folders[0]) != folder_revision(folders[1])
