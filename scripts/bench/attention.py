"""Attention alone: torch's causal attention without a mask, at a model's heads, forced to each of its backends in turn."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from ceilings import best_s
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# Tokens of a row, tokens in all, and the backends that a device may have.
_ON_CARD = ((512, 2048, 8192), 16384, ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"))
_ON_CPU = ((64, 256), 512, ("FLASH_ATTENTION", "MATH"))
# One call is too short for the clock.
_REPEATS = 10


def measure_attention(config: Any, device: torch.device, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """Return the FLOP/s of each backend at each length, or the reason why it is not available. MATH: at the smallest length only.

    seconds: of each measurement.
    """
    lengths, n_tokens, backends = _ON_CARD if device.type == "cuda" else _ON_CPU
    head_size = config.hidden_size // config.num_attention_heads
    measured = []
    for length in lengths:
        rows = max(1, n_tokens // length)
        query, key, value = (
            torch.randn(rows, heads, length, head_size, dtype=dtype, device=device)
            for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        )
        # Two products of 2 FLOP for each pair of tokens, of which a causal mask leaves half.
        flop = 2.0 * rows * config.num_attention_heads * length**2 * head_size
        for backend in backends:
            if backend != "MATH" or length == lengths[0]:
                found = _measure_one(backend, query, key, value, flop, seconds)
                measured.append({"length": length, "rows": rows, "backend": backend, **found})
    return measured


def _measure_one(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, flop: float, seconds: float) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as warned, torch.inference_mode():
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                attend_s = best_s(
                    lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
                    query.device,
                    seconds,
                    _REPEATS,
                )
        except (RuntimeError, AttributeError) as error:
            return {"reason": _reason(error, [str(warning.message) for warning in warned])}
    return {"flop_s": flop / attend_s}


def _reason(error: Exception, warned: Sequence[str]) -> str:
    """Return one line on why a backend does not run: torch warns of the reason before its error, and of the backends that are off."""
    said = [text.split(" (Triggered")[0].strip() for text in warned]
    own = [text for text in said if not text.endswith("because:") and "runtime disabled" not in text]
    return [*own, str(error) or type(error).__name__][0].splitlines()[0]
