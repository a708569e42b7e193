"""The budget of a batch where nobody gives one."""

from typing import Any

import pytest
import torch
import transformers

from harvest.model import budget
from harvest.model.budget import auto_batch_tokens
from harvest.model.device import Placement

GIB = 1 << 30
LLAMA_8B = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)


def test_a_cpu_takes_what_measures_best() -> None:
    assert auto_batch_tokens(Placement(torch.device("cpu")), LLAMA_8B, 32, 4, 1) == 2048


@pytest.mark.parametrize("token_bytes", [3 * 8192, 32 * 8192])
def test_a_larger_card_takes_larger_batches(token_bytes: int) -> None:
    budgets = [budget.budget(total * GIB, LLAMA_8B, 32, 2, token_bytes) for total in (8, 16, 24, 48, 80, 141)]
    assert budgets == sorted(budgets)
    assert budgets[0] == 2048
    assert budgets[-1] > budgets[2]
    assert all(value & (value - 1) == 0 for value in budgets)
    # What is captured, the weights and a block's own rows fit the card together.
    for total, value in zip((24, 48, 80, 141), budgets[2:], strict=True):
        assert 16 * GIB + value * (3 * token_bytes + 2 * (10 * 4096 + 3 * 14336)) < total * GIB


def test_the_memory_of_the_card_counts_and_not_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 24 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Card)
    assert auto_batch_tokens(Placement(torch.device("cuda", 1)), LLAMA_8B, 24, 2, 3 * 8192) == budget.budget(
        24 * GIB, LLAMA_8B, 24, 2, 3 * 8192
    )


@pytest.mark.parametrize("fields", [{"num_local_experts": 8}, {"n_routed_experts": 256, "moe_intermediate_size": 2048}])
def test_experts_count(fields: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**(LLAMA_8B.to_dict() | fields))
    assert budget.budget(80 * GIB, config, 32, 2, 8192) < budget.budget(80 * GIB, LLAMA_8B, 32, 2, 8192)
