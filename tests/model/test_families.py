"""Every layer of every prompt against transformers: one prompt at a time, unpadded, read from the model by another way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL, TEXTS, read_96

import harvest
from harvest.model.blocks import find_blocks
from harvest.model.describe import describe
from harvest.model.device import Placement
from harvest.model.load import load_decoder
from harvest.model.sources import find_model

# A config of each family, and where its model keeps the final norm.
FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: transformers.LlamaConfig(**LLAMA_LIKE), "model.norm"),
    "mistral, sliding window": (lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=8), "model.norm"),
    "mixtral": (lambda: transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4), "model.norm"),
    "phi3, long rope": (
        lambda: transformers.Phi3Config(
            **LLAMA_LIKE,
            original_max_position_embeddings=40,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.5, 3.0, 6.0, 12.0],
                "original_max_position_embeddings": 40,
            },
        ),
        "model.norm",
    ),
    "qwen3": (lambda: transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8), "model.norm"),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**LLAMA_LIKE, head_dim=8, sliding_window=16), "model.norm"),
    "olmo2": (lambda: transformers.Olmo2Config(**LLAMA_LIKE), "model.norm"),
    "phi": (lambda: transformers.PhiConfig(**LLAMA_LIKE), "model.final_layernorm"),
    "gpt2": (lambda: transformers.GPT2Config(**SMALL, n_embd=32, n_layer=4, n_head=4, n_positions=128), "transformer.ln_f"),
    "gpt_neox": (lambda: transformers.GPTNeoXConfig(**{**LLAMA_LIKE, "num_key_value_heads": None}), "gpt_neox.final_layer_norm"),
    "opt": (
        lambda: transformers.OPTConfig(
            **SMALL,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
        ),
        "model.decoder.final_layer_norm",
    ),
    "falcon": (lambda: transformers.FalconConfig(**SMALL, hidden_size=32, num_hidden_layers=4, num_attention_heads=4), "transformer.ln_f"),
    "bloom": (lambda: transformers.BloomConfig(**SMALL, hidden_size=32, n_layer=4, n_head=4), "transformer.ln_f"),
    "doge, keys chosen": (lambda: transformers.DogeConfig(**LLAMA_LIKE, keep_window_size=6), "model.norm"),
    "mamba": (lambda: transformers.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=4, state_size=8), "backbone.norm_f"),
}


def check_against_transformers(run: harvest.Run, model: Any, final_norm: str, bound: float) -> None:
    """Each layer of each prompt is what the next block takes in, and the final norm of the last is the model's last hidden state."""
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    taken_in: list[torch.Tensor] = []
    for block in blocks[1:]:
        block.register_forward_pre_hook(lambda _, args, kwargs: taken_in.append((*args, kwargs.get("hidden_states"))[0]), with_kwargs=True)
    for number in range(run.n_prompts):
        taken_in.clear()
        with torch.inference_mode():
            answer = model(input_ids=run.token_ids(number).long()[None], use_cache=False, output_hidden_states=True)
            *inner, last = run.prompt(number)
            for layer, (ours, reference) in enumerate(zip(inner, taken_in, strict=True)):
                assert relative_error(ours, reference[0]) < bound, f"prompt {number}, layer {layer}"
            assert relative_error(model.get_submodule(final_norm)(last), answer.hidden_states[-1][0]) < bound, f"prompt {number}"
            assert relative_error(last, answer.hidden_states[-1][0]) > 100 * bound, "the last layer is taken before the final norm"


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_the_blocks_above_and_the_head_computes_the_same_bits(family: str, save_model: Any, tmp_path: Path) -> None:
    folder = save_model(FAMILIES[family][0]())
    engine = harvest.Engine(store_dtype="float32", batch_tokens=640)
    for name, layers in (("whole", "all"), ("cut", [0, 1])):
        harvest.run(harvest.HarvestRequest(model=str(folder), prompts=TEXTS, layers=layers), tmp_path / name, engine)
    whole, cut = harvest.open(tmp_path / "whole"), harvest.open(tmp_path / "cut")
    for prompt in range(len(TEXTS)):
        assert torch.equal(cut.prompt(prompt), whole.prompt(prompt)[:2]), prompt

    description = describe(find_model(str(folder)))
    decoder = load_decoder(description, Placement(torch.device("cpu")), torch.float32, 2)
    assert decoder.is_cut
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    per_block = sum(weights.numel() for weights in find_blocks(model, 4)[3].parameters())
    n_all = sum(weights.numel() for weights in model.parameters())
    n_loaded = sum(weights.numel() for weights in decoder.module.parameters())
    assert n_loaded <= n_all - 2 * per_block

    # Where a model cannot be cut, what lies above is dropped instead.
    whole_decoder = load_decoder(description, Placement(torch.device("cpu")), torch.float32, 2, allow_cut=False)
    assert (whole_decoder.is_cut, len(whole_decoder.blocks)) == (False, 4)
    whole_decoder.drop_above(2)
    devices = [{weights.device.type for weights in block.parameters()} for block in whole_decoder.blocks]
    assert devices == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_family_equals_a_forward_of_one_prompt_without_padding(family: str, save_model: Any, tmp_path: Path) -> None:
    config, final_norm = FAMILIES[family]
    folder = save_model(config())
    request = harvest.HarvestRequest(model=str(folder), prompts=TEXTS, layers="all", shard_size=4)
    harvest.run(request, tmp_path / "run", harvest.Engine(store_dtype="float32", batch_tokens=640, check=True))
    run = harvest.open(tmp_path / "run")
    assert run.layers == [0, 1, 2, 3]
    assert [len(run.token_ids(i)) for i in range(run.n_prompts)] == [1 + len(text.encode()) for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_against_transformers(run, model, final_norm, 1e-5)


@pytest.mark.smollm2
def test_smollm2_equals_a_forward_of_one_prompt_without_padding(smollm2: Path, tmp_path: Path) -> None:
    prompts = read_96()[:24]
    request = harvest.HarvestRequest(model="smollm2", prompts=prompts, layers="all")
    harvest.run(request, tmp_path / "run", harvest.Engine(store_dtype="float32"))
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    check_against_transformers(harvest.open(tmp_path / "run"), model, "model.norm", 1e-5)


def test_blocks_above_the_deepest_asked_layer_and_the_head_are_never_run(save_model: Any, tmp_path: Path) -> None:
    # Weights of NaN above block 1: whatever touched them would show it.
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False))
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    engine = harvest.Engine(store_dtype="float32")
    harvest.run(harvest.HarvestRequest(model=str(folder), prompts=TEXTS, layers=[0, 1]), tmp_path / "whole", engine)
    for name, weights in whole.named_parameters():
        if name.startswith(("model.layers.2.", "model.layers.3.", "model.norm", "lm_head")):
            weights.data.fill_(torch.nan)
    whole.save_pretrained(folder)
    harvest.run(harvest.HarvestRequest(model=str(folder), prompts=TEXTS, layers=[0, 1]), tmp_path / "cut", engine)
    first, second = harvest.open(tmp_path / "whole"), harvest.open(tmp_path / "cut")
    for number in range(first.n_prompts):
        assert torch.equal(first.prompt(number), second.prompt(number))


@pytest.mark.parametrize(("compute", "bound"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_computing_in_a_half_type_stays_near_float32(compute: Any, bound: float, tiny_run: Path, tmp_path: Path) -> None:
    request = harvest.HarvestRequest(model="tiny", prompts=TEXTS, layers="all")
    harvest.run(request, tmp_path / "run", harvest.Engine(compute_dtype=compute, store_dtype="float32"))
    half, full = harvest.open(tmp_path / "run"), harvest.open(tiny_run)
    errors = [relative_error(half.prompt(i), full.prompt(i)) for i in range(full.n_prompts)]
    assert 0 < np.max(errors) < bound
