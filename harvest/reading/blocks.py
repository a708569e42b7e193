"""The rows of a shard in blocks that fit in memory, each stored chunk decoded once.

Shapes: L layers asked for, T tokens, W values a token.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from harvest.output.layout import ShardLayout
from harvest.reading.shard import Shard

# As few as torch works on without calling its other threads, which would cost more than they do.
_PIECE_VALUES = 1 << 15


def read_blocks(
    shard: Shard, positions: Sequence[int], is_wanted: Callable[[int], bool] = lambda _: True
) -> Iterator[tuple[int, torch.Tensor]]:
    """The first token and the rows, [L, T, W] in the stored type, of one block of tokens after the other.

    positions: on the shard's layer axis. A block has at most one chunk of each layer, 128 MiB of up to 128 layers.
    is_wanted: asked with the first token of each block; one that is not wanted is not read.
    """
    step = chunk_tokens(shard.layers, shard.width, shard.dtype, shard.n_tokens)
    for start in filter(is_wanted, range(0, shard.n_tokens, step)):
        stop = min(start + step, shard.n_tokens)
        yield start, torch.stack([shard.layer(position, start, stop) for position in positions])


def widened(rows_TW: torch.Tensor) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """The first row and the rows in float64, exactly, of pieces that stay in a core's cache while they are worked on."""
    step = max(1, _PIECE_VALUES // rows_TW.shape[1])
    for start in range(0, len(rows_TW), step):
        yield start, rows_TW[start : start + step].double().numpy()


def chunk_tokens(layers: Sequence[int], width: int, dtype: torch.dtype, n_tokens: int) -> int:
    """Tokens of a chunk, in a shard of so many tokens. A safetensors file has no chunks, and is read in blocks of the same size."""
    store_dtype = str(dtype).removeprefix("torch.")
    # The array's name and the codec have no say in it.
    layout = ShardLayout("activations", tuple(layers), width, store_dtype, "none", {})  # type: ignore[arg-type]
    return layout.chunk_tokens(n_tokens)
