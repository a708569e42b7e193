"""Models that would give wrong numbers are refused before anything is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL, TEXTS

import harvest
from harvest.errors import ModelError
from harvest.model.blocks import LoadedDecoder, find_blocks
from harvest.model.describe import find_chosen_keys
from harvest.model.soundness import check_stream, tried_tokens

IDS = np.array([256, 1, 2, 3, 4, 5], dtype=np.int32)


def loaded(module: torch.nn.Module, n_blocks: int = 3) -> LoadedDecoder:
    return LoadedDecoder(module, find_blocks(module, n_blocks))


class Decoder(torch.nn.Module):
    """A decoder whose blocks are called in a given order, each on the stream of the one before or on another."""

    def __init__(self, order: list[int], chained: bool = True, looks_ahead: str = "") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(257, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.order, self.chained, self.looks_ahead = order, chained, looks_ahead

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        stream = self.embed(input_ids)
        if self.looks_ahead == "at the length":
            stream = stream * (1 + 0.5 * (input_ids.shape[1] > 4))
        for block in self.order:
            stream = self.layers[block](stream if self.chained else stream + 1)
            if self.looks_ahead == "at all":
                stream += stream.mean(dim=1, keepdim=True)
            if self.looks_ahead == "by one":
                stream += 0.1 * stream.roll(-1, dims=1)
        return stream


def test_a_decoder_passes() -> None:
    check_stream(loaded(Decoder([0, 1, 2])), IDS)
    check_stream(loaded(Decoder([0, 1, 2])), IDS[:1])


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (Decoder([0, 1, 2, 0, 1, 2]), "calls its 3 decoder blocks as 0, 1, 2, 0, 1, 2; harvest needs each once, in order"),
        (Decoder([0, 2, 1]), "as 0, 2, 1;"),
        (Decoder([0, 1]), "as 0, 1;"),
        (Decoder([]), "as none at all;"),
        (Decoder([0, 1, 2], chained=False), "decoder block 1 of Decoder does not take in what block 0 hands out"),
        (Decoder([0, 1, 2], looks_ahead="at all"), r"changes by .* of its norm .* so it is not causal without a mask"),
        (Decoder([0, 1, 2], looks_ahead="by one"), "so it is not causal without a mask"),
        (Decoder([0, 1, 2], looks_ahead="by one").bfloat16(), "so it is not causal without a mask"),
    ],
)
def test_what_would_give_wrong_numbers_is_refused(decoder: Any, message: str) -> None:
    for ids in (IDS, IDS[:2], IDS[:3], np.repeat(IDS[1:2], 6), np.concatenate([IDS, IDS[::-1]])):
        with pytest.raises(ModelError, match=message):
            check_stream(loaded(decoder), ids)


def test_no_hook_is_left() -> None:
    decoder = Decoder([0, 1, 2])
    check_stream(loaded(decoder), IDS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_short_look_ahead_is_refused_in_either_type(compute: Any, save_model: Any, tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**LLAMA_LIKE, head_dim=8, sliding_window=4, use_bidirectional_attention=True)
    request = harvest.HarvestRequest(model=str(save_model(config)), prompts=TEXTS, layers="all")
    with pytest.raises(ModelError, match="is not causal without a mask"):
        harvest.run(request, tmp_path / "run", harvest.Engine(compute_dtype=compute))


def test_an_encoder_that_loads_as_a_language_model_is_refused_and_nothing_is_written(save_model: Any, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        **{**SMALL, "pad_token_id": 0}, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64
    )
    request = harvest.HarvestRequest(model=str(save_model(config)), prompts=TEXTS, layers="all")
    with pytest.raises(ModelError, match="is not causal without a mask"):
        harvest.run(request, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "job.json").read_text())["status"] == "failed"
    assert not list((tmp_path / "run" / "shards").iterdir())


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_stream_that_hangs_on_the_length_of_a_batch_is_refused(compute: torch.dtype) -> None:
    decoder = loaded(Decoder([0, 1, 2], looks_ahead="at the length").to(compute))
    with pytest.raises(ModelError, match=r"changes by 0\.\d+ of its norm when more tokens stand to its right, whatever they are"):
        check_stream(decoder, IDS)
    # Prompts on both sides of a known switch never share a batch.
    check_stream(decoder, IDS, length_switches=[4])
    # Too short to see.
    check_stream(decoder, IDS, max_tokens=4)


def test_more_tokens_are_tried_where_a_model_chooses_its_keys() -> None:
    assert tried_tokens(find_chosen_keys(transformers.LlamaConfig(**LLAMA_LIKE))) == 64
    assert tried_tokens(find_chosen_keys(transformers.DogeConfig(keep_window_size=2048))) == 4096
