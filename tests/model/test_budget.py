"""The budget of a batch where nobody gives one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from harvest.model import budget
from harvest.model.budget import auto_batch_tokens, auto_window_bytes, card_costs
from harvest.model.device import Placement

GIB = 1 << 30
LLAMA_8B = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)


def test_a_cpu_takes_what_measures_best() -> None:
    assert auto_batch_tokens(Placement(torch.device("cpu")), LLAMA_8B, 32, 4, 1) == 2048


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the memory of each card of this test, in GiB."""

    def have(*sizes_gib: int) -> None:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=sizes_gib[device.index or 0] * GIB)
        )

    return have


def on_card(**spread: Any) -> Placement:
    return Placement(torch.device("cuda", 0), **spread)


@pytest.mark.parametrize("token_bytes", [3 * 8192, 32 * 8192])
def test_a_larger_card_takes_larger_batches(token_bytes: int, cards: Any) -> None:
    budgets = []
    for total in (8, 16, 24, 48, 80, 141):
        cards(total)
        budgets.append(auto_batch_tokens(on_card(), LLAMA_8B, 32, 2, token_bytes))
    assert budgets == sorted(budgets)
    assert budgets[0] == 2048
    assert budgets[-1] > budgets[2]
    assert all(value & (value - 1) == 0 for value in budgets)
    # What is captured, the weights and a block's own rows fit the card together.
    for total, value in zip((24, 48, 80, 141), budgets[2:], strict=True):
        assert 16 * GIB + value * (3 * token_bytes + 2 * (10 * 4096 + 3 * 14336)) < total * GIB


def test_experts_count(cards: Any) -> None:
    cards(80)
    plain = auto_batch_tokens(on_card(), LLAMA_8B, 32, 2, 8192)
    for fields in ({"num_local_experts": 8}, {"n_routed_experts": 256, "moe_intermediate_size": 2048}):
        config = transformers.LlamaConfig(**(LLAMA_8B.to_dict() | fields))
        assert auto_batch_tokens(on_card(), config, 32, 2, 8192) < plain


def test_the_fullest_card_bounds_the_batches_of_a_spread_model(cards: Any) -> None:
    cards(24, 24)
    alone = auto_batch_tokens(on_card(), LLAMA_8B, 32, 2, 8192)
    # An equal share of 15 GiB, and 1.25 times the embeddings on top, as accelerate fills the first card.
    shared = auto_batch_tokens(on_card(limits={0: 20 * GIB, 1: 20 * GIB}), LLAMA_8B, 32, 2, 8192)
    bounded = auto_batch_tokens(on_card(limits={0: 4 * GIB, 1: 20 * GIB}), LLAMA_8B, 32, 2, 8192)
    assert alone < shared <= budget.budget(24 * GIB - 15 * GIB // 2, LLAMA_8B, 2, 8192)
    # A limit of one card changes nothing for the other, which is the fullest then.
    assert bounded == shared
    # On the host nothing of it lies on the card.
    assert auto_batch_tokens(on_card(limits={0: 0, "cpu": 64 * GIB}), LLAMA_8B, 32, 2, 8192) > alone


def test_a_pass_costs_what_its_launches_take() -> None:
    # Twice 0.5 ms a block at 5e14 FLOP/s, by the parameters of a block: 4 * 4096**2 + 3 * 4096 * 14336.
    costs = card_costs(LLAMA_8B, 32, 2, 8192, "sdpa")
    assert costs.pass_tokens == int(2 * 0.5e-3 * 5e14 / (2 * 243_269_632))
    assert costs.minute_tokens == int(60 * 5e14 / (2 * 243_269_632 * 32))
    assert (costs.mask_above, costs.mask_length) == (None, None)
    smaller = transformers.LlamaConfig(hidden_size=576, intermediate_size=1536)
    assert card_costs(smaller, 30, 2, 8192, "sdpa").pass_tokens > 30 * costs.pass_tokens
    # Of many experts a token uses a few.
    experts = transformers.MixtralConfig(hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2)
    assert costs.pass_tokens / 2 < card_costs(experts, 32, 2, 8192, "sdpa").pass_tokens < costs.pass_tokens


@pytest.mark.parametrize(
    ("config", "attention", "above", "pair_bytes"),
    [
        (LLAMA_8B, "eager", 0, 32 * 8 + 2),
        (transformers.MistralConfig(sliding_window=4096), "sdpa", 4095, 5),
        (transformers.MistralConfig(sliding_window=4096), "flash_attention_2", None, None),
    ],
)
def test_attention_masks_count_where_they_are_made(config: Any, attention: str, above: int | None, pair_bytes: int | None) -> None:
    costs = card_costs(config, 32, 2, 8192, attention)
    per_token = 2 * (10 * 4096 + 3 * 14336) + 3 * 8192
    assert costs.mask_above == above
    assert costs.mask_length == (None if pair_bytes is None else per_token // pair_bytes)


def test_the_rows_of_two_windows_fit_an_eighth_of_a_card(cards: Any) -> None:
    assert auto_window_bytes(torch.device("cpu")) == 2 * GIB
    for total, expected in ((8, 2), (24, 2), (48, 4), (80, 8), (141, 16)):
        cards(total)
        assert auto_window_bytes(torch.device("cuda", 0)) == expected * GIB
