"""How many padded tokens one forward pass takes, where nobody says: what measures best on a CPU, and what a card has room for."""

from typing import Any

import torch

from harvest.model.device import Placement

# SmolLM2-135M in float32 on two cores reads best at 1,024 to 4,096 tokens.
_CPU = 2048
# Not measured.
_MPS = 4096
_LEAST, _MOST = 2048, 65536
# Of a card's memory, less the weights: the rest is for what an architecture holds that this estimate does not know of.
_SHARE = 0.5
# Rows of a token that a block holds at once, of the hidden size and of the intermediate size.
_HIDDEN_ROWS, _INTERMEDIATE_ROWS = 10, 3
# Captured rows of three batches lie on the card: one is computed, one copied, one waits to be freed.
_CAPTURED = 3


def auto_batch_tokens(placement: Placement, text_config: Any, n_blocks: int, dtype_bytes: int, token_bytes: int) -> int:
    """The budget of a batch for a device, a power of two.

    On a card it follows from the card's whole memory and the model's shape, and not from what happens to be free: the batches, and with
    them the last bits of the result, must be the same tomorrow and in every process of a run. Where a card has less to give than that,
    the budget is halved under way.

    n_blocks: blocks that are loaded. dtype_bytes: of a value that is computed. token_bytes: captured for one token.
    """
    device = placement.device
    if device.type == "cpu":
        return _CPU
    if device.type == "mps":
        return _MPS
    total = torch.cuda.get_device_properties(device).total_memory
    return budget(total, text_config, n_blocks, dtype_bytes, token_bytes, placement.cards)


def budget(total_bytes: int, text_config: Any, n_blocks: int, dtype_bytes: int, token_bytes: int, n_cards: int = 1) -> int:
    """The budget of a batch for a card of so many bytes, or for several like it that share the weights."""
    hidden = int(text_config.hidden_size)
    intermediate = _number(text_config, "intermediate_size", 4 * hidden)
    experts = max(_number(text_config, name, 1) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    expert_width = _number(text_config, "moe_intermediate_size", intermediate)
    feed_forward = 3 * hidden * (intermediate if experts == 1 else experts * expert_width)
    weights = n_blocks * (4 * hidden**2 + feed_forward) + _number(text_config, "vocab_size", 0) * hidden
    per_token = dtype_bytes * (_HIDDEN_ROWS * hidden + _INTERMEDIATE_ROWS * intermediate) + _CAPTURED * token_bytes
    fitting = int(_SHARE * max(total_bytes - weights * dtype_bytes // n_cards, 0)) // per_token
    return min(max(1 << max(fitting.bit_length() - 1, 0), _LEAST), _MOST)


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    # Some configs hold a list, an entry a layer.
    value = max(value, default=None) if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) and value > 0 else default
