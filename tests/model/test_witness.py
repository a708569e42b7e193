"""What a model may do that cannot be streamed, seen while its blocks come by one at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE
from sweep import build
from tiny_configs import tiny_config

from harvest.errors import HarvestError, ModelError, StreamError
from harvest.model.blocks import LoadedDecoder, decoder_of
from harvest.model.restart import Restart
from harvest.model.witness import Comparison, Witness

IDS = np.arange(1, 25, dtype=np.int32)


class Block(torch.nn.Module):
    """A block that adds to its stream what it makes of it, and of what it is given besides."""

    def __init__(self, adds: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.adds = adds

    def forward(self, hidden_states: torch.Tensor, other: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.inner(hidden_states)
        return hidden_states + self.adds(made, other), made


def its_own(made: torch.Tensor, _other: Any) -> torch.Tensor:
    return made


def with_other(made: torch.Tensor, other: Any) -> torch.Tensor:
    return made if other is None else made + other


def only_with_other(made: torch.Tensor, other: Any) -> torch.Tensor:
    return made + other


def looks_ahead(made: torch.Tensor, _other: Any) -> torch.Tensor:
    return made + made.mean(dim=1, keepdim=True)


def minds_the_length(made: torch.Tensor, _other: Any) -> torch.Tensor:
    return made * (1 + made.shape[1] / 10)


class Decoder(torch.nn.Module):
    """Three blocks that are called as a test wants: in which order, with what handed on, with what between them."""

    def __init__(
        self,
        adds: Callable[[torch.Tensor, Any], torch.Tensor] = its_own,
        order: Sequence[int] = (0, 1, 2),
        between: Callable[[torch.Tensor], torch.Tensor] = lambda stream: stream,
        head: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, 8)
        self.layers = torch.nn.ModuleList(Block(adds) for _ in range(3))
        self.order, self.between, self.head = order, between, head or torch.nn.Identity()

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        stream, other = self.embed(input_ids), torch.zeros(()) if self.layers[0].adds is only_with_other else None
        for block in self.order:
            stream, other = self.layers[block](self.between(stream), other)
        answer: torch.Tensor = self.head(stream)
        return answer


def see_all(module: torch.nn.Module, n_blocks: int = 3, blocks: Sequence[torch.nn.Module] | None = None) -> None:
    """Let a witness see the first blocks of a module."""
    loaded = LoadedDecoder(module, list(blocks or module.layers)[:n_blocks])  # type: ignore[arg-type]
    with Restart(loaded) as restart:
        witness = Witness(loaded, restart, IDS)
        for block in range(n_blocks):
            witness.see(block)


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_a_decoder_that_hands_on_its_stream_alone_is_let_by(n_blocks: int) -> None:
    see_all(Decoder(), n_blocks)


@pytest.mark.parametrize(
    ("decoder", "error", "message"),
    [
        (
            Decoder(with_other),
            ModelError,
            "block 1 of Decoder gives other numbers when it is given its stream alone, .* leave out --weights",
        ),
        (Decoder(only_with_other), ModelError, r"block 1 of Decoder fails \(TypeError: .*\) when it is given its stream alone, so blocks"),
        (Decoder(looks_ahead), ModelError, r"the stream of Decoder changes by \S+ of its norm when the tokens to its right are others"),
        (Decoder(minds_the_length), ModelError, r"changes by \S+ of its norm when more tokens stand to its right, whatever they are"),
        (Decoder(between=lambda stream: 2 * stream), ModelError, "decoder block 1 of Decoder does not take in what block 0 hands out"),
        (Decoder(between=lambda stream: stream[None]), ModelError, r"block 0 of Decoder hands out \[1, 1, 24, 8\], where one stream"),
        (Decoder(between=lambda stream: stream.undefined), ModelError, r"Decoder cannot be run on token ids alone \(AttributeError"),
        (
            Decoder(order=(1, 0, 2)),
            StreamError,
            "decoder block 1 was called out of turn; this model does not run each block once, in order",
        ),
        (Decoder(order=(0, 0, 1, 2)), StreamError, "decoder block 0 was called out of turn"),
        (Decoder(order=(0, 2, 1)), StreamError, "decoder block 2 was called out of turn"),
        (Decoder(order=(0, 1)), StreamError, "the forward pass ended before decoder block 2"),
        # What comes after the last block shows too, as it does where a model is loaded whole.
        (Decoder(order=(0, 1, 2, 0, 1, 2)), StreamError, "decoder block 0 was called out of turn"),
        (Decoder(order=(0, 1, 2, 2)), StreamError, "decoder block 2 was called out of turn"),
    ],
)
def test_what_cannot_be_streamed_is_refused(decoder: Decoder, error: type[HarvestError], message: str) -> None:
    with pytest.raises(error, match=message):
        see_all(decoder)


def test_blocks_that_are_run_again_show_where_only_the_first_are_read() -> None:
    see_all(Decoder(order=(0, 1, 2)), 2)
    with pytest.raises(StreamError, match="decoder block 0 was called out of turn"):
        see_all(Decoder(order=(0, 1, 2, 0, 1, 2)), 2)


def test_what_follows_the_last_block_need_not_run_on_what_stands_in_for_the_others() -> None:
    see_all(Decoder(head=torch.nn.Linear(5, 5)), 2)


def test_the_blocks_run_as_before_when_all_is_seen() -> None:
    decoder = Decoder()
    ids = torch.from_numpy(IDS.astype(np.int64))[None]
    before = decoder(input_ids=ids, use_cache=False)
    see_all(decoder, 2)
    assert torch.equal(decoder(input_ids=ids, use_cache=False), before)
    with pytest.raises(StreamError):
        see_all(Decoder(order=(0, 1, 0)), 2)
    assert not any("forward" in vars(block) for block in decoder.layers)


def test_real_models_whose_blocks_hand_on_more_than_a_stream() -> None:
    torch.manual_seed(0)
    # The state of a router goes on beside the stream; and some blocks take keys and values of one before.
    sizes = {**LLAMA_LIKE, "head_dim": 8, "global_head_dim": 8, "sliding_window": 8, "num_kv_shared_layers": 2}
    own = {"vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    for config, message in (
        (tiny_config(transformers.ZayaConfig), "decoder block 1 of ZayaModel gives other numbers"),
        (transformers.Gemma4TextConfig(**sizes | own), r"block 2 of Gemma4TextModel fails \(KeyError: 'sliding_attention'\) .* leave out"),
    ):
        loaded = decoder_of(build(config), 4)
        with pytest.raises(ModelError, match=message):
            see_all(loaded.module, 4, loaded.blocks)


def test_a_stream_that_is_not_finite_is_no_reason_to_refuse() -> None:
    decoder = Decoder()
    with torch.no_grad():
        decoder.layers[1].inner.weight.fill_(torch.inf)
    see_all(decoder)


def compare(decoder: Decoder, layers: Sequence[int]) -> Comparison:
    loaded = LoadedDecoder(decoder, list(decoder.layers))
    with Restart(loaded) as restart, torch.inference_mode():
        comparison = Comparison(restart, [IDS[:20], IDS[3:8]], torch.float32, 1e-5, loaded.device)
        for block in range(3):
            comparison.see(block, block in layers)
    return comparison


def test_prompts_in_a_batch_are_held_against_each_alone() -> None:
    assert compare(Decoder(), [0, 1, 2]).worst <= 1e-6
    with pytest.raises(StreamError, match=r"layer 1 of the prompt of 5 tokens is \d\.\d+ of its norm away"):
        compare(Decoder(minds_the_length), [1, 2])
    # Of layers that nobody asked for nothing is said.
    assert compare(Decoder(minds_the_length), []).worst == 0
