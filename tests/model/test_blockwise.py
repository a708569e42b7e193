"""Checkpoints of many kinds, read a block at a time: the same bits as loaded whole, or the reason why not before any weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL
from streamed import ON_CPU, blockwise, resident, streams_by_block, streams_whole
from tiny_configs import tiny_config

from harvest.errors import CancelledError, ModelError
from harvest.model.checkpoint import read_now
from harvest.model.describe import describe
from harvest.model.load import load_blockwise
from harvest.model.sources import find_model
from harvest.model.tiny import tiny_tokenizer
from harvest.settings import Engine
from harvest.stop import StopFlag

GPT2 = {**SMALL, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
EXPERTS = {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}
OSS = {**EXPERTS, "hidden_size": 64, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
LARGER = {**LLAMA_LIKE, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
EXPERT = "model.layers.2.block_sparse_moe.experts.1.w1.weight"

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, shape, generator=draw) for shape in ((3, 17), (1, 33))]


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a model's folder, with other tensors or another config."""

    def edit(folder: Path, change: Callable[[Tensors], Any] = lambda _: None, config: dict[str, Any] | None = None) -> Path:
        place = tmp_path / "edited"
        shutil.copytree(folder, place)
        tensors = safetensors.torch.load_file(place / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        fields = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(fields | (config or {})))
        return place

    return edit


def assert_same(folder: Path, batches: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    """Each stream of each batch is the same to the last bit; answers the streams."""
    whole, read = resident(folder, dtype), streams_by_block(blockwise(folder, dtype), batches)
    for ids_BS, streams in zip(batches, read, strict=True):
        expected = streams_whole(whole, ids_BS)
        assert len(streams) == len(whole.blocks) == len(expected)
        for block, (ours, theirs) in enumerate(zip(streams, expected, strict=True)):
            assert ours.dtype == dtype
            assert torch.equal(ours, theirs), block
    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**LLAMA_LIKE),
        transformers.GPT2Config(**GPT2),
        # Its experts are put together into one tensor while they are loaded.
        transformers.MixtralConfig(**EXPERTS),
        transformers.GptOssConfig(**OSS),
    ],
    ids=lambda config: config.model_type,
)
def test_a_block_at_a_time_is_as_all_at_once(config: Any, dtype: torch.dtype, save_model: Any, batches: list[torch.Tensor]) -> None:
    assert_same(save_model(config), batches, dtype)


def test_a_checkpoint_in_another_type(save_model: Any, batches: list[torch.Tensor], edited: Any) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    half = edited(folder, lambda tensors: tensors.update({name: weights.bfloat16() for name, weights in tensors.items()}))
    read = assert_same(half, batches, torch.float32)
    assert not torch.equal(read[0][0], streams_whole(resident(folder), batches[0])[0])


def test_tied_embeddings_are_read_by_either_name(save_model: Any, batches: list[torch.Tensor], edited: Any) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=True))
    assert "lm_head.weight" not in safetensors.torch.load_file(folder / "model.safetensors")
    read = assert_same(folder, batches)
    other = edited(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    for ours, theirs in zip(assert_same(other, batches), read, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("base", "config"),
    [(transformers.LlamaModel, transformers.LlamaConfig(**LLAMA_LIKE)), (transformers.GPT2Model, transformers.GPT2Config(**GPT2))],
)
def test_a_model_that_was_saved_without_its_head(base: Any, config: Any, tmp_path: Path, batches: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    base(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(("model.", "transformer.")) for name in names)
    assert_same(tmp_path, batches)


def test_blocks_in_many_files(tmp_path: Path, save_model: Any, batches: list[torch.Tensor]) -> None:
    folder = save_model(transformers.MixtralConfig(**EXPERTS))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 8
    # A block lies in several files, and a file holds tensors of several blocks.
    assert all(len({tensor.path for tensor in tensors}) > 1 for tensors in blockwise(tmp_path).tensors)
    assert_same(tmp_path, batches)


def test_blocks_above_and_the_head_are_not_read(save_model: Any, batches: list[torch.Tensor], edited: Any) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False))

    def cut(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.2." in name or "layers.3." in name or name == "lm_head.weight"]:
            del tensors[name]

    decoder = blockwise(edited(folder, cut), n_blocks=2)
    assert len(decoder.decoder.blocks) == len(decoder.tensors) == 2
    (streams,) = streams_by_block(decoder, batches[:1])
    assert all(map(torch.equal, streams, streams_whole(resident(folder), batches[0])[:2]))


def test_a_block_is_empty_before_and_after(save_model: Any) -> None:
    decoder = blockwise(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))
    assert all(weights.is_meta for block in range(4) for weights in decoder.weights(block))
    decoder.fill(1, read_now(decoder.tensors[1]))
    assert [any(weights.is_meta for weights in decoder.weights(block)) for block in range(4)] == [True, False, True, True]
    assert sum(weights.nbytes for weights in decoder.weights(1)) == decoder.n_bytes(1)
    decoder.empty(1)
    assert all(weights.is_meta for weights in decoder.weights(1))
    # What stands beside the blocks is there, and is not random.
    beside = {name for name, weights in decoder.decoder.module.named_parameters() if not weights.is_meta}
    assert beside == {"embed_tokens.weight", "norm.weight"}


def update(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("config", "damage", "message"),
    [
        (
            transformers.LlamaConfig(**LLAMA_LIKE),
            lambda tensors: tensors.pop("model.layers.2.mlp.down_proj.weight"),
            r"no tensors of its own for 1 of decoder block 2 \(such as model\.layers\.2\.mlp\.down_proj\.weight\); complete its files",
        ),
        (
            transformers.LlamaConfig(**LLAMA_LIKE),
            update("model.layers.2.mlp.down_proj.weight", torch.zeros(5, 5)),
            r"holds model\.layers\.2\.mlp\.down_proj\.weight of shape \[5, 5\], where Llama\w+ takes \[32, 64\]; complete its files",
        ),
        (
            transformers.LlamaConfig(**LLAMA_LIKE),
            lambda tensors: tensors.pop("model.embed_tokens.weight"),
            r"lack 1 of the decoder's tensors \(model\.embed_tokens\.weight\), which would be random numbers",
        ),
        (
            transformers.LlamaConfig(**LLAMA_LIKE),
            update("model.norm.weight", torch.zeros(5)),
            "model: the weights of .* cannot be loaded",
        ),
        # Of an expert whose tensors are put together with the others'.
        (transformers.MixtralConfig(**EXPERTS), lambda tensors: tensors.pop(EXPERT), r"experts\.gate_up_proj of .* complete its files"),
        (
            transformers.MixtralConfig(**EXPERTS),
            update(EXPERT, torch.zeros(5, 5)),
            r"experts\.gate_up_proj of .* not all there, or not of shapes that belong together \(RuntimeError: stack .*\); complete",
        ),
        (
            transformers.MixtralConfig(**EXPERTS),
            lambda tensors: [tensors.pop(EXPERT.replace("w1", name)) for name in ("w1", "w2", "w3")],
            r"experts\.\w+ of shape \[3, \d+, \d+\], where MixtralForCausalLM takes \[4,",
        ),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_said_before_a_weight_is_read(
    config: Any, damage: Any, message: str, save_model: Any, edited: Any
) -> None:
    with pytest.raises(ModelError, match=message):
        blockwise(edited(save_model(config), damage))


def test_a_block_that_is_filled_with_too_little_says_what_is_missing(save_model: Any) -> None:
    for config, key in (
        (transformers.LlamaConfig(**LLAMA_LIKE), "model.layers.2.mlp.up_proj.weight"),
        (transformers.MixtralConfig(**EXPERTS), EXPERT),
    ):
        decoder = blockwise(save_model(config))
        tensors = read_now(decoder.tensors[2])
        del tensors[key]
        with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\..* complete its files"):
            decoder.fill(2, tensors)


def test_a_file_that_is_not_whole_is_found_before_a_weight_is_read(save_model: Any, edited: Any) -> None:
    folder = edited(save_model(transformers.LlamaConfig(**LLAMA_LIKE)))
    with (folder / "model.safetensors").open("ab") as file:
        file.truncate(file.tell() - 10)
    with pytest.raises(ModelError, match=r"model\.safetensors has .* it is not whole, or was changed: fetch it anew"):
        blockwise(folder)


def test_a_stop_is_heard_while_blocks_are_rehearsed(save_model: Any) -> None:
    decoder, stop = blockwise(save_model(transformers.LlamaConfig(**LLAMA_LIKE))), StopFlag()
    stop.ask(CancelledError("enough"))
    with pytest.raises(CancelledError, match="enough"):
        decoder.rehearse(stop.check)


def test_weights_that_blocks_share_are_refused(save_model: Any) -> None:
    for config_class in (transformers.ZambaConfig, transformers.Zamba2Config):
        with pytest.raises(ModelError, match=r"of decoder block 3 .* from another of its blocks, leave out --weights stream"):
            blockwise(save_model(tiny_config(config_class)))


def test_pickle_files_are_not_read_by_block(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    shutil.copytree(folder, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    description = describe(find_model(str(tmp_path / "pickled"), Engine(allow_pickle=True)))
    with pytest.raises(
        ModelError, match="are not in safetensors files, which alone are read a block at a time; leave out --weights stream"
    ):
        load_blockwise(description, ON_CPU, torch.float32, 4)


def in_float8(tensors: Tensors) -> None:
    """As DeepSeek V3's: float8 values, and a scale for each 128 by 128 of them; smaller sides are one block."""
    for name, weights in list(tensors.items()):
        if "_proj" in name or ".experts." in name:
            rows, columns = (min(128, size) for size in weights.shape)
            blocks = weights.reshape(weights.shape[0] // rows, rows, weights.shape[1] // columns, columns)
            scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            tensors[name] = (blocks / scales).to(torch.float8_e4m3fn).reshape(weights.shape)
            tensors[f"{name}_scale_inv"] = scales.reshape(blocks.shape[0], blocks.shape[2])


FLOAT8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}}


def in_mxfp4(tensors: Tensors) -> None:
    """As gpt-oss's: experts of four bits, two in a byte, and a scale for each 32 of them."""
    draw = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n_experts, n_in, n_out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (n_experts, n_out, n_in // 32, 16), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(118, 124, (n_experts, n_out, n_in // 32), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "quantise", "fields"),
    [
        (transformers.LlamaConfig(**LARGER), in_float8, FLOAT8),
        (transformers.MixtralConfig(**LARGER | {"num_local_experts": 4, "num_experts_per_tok": 2}), in_float8, FLOAT8),
        (transformers.GptOssConfig(**OSS), in_mxfp4, MXFP4),
    ],
    ids=["float8", "float8-experts", "mxfp4-experts"],
)
def test_weights_that_are_widened_while_they_are_loaded(
    config: Any, quantise: Any, fields: Any, dtype: torch.dtype, save_model: Any, batches: list[torch.Tensor], edited: Any
) -> None:
    folder = save_model(config)
    read = assert_same(edited(folder, quantise, fields), batches, dtype)
    # They are other values than those that were quantised, and finite.
    assert not torch.equal(read[0][0], streams_whole(resident(folder, dtype), batches[0])[0])
    assert all(stream.isfinite().all() for streams in read for stream in streams)


def test_a_scale_that_is_missing_is_found_before_a_weight_is_read(save_model: Any, edited: Any) -> None:
    def damage(tensors: Tensors) -> None:
        in_mxfp4(tensors)
        del tensors["model.layers.2.mlp.experts.down_proj_scales"]

    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.experts\.down_proj of .* \(KeyError: 'down_proj_scales'\); complete its files"):
        blockwise(edited(save_model(transformers.GptOssConfig(**OSS)), damage, MXFP4))


# transformers' layers for such weights are compiled in a way that torch gives up.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_weights_that_stay_quantised_are_loaded_as_a_whole(save_model: Any, edited: Any) -> None:
    folder = edited(save_model(transformers.LlamaConfig(**LLAMA_LIKE)), config={"quantization_config": {"quant_method": "bitnet"}})
    with pytest.raises(ModelError, match=r"are quantised \(bitnet\), and are loaded as a whole .* leave out --weights stream"):
        blockwise(folder)
