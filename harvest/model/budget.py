"""How large batches and windows are by default, and what passes cost on a card."""

from dataclasses import dataclass
from typing import Any

import torch

from harvest.input.plan import CardCosts
from harvest.model.describe import Description
from harvest.model.device import Placement, card_bytes
from harvest.model.load import class_and_config

# SmolLM2-135M in float32 on two cores reads best at 1,024 to 4,096 tokens.
_CPU = 2048
# Not measured.
_MPS = 4096
_LEAST, _MOST = 2048, 65536
# The share of a card's memory, less its weights. The rest is for what an architecture holds that this estimate does not know of.
_SHARE = 0.5
# Rows of a token that a block holds at once, of the hidden size and of the intermediate size.
_HIDDEN_ROWS, _INTERMEDIATE_ROWS = 10, 3
# Captured rows of three batches lie on the card: one is computed, one is copied, one waits to be freed.
_CAPTURED = 3
# One block's kernels take about 0.5 ms to launch (15 ms for 30 blocks, measured on the host alone).
_LAUNCH_S = 0.5e-3
# The thread that launches them shares the interpreter with those that write shards, so a pass should compute longer than that.
_LAUNCH_MARGIN = 2
# FLOP/s of a large card by the bytes of a value: bfloat16 on tensor cores, float32 without. One figure for all cards, so that the batches
# of a run do not depend on the card. A smaller card hides launches better than this says, and has a little more padding than it needs.
_FLOP_S = {2: 5e14, 4: 5e13}
# Host memory for captured rows. On a card that is the least.
_WINDOW_BYTES, _MOST_WINDOW_BYTES = 2 << 30, 16 << 30
# What a config may call the number of keys that a token's attention is limited to, if it is limited in some blocks.
_LOCAL = ("sliding_window", "attention_chunk_size")


def auto_batch_tokens(placement: Placement, text_config: Any, n_blocks: int, dtype_bytes: int, token_bytes: int) -> int:
    """Return the default batch budget of a device, in padded tokens: a power of two.

    On a card it follows from the card's whole memory and the model's shape, not from what happens to be free: the batches, and with them
    the last bits of the result, must be the same tomorrow and in every process of a run. If a card has less to give, the budget is halved
    during the run.

    n_blocks: blocks that are loaded. dtype_bytes: of a computed value. token_bytes: captured for one token.
    """
    device = placement.device
    if device.type != "cuda":
        return _CPU if device.type == "cpu" else _MPS
    weights = _weights_on_cards(placement, _Shape.of(text_config), n_blocks, dtype_bytes)
    return budget(min(card_bytes(card) - n_bytes for card, n_bytes in weights.items()), text_config, dtype_bytes, token_bytes)


def auto_window_bytes(device: torch.device) -> int:
    """Return the default host memory for captured rows, in bytes: a power of two.

    Of a card the larger the better, since prompts of like length find each other in a large window. It is at most an eighth of the card's
    memory, so that the rows of two windows can be put together there.
    """
    if device.type != "cuda":
        return _WINDOW_BYTES
    share = card_bytes(device) // 8
    return min(max(1 << max(share.bit_length() - 1, 0), _WINDOW_BYTES), _MOST_WINDOW_BYTES)


def card_costs(text_config: Any, n_blocks: int, dtype_bytes: int, token_bytes: int, attention: str) -> CardCosts:
    """Return what passes cost on a card, by the model's shape alone. attention: see `attention_kind`. For the rest see above."""
    shape, flop_s = _Shape.of(text_config), _FLOP_S.get(dtype_bytes, _FLOP_S[4])
    pair_bytes, mask_above = _mask(text_config, dtype_bytes, attention)
    return CardCosts(
        # Both grow with the number of blocks alike, so one block's figures do.
        pass_tokens=int(_LAUNCH_MARGIN * _LAUNCH_S * flop_s / (2 * shape.active)),
        minute_tokens=max(int(60 * flop_s / (2 * shape.active * n_blocks)), 1),
        mask_above=mask_above,
        mask_length=max(_per_token(shape, dtype_bytes, token_bytes) // pair_bytes, 1) if pair_bytes else None,
    )


def budget(room_bytes: int, text_config: Any, dtype_bytes: int, token_bytes: int) -> int:
    """Return the batch budget, a power of two, for a card with `room_bytes` of memory left by the weights."""
    fitting = int(_SHARE * max(room_bytes, 0)) // _per_token(_Shape.of(text_config), dtype_bytes, token_bytes)
    return min(max(1 << max(fitting.bit_length() - 1, 0), _LEAST), _MOST)


def attention_kind(description: Description, asked: str) -> str:
    """Return the kind of attention that a model is run with: the requested one, or transformers' choice for its class."""
    if asked != "auto":
        return asked
    try:
        decoder_class, _ = class_and_config(description)
    except Exception:
        # A model whose code does not load says so when it is loaded.
        return "sdpa"
    return "sdpa" if getattr(decoder_class, "_supports_sdpa", True) else "eager"


@dataclass(frozen=True)
class _Shape:
    """Sizes of a decoder. `block` and `embeddings` count parameters, `active` those of a block that one token uses."""

    hidden: int
    intermediate: int
    block: int
    active: int
    embeddings: int

    def n_bytes(self, n_blocks: int, dtype_bytes: int) -> int:
        """Return the bytes of `n_blocks` blocks and the embeddings."""
        return (n_blocks * self.block + self.embeddings) * dtype_bytes

    @classmethod
    def of(cls, config: Any) -> "_Shape":
        hidden = int(config.hidden_size)
        intermediate = _number(config, "intermediate_size", 4 * hidden)
        experts = max(_number(config, name, 1) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
        width = _number(config, "moe_intermediate_size", intermediate)
        attention = 4 * hidden**2
        block = attention + 3 * hidden * (intermediate if experts == 1 else experts * width)
        active = attention + 3 * hidden * (intermediate if experts == 1 else _number(config, "num_experts_per_tok", 1) * width)
        return cls(hidden, intermediate, block, active, _number(config, "vocab_size", 0) * hidden)


def _weights_on_cards(placement: Placement, shape: _Shape, n_blocks: int, dtype_bytes: int) -> dict[torch.device, int]:
    """Return how many bytes of weights each card holds at most.

    Of a spread model accelerate fills the first card up to an equal share and a buffer of 1.25 times the largest piece, then the next
    (transformers.integrations.accelerate.get_balanced_memory).
    """
    weights = shape.n_bytes(n_blocks, dtype_bytes)
    limits = {name: size for name, size in (placement.limits or {}).items() if isinstance(name, int) and size > 0}
    if not limits:
        return {placement.device: 0 if placement.limits else weights}
    share = weights // len(limits) + int(1.25 * max(shape.block, shape.embeddings)) * dtype_bytes
    return {torch.device("cuda", card): min(limit, share, weights) for card, limit in limits.items()}


def _per_token(shape: _Shape, dtype_bytes: int, token_bytes: int) -> int:
    return dtype_bytes * (_HIDDEN_ROWS * shape.hidden + _INTERMEDIATE_ROWS * shape.intermediate) + _CAPTURED * token_bytes


def _mask(config: Any, dtype_bytes: int, attention: str) -> tuple[int, int | None]:
    """Return the bytes that attention holds for each pair of tokens of a prompt, and the length above which it does; 0 and None if never.

    Eager attention holds scores of each head, in float32 too for the softmax, and a mask. torch's fused attention needs no mask for plain
    causal attention, and for a sliding window a mask of truth values, which it makes numbers of twice.
    """
    if attention == "eager":
        return _number(config, "num_attention_heads", 1) * (2 * dtype_bytes + 4) + dtype_bytes, 0
    local = [size for name in _LOCAL if (size := _number(config, name, 0))]
    return (1 + 2 * dtype_bytes, min(local) - 1) if attention == "sdpa" and local else (0, None)


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    # Some configs hold a list, an entry a layer.
    value = max(value, default=None) if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) and value > 0 else default
