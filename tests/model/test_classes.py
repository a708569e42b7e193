"""Which class a config's decoder is read with: from files, as models for pictures are published."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sweep import build, prompts
from tiny_configs import decoder_types, tiny_config

import harvest
from harvest.doctor import examine_model
from harvest.errors import ModelError
from harvest.model.blocks import decoder_of
from harvest.model.capture import Capture
from harvest.model.classes import check_architecture, config_for_class, model_class, n_decoder_layers
from harvest.model.describe import describe
from harvest.model.device import Placement
from harvest.model.load import load_decoder
from harvest.model.sources import find_model
from harvest.model.tiny import tiny_tokenizer


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def read(decoder: Any, n_blocks: int, hidden_size: int) -> torch.Tensor:
    with Capture(decoder, list(range(n_blocks)), hidden_size, torch.float32) as capture:
        return capture.read(prompts()).rows_LTW


# llama4 and qwen3_5 have a class for their text alone too, made from the text's config, which finds its weights in the whole's files.
@pytest.mark.parametrize("model_type", ["gemma3", "llava", "mistral3", "qwen2_vl", "qwen3_vl", "llama4", "qwen3_5", "voxtral"])
def test_a_model_for_pictures_is_read_from_its_files_by_its_text(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(decoder_types()[model_type])
    torch.manual_seed(0)
    mappings = (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    whole = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)(copy.deepcopy(config)).float().eval()
    save(whole, tmp_path)
    description = describe(find_model(str(tmp_path)))
    assert (description.n_layers, description.hidden_size) == (4, 32)
    expected = read(decoder_of(whole, 4), 4, 32)
    for n_blocks in (2, 4):
        loaded = load_decoder(description, Placement(torch.device("cpu")), torch.float32, n_blocks)
        assert loaded.is_cut == (n_blocks < 4)
        assert torch.equal(read(loaded, n_blocks, 32), expected[:n_blocks])
    assert examine_model(str(tmp_path))["n_layers"] == 4


def test_a_run_of_a_model_for_pictures(tmp_path: Path) -> None:
    config = tiny_config(decoder_types()["qwen2_5_vl"])
    save(build(config), tmp_path / "model")
    request = harvest.HarvestRequest(model=str(tmp_path / "model"), prompts=["a few words", "and some more of them"], layers="all")
    assert harvest.run(request, tmp_path / "run").status == "done"
    assert harvest.open(tmp_path / "run").prompt(1).shape[0] == 4


def test_the_decoder_of_an_encoder_decoder_counts_its_own_blocks(tmp_path: Path) -> None:
    config = tiny_config(decoder_types()["bart"])
    assert (config.encoder_layers, config.decoder_layers) == (3, 4)
    with pytest.raises(ModelError, match="is an encoder-decoder"):
        check_architecture("x", config)
    config.is_encoder_decoder, config.is_decoder = False, True
    save(build(config), tmp_path)
    description = describe(find_model(str(tmp_path)))
    assert description.n_layers == 4
    assert len(load_decoder(description, Placement(torch.device("cpu")), torch.float32, 4).blocks) == 4


def test_longcat_counts_blocks_and_not_attentions() -> None:
    config = transformers.LongcatFlashConfig(num_layers=5)
    assert (config.num_hidden_layers, n_decoder_layers(config)) == (10, 5)


def test_a_text_class_takes_the_text_config_and_how_it_is_quantised() -> None:
    config = tiny_config(decoder_types()["qwen3_5"])
    config.quantization_config = {"quant_method": "fp8"}
    assert model_class(config) is transformers.Qwen3_5ForCausalLM
    assert config_for_class(config).model_type == "qwen3_5_text"
    assert config_for_class(config).quantization_config == {"quant_method": "fp8"}
    gemma = tiny_config(decoder_types()["gemma3"])
    assert config_for_class(gemma) is gemma


def test_a_type_without_a_language_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no language model of the type 'vit' that some/model has, neither for text alone"):
        check_architecture("some/model", transformers.ViTConfig())
