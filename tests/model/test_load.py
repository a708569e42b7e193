"""What a model's folder must hold."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from conftest import LLAMA_LIKE, TEXTS

import harvest
import harvest.decoder
from harvest.errors import CancelledError, ModelError
from harvest.model.describe import describe
from harvest.model.device import Placement
from harvest.model.load import load_decoder
from harvest.model.revision import folder_revision
from harvest.model.sources import find_model
from harvest.stop import StopFlag

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
    weights[5_000_001] ^= 1
    (folders[1] / "model.safetensors").write_bytes(weights)
    assert folder_revision(folders[0]) != folder_revision(folders[1])


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(os.urandom(17 << 20))
    n_blocks: list[int] = []
    first = folder_revision(weights.parent, check=lambda: n_blocks.append(1))
    assert len(n_blocks) == 3
    assert folder_revision(weights.parent, check=lambda: n_blocks.append(1)) == first
    assert len(n_blocks) == 3
    # What was remembered does not stand for a file of another time; and where it is torn, the file is read.
    os.utime(weights, (1, 1))
    assert folder_revision(weights.parent, check=lambda: n_blocks.append(1)) == first
    assert len(n_blocks) == 6
    (memory,) = (tmp_path / "cache" / "revisions").iterdir()
    memory.write_text("{")
    assert folder_revision(weights.parent, check=lambda: n_blocks.append(1)) == first
    assert len(n_blocks) == 9


def test_a_stop_is_heard_while_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(20 << 20))
    stop = StopFlag()
    stop.ask(CancelledError("enough"))
    with pytest.raises(CancelledError, match="enough"):
        folder_revision(tmp_path, check=stop.check)


BROKEN = ["null", "[]", "4", '{"model_type": "llama", "num_hidden_layers": "4"}', '{"model_type": "llama", "dtype": "x"}']


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_files_that_are_not_what_they_should_be(name: str, text: str, save_model: Any, tmp_path: Path) -> None:
    shutil.copytree(save_model(transformers.LlamaConfig(**LLAMA_LIKE)), tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(ModelError, match=r"model: the (config|tokenizer) of "):
        harvest.run(harvest.HarvestRequest(model=str(tmp_path / "model"), prompts=["a"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_blocks(layers: int, save_model: Any, tmp_path: Path) -> None:
    shutil.copytree(save_model(transformers.LlamaConfig(**LLAMA_LIKE)), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        harvest.run(harvest.HarvestRequest(model=str(tmp_path / "model"), prompts=["a"]), tmp_path / "run")


class NeedsEveryBlock(transformers.LlamaModel):
    """A decoder that asks for its last block after the others have run, as some looped models do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().forward(*args, **kwargs)
        assert self.layers[self.config.num_hidden_layers - 1] is not None
        return answer


def test_a_model_that_asks_for_its_last_block_is_read_whole(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    request = harvest.HarvestRequest(model=str(folder), prompts=["a few words"], layers=[1])
    harvest.run(request, tmp_path / "cut")
    loads: list[bool] = []
    load = harvest.decoder.load_decoder

    def watched(*args: Any, allow_cut: bool = True) -> Any:
        loads.append(allow_cut)
        decoder = load(*args, allow_cut=allow_cut)
        decoder.module.__class__ = NeedsEveryBlock
        return decoder

    monkeypatch.setattr(harvest.decoder, "load_decoder", watched)
    harvest.run(request, tmp_path / "whole")
    assert loads == [True, False]
    assert torch.equal(harvest.open(tmp_path / "cut").prompt(0), harvest.open(tmp_path / "whole").prompt(0))


@pytest.mark.parametrize("model", ["tiny", "folder"])
def test_another_attention_computes_the_same_but_for_rounding(model: str, save_model: Any, tmp_path: Path) -> None:
    name = "tiny" if model == "tiny" else str(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))
    request = harvest.HarvestRequest(model=name, prompts=TEXTS, layers="all")
    kinds: list[str] = []
    for attention in ("sdpa", "eager"):
        engine = harvest.Engine(attention=attention, store_dtype="float32")
        harvest.run(request, tmp_path / attention, engine)
        decoder = load_decoder(describe(find_model(name)), Placement(torch.device("cpu")), torch.float32, 2, attention)
        kinds.append(decoder.module.config._attn_implementation)
    assert kinds == ["sdpa", "eager"]
    runs = [harvest.open(tmp_path / attention) for attention in ("sdpa", "eager")]
    for prompt in range(len(TEXTS)):
        torch.testing.assert_close(runs[0].prompt(prompt), runs[1].prompt(prompt), rtol=1e-4, atol=1e-4)
    assert [run.manifest.local["engine"]["attention"] for run in runs] == ["sdpa", "eager"]


def test_a_revision_is_of_the_hub_alone(save_model: Any) -> None:
    engine = harvest.Engine(revision="v1.0")
    assert find_model("someone/model", engine).revision == "v1.0"
    for name in ("tiny", str(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))):
        with pytest.raises(ModelError, match=r"revision: v1\.0 was given, but .* is not a model of the Hub"):
            find_model(name, engine)
