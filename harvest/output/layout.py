"""What stands in a shard: its arrays, their chunks, and the Zarr documents that describe them.

Shapes: L layers, T tokens of the shard, W values a token (the hidden size, or the number of directions), P prompts of the shard.
"""

import copy
import functools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import MemoryStore

from harvest.contract import RESIDUAL_STREAM_CONVENTION, Contents
from harvest.output.codecs import CODECS
from harvest.settings import Dtype

FORMAT = "harvest-shard"
FORMAT_VERSION = 2

# One layer of all tokens is the read of sparse-autoencoder training, so a chunk holds one layer only, and at most this much of it:
# 4 MiB, or down to 1 MiB where many layers are kept, since a shard that is written in pieces holds an unfinished chunk of each.
MAX_CHUNK_BYTES = 4 << 20
_MIN_CHUNK_BYTES = 1 << 20
_UNFINISHED_BYTES = 128 << 20

# numpy has no bfloat16, and a Zarr extension type for it makes xarray refuse the whole group: its bits are stored as uint16.
STORED_AS = {"bfloat16": "uint16", "float16": "float16", "float32": "float32"}

_DOCUMENT = "zarr.json"
# The name of a token's values as a dimension, by what the rows are.
_VALUES: dict[Contents, str] = {"activations": "hidden", "projections": "direction"}


@dataclass(frozen=True)
class ArraySpec:
    """A small array of a shard, stored in one plain chunk. The dimension "value" is called by what the rows are."""

    name: str
    dtype: str
    dimensions: tuple[str, ...]
    description: str


_SMALL_ARRAYS = {
    spec.name: spec
    for spec in (
        ArraySpec("token_ids", "int32", ("token",), "the ids that the model read, prompts end to end"),
        ArraySpec(
            "prompt_offsets", "int64", ("prompt_edge",), "prompt j of this shard is tokens prompt_offsets[j] to prompt_offsets[j + 1]"
        ),
        ArraySpec("prompt_indices", "int64", ("prompt",), "the number of each prompt in the whole run"),
        ArraySpec("layer_indices", "int32", ("layer",), "the decoder block of each entry of the layer axis"),
        ArraySpec("token_sum", "float64", ("layer", "value"), "sum over tokens, the first of each prompt left out"),
        ArraySpec("token_sum_sq", "float64", ("layer", "value"), "sum of squares over tokens, the first of each prompt left out"),
        ArraySpec("token_norm_sum", "float64", ("layer",), "sum of the tokens' L2 norms, the first token of each prompt left out"),
        ArraySpec(
            "token_count",
            "float64",
            ("layer",),
            "how many tokens these sums add up: all but the first of each prompt, and those with a value that is not finite",
        ),
    )
}


@dataclass(frozen=True)
class ShardLayout:
    """The layout that all shards of a run share.

    contents: activations, the stream itself, or projections onto directions; also the name of the array that holds them.
    store_dtype: bfloat16, float16 or float32.
    about: what a shard says of its origin; the same for every shard, and free of times, so that equal runs make equal bytes.
    """

    contents: Contents
    layers: tuple[int, ...]
    width: int
    store_dtype: Dtype
    codec: str
    about: Mapping[str, Any]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of the rows as numpy holds them: uint16 for bfloat16."""
        return np.dtype(STORED_AS[self.store_dtype])

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, before the codec."""
        return len(self.layers) * self.width * self.numpy_dtype.itemsize

    def chunk_tokens(self, n_tokens: int) -> int:
        """Tokens in one chunk of a shard with so many: chunks are as even as they can be, so that the last wastes next to nothing."""
        chunk_bytes = min(MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, _UNFINISHED_BYTES // len(self.layers)))
        most = max(1, chunk_bytes // (self.width * self.numpy_dtype.itemsize))
        n_chunks = -(-n_tokens // most)
        return -(-n_tokens // n_chunks)

    def row_key(self, position: int, chunk: int) -> str:
        """The entry of one chunk of rows: the position on the layer axis, and the chunk's number on the token axis."""
        return f"{self.contents}/c/{position}/{chunk}/0"

    def small_key(self, name: str) -> str:
        """The entry of a small array: its one chunk."""
        return f"{name}/c/" + "/".join("0" for _ in _SMALL_ARRAYS[name].dimensions)

    def small_entry(self, name: str, values: npt.NDArray[Any]) -> tuple[str, bytes]:
        """The key and the bytes, little-endian, of a small array."""
        stored = np.dtype(_SMALL_ARRAYS[name].dtype).newbyteorder("<")
        return self.small_key(name), np.ascontiguousarray(values, dtype=stored).tobytes()

    def documents(self, n_tokens: int, n_prompts: int) -> dict[str, bytes]:
        """The zarr.json documents of one shard by their key: the group's, with all metadata consolidated, and each array's."""
        sizes = {
            "layer": len(self.layers),
            "token": n_tokens,
            _VALUES[self.contents]: self.width,
            "prompt": n_prompts,
            "prompt_edge": n_prompts + 1,
        }
        root = copy.deepcopy(self._template)
        arrays = root["consolidated_metadata"]["metadata"]
        for name, document in arrays.items():
            shape = [sizes[dimension] for dimension in document["dimension_names"]]
            document["shape"] = shape
            chunks = [1, self.chunk_tokens(n_tokens), self.width] if name == self.contents else shape
            document["chunk_grid"]["configuration"]["chunk_shape"] = chunks
        by_key = {_DOCUMENT: root} | {f"{name}/{_DOCUMENT}": document for name, document in arrays.items()}
        return {key: json.dumps(document, separators=(",", ":")).encode() for key, document in by_key.items()}

    @functools.cached_property
    def _template(self) -> dict[str, Any]:
        """The group's document as zarr itself writes it, for a shard of one token: only shapes differ from shard to shard."""
        compressor = CODECS[self.codec].zarr_codec(self.numpy_dtype.itemsize)
        written: dict[str, Any] = {}
        store = MemoryStore(written)
        group = zarr.create_group(store, attributes=self._attributes())
        group.create_array(
            self.contents,
            shape=(len(self.layers), 1, self.width),
            chunks=(1, 1, self.width),
            dtype=self.numpy_dtype,
            compressors=[compressor] if compressor else None,
            fill_value=0,
            dimension_names=("layer", "token", _VALUES[self.contents]),
            attributes=self._row_attributes(),
        )
        for spec in _SMALL_ARRAYS.values():
            shape = (1,) * len(spec.dimensions)
            group.create_array(
                spec.name,
                shape=shape,
                chunks=shape,
                dtype=spec.dtype,
                compressors=None,
                fill_value=0,
                dimension_names=[_VALUES[self.contents] if name == "value" else name for name in spec.dimensions],
                attributes={"description": spec.description},
            )
        with warnings.catch_warnings():
            # Zarr says that consolidated metadata is not in its specification yet. Readers of one file behind a link want it all the same.
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(store)
        return dict(json.loads(written[_DOCUMENT].to_bytes()))

    def storage(self) -> dict[str, Any]:
        """How rows are stored, as the manifest says it."""
        return {
            "format": "one Zarr v3 store in one ZIP file a shard",
            "shard_format": FORMAT_VERSION,
            "array": self.contents,
            "logical_dtype": self.store_dtype,
            "stored_dtype": STORED_AS[self.store_dtype],
            "codec": self.codec,
        }

    def _attributes(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "description": "The residual stream of a language model for every token of a few prompts, one layer after the other.",
            "residual_stream_convention": RESIDUAL_STREAM_CONVENTION,
            "prompts": (
                "Prompt j of this file is tokens prompt_offsets[j] to prompt_offsets[j + 1] of the token axis, "
                "and number prompt_indices[j] of the run."
            ),
            **self.about,
        }

    def _row_attributes(self) -> dict[str, Any]:
        what = {"activations": "the residual stream", "projections": "the residual stream's components along directions of length 1"}
        attributes = {"description": what[self.contents], "logical_dtype": self.store_dtype}
        if self.store_dtype == "bfloat16":
            attributes["decode"] = "uint16 holds the bits of bfloat16: torch.from_numpy(a).view(torch.bfloat16)"
        return attributes
