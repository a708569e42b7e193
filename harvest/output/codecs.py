"""How a chunk of activations is compressed. A new codec is one entry in CODECS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Codec:
    """A compression of chunks.

    encode: one C-contiguous chunk to its bytes; must release the GIL, give the same bytes each time, and be what `zarr_codec` reads.
    zarr_codec: for values of so many bytes, the codec's entry in Zarr's metadata, or None for plain bytes.
    """

    name: str
    encode: Callable[[npt.NDArray[Any]], Any]
    zarr_codec: Callable[[int], dict[str, Any] | None]


# Bitshuffle puts the values' exponent bits side by side; in bfloat16 they are half of all bits and much alike.
_LZ4 = numcodecs.Blosc(cname="lz4", clevel=1, shuffle=numcodecs.Blosc.BITSHUFFLE)
_ZSTD = numcodecs.Blosc(cname="zstd", clevel=1, shuffle=numcodecs.Blosc.BITSHUFFLE)


def _blosc(cname: str) -> Callable[[int], dict[str, Any]]:
    return lambda itemsize: {
        "name": "blosc",
        "configuration": {"typesize": itemsize, "cname": cname, "clevel": 1, "shuffle": "bitshuffle", "blocksize": 0},
    }


CODECS = {
    codec.name: codec
    for codec in (
        Codec("none", np.ascontiguousarray, lambda _itemsize: None),
        Codec("lz4", _LZ4.encode, _blosc("lz4")),
        Codec("zstd", _ZSTD.encode, _blosc("zstd")),
    )
}


def default_codec(store_dtype: str) -> str:
    """The codec that pays for a stored type: lz4 takes a sixth off bfloat16; wider floats hardly shrink under any codec."""
    return "lz4" if store_dtype == "bfloat16" else "none"
