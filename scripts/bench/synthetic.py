"""Streams that look like a model's, without one: for what happens to them after the model.

Shapes: L layers, T tokens, W values a token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.output.layout import ShardLayout

_SEED = 20261201
_MEDIAN_TOKENS = 60
_MAX_TOKENS = 2000
# A few dimensions of a trained model's stream are far larger than the rest, at every token.
_LARGE_DIMENSIONS = 4
_LARGE = 60.0
# How far a block moves the stream, against its size at the start.
_STEP = 0.3


@dataclass(frozen=True)
class Case:
    """What is captured of llama-8b: so many layers of so many values a token."""

    name: str
    layers: tuple[int, ...]
    width: int
    contents: str
    store_dtype: str

    def layout(self, codec: str) -> ShardLayout:
        """The layout of its shards."""
        contents: Any = self.contents
        store_dtype: Any = self.store_dtype
        return ShardLayout(contents, self.layers, self.width, store_dtype, codec, {"model": "synthetic"})


def cases(hidden: int, n_layers: int) -> list[Case]:
    """Quartile layers and all layers of the stream in bfloat16, and 64 projections of all layers in float32."""
    every = tuple(range(n_layers))
    quartiles = tuple(sorted({n_layers // 4, n_layers // 2, 3 * n_layers // 4}))
    return [
        Case("quartile layers", quartiles, hidden, "activations", "bfloat16"),
        Case("all layers", every, hidden, "activations", "bfloat16"),
        Case("64 projections", every, min(64, hidden), "projections", "float32"),
    ]


def prompt_lengths(n_tokens: int) -> npt.NDArray[np.int64]:
    """Log-normal lengths, a median of 60 tokens, at most 2,000, that add up to so many tokens."""
    draw = np.random.default_rng(_SEED)
    drawn = draw.lognormal(np.log(_MEDIAN_TOKENS), 1.0, n_tokens).clip(1, _MAX_TOKENS).astype(np.int64)
    ends = np.cumsum(drawn)
    count = int(np.searchsorted(ends, n_tokens)) + 1
    lengths = drawn[:count]
    lengths[-1] -= ends[count - 1] - n_tokens
    return lengths


def streams(case: Case, n_tokens: int) -> npt.NDArray[Any]:
    """Rows [L, T, W] as a window's buffer holds them: a random walk over the layers, with a few large dimensions."""
    draw = torch.Generator().manual_seed(_SEED)
    large_W = torch.ones(case.width)
    large_W[torch.randperm(case.width, generator=draw)[:_LARGE_DIMENSIONS]] = _LARGE
    stream_TW = torch.randn(n_tokens, case.width, generator=draw)
    dtype = getattr(torch, case.store_dtype)
    rows_LTW = torch.empty(len(case.layers), n_tokens, case.width, dtype=dtype)
    for position in range(len(case.layers)):
        stream_TW += _STEP * torch.randn(n_tokens, case.width, generator=draw)
        rows_LTW[position] = stream_TW * large_W
    return np.asarray((rows_LTW.view(torch.uint16) if dtype == torch.bfloat16 else rows_LTW).numpy())
