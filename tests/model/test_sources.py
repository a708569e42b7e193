"""What a model may bring along: an adapter, code of its own, pickle files; each only where it is asked for."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from conftest import LLAMA_LIKE, TEXTS, Notes

import harvest
from harvest.errors import ModelError
from harvest.model.pretrained import explained
from harvest.reading.verify import verify

# peft asks transformers for a name that is to go.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Rank 4 on two projections of each block.
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture
def folder(save_model: Any) -> Path:
    return Path(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))


def save_adapter(base: Path, folder: Path, **fields: Any) -> Any:
    """A LoRA adapter of random weights on a base, saved; answers the adapted model."""
    torch.manual_seed(1)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**(LORA | fields)))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            # One of the two is zero at first, so that an adapter begins by changing nothing.
            if "lora_" in name:
                weights.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model.eval()


def streams(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each block of a Llama hands out for one prompt, by hooks of this test's own: float32 [token, hidden]."""
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
    found: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _a, output: found.append(output[0].detach().clone())) for layer in layers]
    with torch.no_grad():
        model(input_ids=ids.long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def request_of(folder: Path, **fields: Any) -> harvest.HarvestRequest:
    return harvest.HarvestRequest(model=str(folder), prompts=TEXTS, **{"layers": "all", **fields})


@pytest.mark.parametrize("layers", ["all", [1]])
def test_an_adapted_model_is_read_as_peft_computes_it(layers: Any, folder: Path, tmp_path: Path) -> None:
    adapted = save_adapter(folder, tmp_path / "adapter")
    engine = harvest.Engine(adapter=str(tmp_path / "adapter"), store_dtype="float32")
    notes = Notes()
    harvest.run(request_of(folder, layers=layers), tmp_path / "run", engine, notes)
    run = harvest.open(tmp_path / "run")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt in range(len(TEXTS)):
        alone, unadapted = streams(adapted, run.token_ids(prompt)), streams(plain, run.token_ids(prompt))
        for position, layer in enumerate(run.layers):
            torch.testing.assert_close(run.prompt(prompt)[position], alone[layer], rtol=1e-4, atol=1e-4)
            assert not torch.allclose(run.prompt(prompt)[position], unadapted[layer], rtol=1e-2, atol=1e-2)
    about = run.manifest.local["model"]["adapter"]
    assert (about["name"], about["base"]) == (str(tmp_path / "adapter"), str(folder))
    assert about["revision"].startswith("sha256:")
    assert not [text for text in notes.said if "was trained on" in text]
    assert verify(tmp_path / "run", deep=3).is_sound


def test_another_adapter_is_another_run(folder: Path, tmp_path: Path) -> None:
    save_adapter(folder, tmp_path / "adapter")
    engine = harvest.Engine(adapter=str(tmp_path / "adapter"))
    harvest.run(request_of(folder), tmp_path / "run", engine)
    assert harvest.run(request_of(folder), tmp_path / "run", engine).status == "done"
    with pytest.raises(harvest.HarvestError, match="adapter"):
        harvest.run(request_of(folder), tmp_path / "run")
    save_adapter(folder, tmp_path / "adapter", r=2)
    with pytest.raises(harvest.HarvestError, match="adapter"):
        harvest.run(request_of(folder), tmp_path / "run", engine)


def test_an_adapter_on_a_later_block_alone(folder: Path, tmp_path: Path) -> None:
    # The first two blocks have nothing to put it on, so the whole model is loaded to see that it belongs there.
    save_adapter(folder, tmp_path / "adapter", layers_to_transform=[3])
    harvest.run(request_of(folder, layers=[0, 1]), tmp_path / "plain")
    harvest.run(request_of(folder, layers=[0, 1]), tmp_path / "run", harvest.Engine(adapter=str(tmp_path / "adapter")))
    for prompt in range(len(TEXTS)):
        assert torch.equal(harvest.open(tmp_path / "run").prompt(prompt), harvest.open(tmp_path / "plain").prompt(prompt))


def refused(folder: Path, tmp_path: Path, message: str, **fields: Any) -> None:
    with pytest.raises(ModelError, match=message):
        harvest.run(request_of(folder), tmp_path / "run", harvest.Engine(**fields))
    assert not list((tmp_path / "run").glob("shards/*"))


def test_adapters_that_do_not_fit(folder: Path, save_model: Any, tmp_path: Path) -> None:
    wide = save_model(transformers.LlamaConfig(**LLAMA_LIKE | {"hidden_size": 48, "num_attention_heads": 4}))
    save_adapter(wide, tmp_path / "wide")
    refused(folder, tmp_path, "adapter: .*wide.* it was trained on ", adapter=str(tmp_path / "wide"))
    deep = save_model(transformers.LlamaConfig(**LLAMA_LIKE | {"num_hidden_layers": 6}))
    save_adapter(deep, tmp_path / "deep")
    refused(folder, tmp_path, "holds .* tensors for which this model has no place, such as .*layers.4", adapter=str(tmp_path / "deep"))
    save_adapter(folder, tmp_path / "other", target_modules=["q_proj"])
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "up_proj"]}))
    refused(folder, tmp_path, "lack .* tensors that it puts into this model, such as .*up_proj", adapter=str(tmp_path / "other"))


def test_adapters_that_are_none(folder: Path, tmp_path: Path) -> None:
    refused(folder, tmp_path, "adapter: there is no folder ./nowhere", adapter="./nowhere")
    refused(folder, tmp_path, "holds no adapter_config.json, so it is no PEFT adapter", adapter=str(folder))
    save_adapter(folder, tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = peft.utils.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    weights.unlink()
    refused(folder, tmp_path, "holds no adapter_model.safetensors", adapter=str(tmp_path / "adapter"))
    torch.save(tensors, tmp_path / "adapter" / "adapter_model.bin")
    refused(folder, tmp_path, "are a pickle file, adapter_model.bin, .* give --allow-pickle", adapter=str(tmp_path / "adapter"))
    engine = harvest.Engine(adapter=str(tmp_path / "adapter"), allow_pickle=True)
    assert harvest.run(request_of(folder), tmp_path / "run", engine).status == "done"
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    refused(folder, tmp_path / "two", "adapter_config.json cannot be read", adapter=str(tmp_path / "adapter"))


def test_an_adapter_in_the_place_of_a_model(folder: Path, tmp_path: Path) -> None:
    save_adapter(folder, tmp_path / "adapter")
    with pytest.raises(ModelError, match=f"is an adapter; give it with --adapter, and with --model its base, {folder}"):
        harvest.run(request_of(tmp_path / "adapter"), tmp_path / "run")
    with pytest.raises(ModelError, match="tiny is made by code and takes none"):
        harvest.run(request_of(Path("tiny")), tmp_path / "run", harvest.Engine(adapter=str(tmp_path / "adapter")))


def test_an_adapter_of_another_base_is_said(folder: Path, save_model: Any, tmp_path: Path) -> None:
    other = tmp_path / "another-base"
    shutil.copytree(folder, other)
    save_adapter(other, tmp_path / "adapter")
    notes = Notes()
    harvest.run(request_of(folder), tmp_path / "run", harvest.Engine(adapter=str(tmp_path / "adapter")), notes)
    assert f"warning: the adapter {tmp_path / 'adapter'} was trained on {other}, and is put on {folder}" in notes.said


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
"""


@pytest.fixture
def own_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose folder holds its class: a Llama with a stream twice as large after block 0. Running it leaves a file behind."""
    place = tmp_path / "own"
    shutil.copytree(folder, place)
    (place / "own.py").write_text(CODE + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "own-llama", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (place / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return place


def test_code_of_a_models_own_runs_only_where_it_is_trusted(own_code: Path, folder: Path, tmp_path: Path) -> None:
    refused(own_code, tmp_path, r"comes with code of its own, .* give --trust-remote-code where you trust it")
    assert not (tmp_path / "ran").exists()
    engine = harvest.Engine(trust_remote_code=True, store_dtype="float32")
    harvest.run(request_of(own_code, layers=[0, 2]), tmp_path / "run", engine)
    assert (tmp_path / "ran").exists()
    harvest.run(request_of(folder, layers=[0, 2]), tmp_path / "plain", harvest.Engine(store_dtype="float32"))
    own, plain = harvest.open(tmp_path / "run"), harvest.open(tmp_path / "plain")
    for prompt in range(len(TEXTS)):
        assert torch.equal(own.prompt(prompt)[0], 2 * plain.prompt(prompt)[0])
    with pytest.raises(ModelError, match="give --trust-remote-code"):
        verify(tmp_path / "run", deep=1)
    assert verify(tmp_path / "run", deep=2, engine=harvest.Engine(trust_remote_code=True)).is_sound


def test_quantised_weights_are_read_at_the_values_that_they_stand_for(save_model: Any, tmp_path: Path) -> None:
    # As DeepSeek V3's: float8 values, and a scale for each 128 by 128 of them.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE | sizes))
    quantised, meant = tmp_path / "quantised", tmp_path / "meant"
    for place in (quantised, meant):
        shutil.copytree(folder, place)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    stored, values = dict(tensors), dict(tensors)
    for name, weights in tensors.items():
        if "_proj" in name:
            blocks = weights.reshape(weights.shape[0] // 128, 128, weights.shape[1] // 128, 128)
            scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            small = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name] = small.reshape(weights.shape)
            stored[f"{name}_scale_inv"] = scales.reshape(blocks.shape[0], blocks.shape[2])
            values[name] = (small.float() * scales).reshape(weights.shape)
    assert any(not torch.equal(values[name], tensors[name]) for name in tensors)
    safetensors.torch.save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(values, meant / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (quantised / "config.json").write_text(json.dumps(config))
    for layers, name in (("all", "all"), ([1], "cut")):
        harvest.run(request_of(quantised, layers=layers), tmp_path / name, harvest.Engine(store_dtype="float32"))
    harvest.run(request_of(meant), tmp_path / "expected", harvest.Engine(store_dtype="float32"))
    expected = harvest.open(tmp_path / "expected")
    for prompt in range(len(TEXTS)):
        torch.testing.assert_close(harvest.open(tmp_path / "all").prompt(prompt), expected.prompt(prompt), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(harvest.open(tmp_path / "cut").prompt(prompt)[0], expected.prompt(prompt)[1], rtol=1e-4, atol=1e-4)


def test_pickle_weights_are_read_only_where_they_are_allowed(folder: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict(), pickled / "pytorch_model.bin")
    refused(pickled, tmp_path, r"are pickle files \(pytorch_model.bin\), .* give --allow-pickle where you trust them")
    harvest.run(request_of(pickled), tmp_path / "run", harvest.Engine(allow_pickle=True))
    harvest.run(request_of(folder), tmp_path / "plain")
    for prompt in range(len(TEXTS)):
        assert torch.equal(harvest.open(tmp_path / "run").prompt(prompt), harvest.open(tmp_path / "plain").prompt(prompt))


def test_a_model_that_is_larger_than_its_card() -> None:
    said = explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."), "weights", "large", None, None)
    assert said.startswith("the weights of large cannot be loaded: CUDA out of memory.")
    assert "--device-map auto spreads a model" in said
