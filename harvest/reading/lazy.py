"""A whole run as one xarray dataset over all shards, of which nothing is read before it is asked for.

Shapes: L layers, T tokens, W values a token, of those that a selection asks for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

from harvest.contract import RESIDUAL_STREAM_CONVENTION, Manifest
from harvest.reading.axis import Ints, TokenAxis
from harvest.reading.shard import Shard


class Source(Protocol):
    """What is asked of a run."""

    manifest: Manifest

    @property
    def layers(self) -> list[int]:
        """Its decoder blocks."""

    @property
    def width(self) -> int:
        """Values a token."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored values."""

    @property
    def axis(self) -> TokenAxis:
        """Its token axis."""

    def shard(self, index: int) -> Shard:
        """Open a shard."""


def lazy_dataset(run: Source) -> xarray.Dataset:
    """The run as `Run.xarray` describes it."""
    axis, manifest = run.axis, run.manifest
    value = {"activations": "hidden", "projections": "direction"}[manifest.contents]
    shape = (len(run.layers), axis.n_tokens, run.width)
    rows = _Lazy(shape, _numpy_dtype(run), partial(_read_rows, run))
    offsets = {"long_name": "prompt i is tokens prompt_offsets[i] to prompt_offsets[i + 1]"}
    return xarray.Dataset(
        {
            manifest.contents: (("layer", "token", value), indexing.LazilyIndexedArray(rows)),
            "prompt_offsets": ("prompt_edge", axis.prompt_offsets, offsets),
        },
        {
            "layer": ("layer", np.array(run.layers), {"long_name": "decoder block, counted from 0"}),
            "prompt": _along_tokens(axis, np.int64, partial(_place, axis, 0), "number of the prompt in the run"),
            "position": _along_tokens(axis, np.int64, partial(_place, axis, 1), "place of the token in its prompt"),
            "token_id": _along_tokens(axis, np.int32, partial(_read_ids, run), "the id that the model read"),
        },
        {"model": manifest.model_id, "run_id": str(manifest.run_id), "residual_stream_convention": RESIDUAL_STREAM_CONVENTION},
    )


class _Lazy(BackendArray):
    """An array that is made when it is indexed. read: from an array of indices for each axis to the values there."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, read: Callable[..., npt.NDArray[Any]]) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._read = read

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._get)

    def _get(self, key: tuple[Any, ...]) -> npt.NDArray[Any]:
        """The values at an index, a slice, or an array of indices for each axis; an index takes its axis away."""
        indices = [np.arange(size)[part] for part, size in zip(key, self.shape, strict=True)]
        values = self._read(*map(np.atleast_1d, indices))
        return values.reshape([len(part) for part in indices if part.ndim])


def _along_tokens(
    axis: TokenAxis, dtype: npt.DTypeLike, read: Callable[[Ints], npt.NDArray[Any]], long_name: str
) -> tuple[str, Any, dict[str, str]]:
    """A coordinate of the token axis."""
    return "token", indexing.LazilyIndexedArray(_Lazy((axis.n_tokens,), dtype, read)), {"long_name": long_name}


def _numpy_dtype(run: Source) -> np.dtype[Any]:
    """The type of the values; numpy has no bfloat16, and a float32 holds each of its values exactly."""
    return np.dtype(np.float16 if run.dtype == torch.float16 else np.float32)


def _read_rows(run: Source, positions_L: Ints, tokens_T: Ints, values_W: Ints) -> npt.NDArray[Any]:
    """Read rows, a chunk at a time, and of those only the ones that hold an asked token of an asked layer."""
    rows_LTW = np.empty((len(positions_L), len(tokens_T), len(values_W)), dtype=_numpy_dtype(run))
    columns = slice(None) if np.array_equal(values_W, np.arange(run.width)) else values_W
    for index, places in _groups(run.axis.shard_offsets, tokens_T):
        with run.shard(index) as shard:
            of_shard = tokens_T[places] - run.axis.shard_offsets[index]
            for _, in_chunk in _groups(run.axis.chunks_of(index), of_shard):
                wanted = of_shard[in_chunk]
                first, end = int(wanted.min()), int(wanted.max()) + 1
                for row, position in enumerate(positions_L.tolist()):
                    block_TW = shard.layer(position, first, end)
                    block_TW = block_TW.float() if run.dtype == torch.bfloat16 else block_TW
                    rows_LTW[row, places[in_chunk]] = block_TW.numpy()[wanted - first][:, columns]
    return rows_LTW


def _place(axis: TokenAxis, which: int, tokens_T: Ints) -> Ints:
    """The prompts of tokens (0), or their positions (1)."""
    return axis.places(tokens_T)[which]


def _read_ids(run: Source, tokens_T: Ints) -> npt.NDArray[np.int32]:
    ids_T = np.empty(len(tokens_T), dtype=np.int32)
    for index, places in _groups(run.axis.shard_offsets, tokens_T):
        with run.shard(index) as shard:
            of_shard = torch.cat([shard[f"tokens_{prompt}"] for prompt in shard.prompts]).numpy()
        ids_T[places] = of_shard[tokens_T[places] - run.axis.shard_offsets[index]]
    return ids_T


def _groups(offsets: Ints, tokens_T: Ints) -> Iterator[tuple[int, Ints]]:
    """Tokens by the piece that they lie in, pieces beginning at `offsets`: each piece that has some, and their places in `tokens_T`."""
    pieces_T = np.searchsorted(offsets, tokens_T, side="right") - 1
    order_T = np.argsort(pieces_T, kind="stable")
    pieces, starts = np.unique(pieces_T[order_T], return_index=True)
    # No tokens at all still split into one part, which then has no piece.
    return zip(pieces.tolist(), np.split(order_T, starts[1:]), strict=False)
