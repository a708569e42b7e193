"""The request: a body of Create Harvest, checked without torch, transformers or zarr, so that a bad one is an error within a second.

Field names, types and bounds are the API's (`reference.txt`, and the facts known beyond it). Shapes: D directions, H hidden size.
"""

import binascii
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from harvest.checks import check, show
from harvest.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_LAYER_ENTRIES = 256
# The API's limits of size. They hold here too unless they are lifted, so that what runs here runs there.
MAX_PROMPTS = 4096
MAX_ESTIMATED_TOKENS = 2_000_000
CHARACTERS_A_TOKEN = 4
MAX_DIRECTIONS = 64
MAX_BODY_BYTES = 50 << 20

_LIFT = "--no-limits lifts this limit of the API"
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _check_text(text: str) -> str:
    if not text:
        raise ValueError("an empty prompt has nothing to read; leave it out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds the lone surrogate {text[error.start]!a} at character {error.start}, which is no text; "
            "write the character itself or a whole \\ud83d\\ude00 pair"
        ) from None
    return text


def _check_model_id(model: str) -> str:
    if not model.strip() or "\0" in model:
        raise ValueError("a model is named by a registry id, a Hugging Face id, a folder or a GGUF file, without NUL characters")
    return model


def _check_layers(layers: Any) -> Any:
    if layers is None or layers == "all":
        return layers
    if not isinstance(layers, list):
        raise ValueError('layers are "all" (in lower case), or a list of decoder block numbers')
    if not 1 <= len(layers) <= MAX_LAYER_ENTRIES:
        raise ValueError(f'{len(layers)} entries, where a request takes 1 to {MAX_LAYER_ENTRIES}, or "all"')
    for place, layer in enumerate(layers):
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise ValueError(f"entry {place} is {type(layer).__name__}, where a decoder block's number was expected")
        if layer < 0:
            raise ValueError(f"entry {place} is negative; decoder blocks are numbered from 0")
    return layers


Prompt = Annotated[str, AfterValidator(_check_text)]


class TensorObject(BaseModel):
    """The API's tensor object: directions to project onto, [n_directions, hidden], as the base64 of their little-endian bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data: str = Field(description="Base64 of the raw little-endian buffer; white space is allowed.")
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=2, max_length=2, description="[n_directions, hidden].")
    compression: Literal["none"] | None = None

    @model_validator(mode="after")
    def _check_directions(self, info: ValidationInfo) -> Self:
        if _limits(info) and self.shape[0] > MAX_DIRECTIONS:
            raise ValueError(f"{self.shape[0]} directions, where a request takes 1 to {MAX_DIRECTIONS}; {_LIFT}")
        self.directions()
        return self

    def directions(self) -> "npt.NDArray[np.float32]":
        """The directions, each scaled to length 1: float32 [D, H].

        Lengths are taken in float64, so that a huge direction does not overflow to a silent zero. Raises ValueError for data that is not
        base64 or of another size than the shape says, for a value that is not finite, and for a direction of length 0.
        """
        import numpy as np

        raw = _decode_base64(self.data)
        expected = math.prod(self.shape) * _ITEM_BYTES[self.dtype]
        if len(raw) != expected:
            raise ValueError(f"data holds {len(raw)} bytes, where shape {self.shape} of {self.dtype} takes exactly {expected}")
        if self.dtype == "bfloat16":
            values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, dtype=np.dtype(self.dtype).newbyteorder("<"))
        return unit_directions(values.reshape(self.shape))


def unit_directions(directions: "npt.NDArray[Any]") -> "npt.NDArray[np.float32]":
    """Directions [D, H] scaled to length 1, float32. Raises ValueError for one that is not finite or has length 0."""
    import numpy as np

    wide = directions.astype(np.float64)
    if not np.isfinite(wide).all():
        row, column = (int(place[0]) for place in np.nonzero(~np.isfinite(wide)))
        raise ValueError(f"direction {row} holds {wide[row, column]} at {column}; every value must be finite")
    # Scaled by the largest value first: the squares of a float64 beyond 1e154 would not be finite.
    largest = np.abs(wide).max(axis=1, keepdims=True)
    if not largest.all():
        raise ValueError(f"direction {int(np.argmin(largest[:, 0]))} has length 0, so it has no direction")
    scaled = wide / largest
    unit: npt.NDArray[np.float32] = (scaled / np.linalg.norm(scaled, axis=1, keepdims=True)).astype(np.float32)
    return unit


class HarvestRequest(BaseModel):
    """The body of Create Harvest.

    An unknown field is an error, never ignored: a mistyped name must not silently take a default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: Annotated[str, AfterValidator(_check_model_id)] = Field(description="The model whose residual stream is read.")
    prompts: list[Prompt] = Field(
        min_length=1,
        description="The texts, in order. Token ids are not taken. Together at most 2,000,000 tokens, estimated as characters / 4.",
        json_schema_extra={"maxItems": MAX_PROMPTS},
    )
    layers: Annotated[list[int] | Literal["all"] | None, BeforeValidator(_check_layers)] = Field(
        default=None,
        description='Decoder blocks, from 0, in any order, each read once; or "all". Left out: n_layers // 4, // 2 and 3 * n_layers // 4.',
    )
    shard_size: int = Field(default=32, ge=1, le=4096, description="Prompts in each shard file.")
    batch_size: int | None = Field(
        default=None, ge=1, le=64, description="Kept in the manifest for the API's sake; the engine sizes its own batches."
    )
    add_special_tokens: bool = Field(
        default=True, description="Put the model's start token before each prompt. Set false for text that already starts with one."
    )

    project_onto: TensorObject | None = Field(
        default=None, description="Write the stream projected onto these directions, as float32, instead of the stream itself."
    )

    @field_validator("prompts")
    @classmethod
    def _check_size(cls, prompts: list[str], info: ValidationInfo) -> list[str]:
        if _limits(info):
            if len(prompts) > MAX_PROMPTS:
                raise ValueError(f"{len(prompts):,} prompts, where a request takes 1 to {MAX_PROMPTS:,}; {_LIFT}")
            estimate = sum(map(len, prompts)) / CHARACTERS_A_TOKEN
            if estimate > MAX_ESTIMATED_TOKENS:
                raise ValueError(
                    f"an estimated {estimate:,.0f} tokens (characters / {CHARACTERS_A_TOKEN}), "
                    f"where a request takes at most {MAX_ESTIMATED_TOKENS:,}; {_LIFT}"
                )
        return prompts

    @classmethod
    def check(cls, body: Mapping[str, Any], limits: bool = True) -> Self:
        """The request in a body, or a RequestError that names the field, what was given and what is allowed.

        limits: whether the API's limits of size hold: 4,096 prompts, 2,000,000 estimated tokens, 64 directions.
        """
        return check(cls, body, limits=limits)

    def resolve_layers(self, n_layers: int) -> list[int]:
        """The layers to read of a model with `n_layers` decoder blocks, ascending, each once. Raises RequestError."""
        if self.layers == "all":
            return list(range(n_layers))
        if self.layers is None:
            return quartiles(n_layers)
        for layer in self.layers:
            if layer >= n_layers:
                raise RequestError(
                    f"layers: {show(layer)} was given, but {self.model} has {n_layers} decoder blocks, numbered 0 to {n_layers - 1}"
                )
        return sorted(set(self.layers))


def quartiles(n_layers: int) -> list[int]:
    """The layers that are read where none are asked for."""
    return sorted({n_layers // 4, n_layers // 2, 3 * n_layers // 4})


def parse_layers(text: str) -> list[int] | Literal["all"]:
    """The layers in a command's text: `all`, or numbers and ranges such as `8,16,24` or `0-3,31`. Raises RequestError."""
    if text == "all":
        return "all"
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        if match is None:
            raise RequestError(
                f'--layers: {show(text)} was given; allowed are "all", numbers such as 8,16,24 and ranges such as 0-3, counted from 0'
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise RequestError(f"--layers: the range {part.strip()} runs backwards; write {last}-{first}")
        layers.extend(range(first, last + 1))
    # A range is a short way to write layers; the API's bound is on what a request holds, where each needs to stand but once.
    return sorted(set(layers))


def _limits(info: ValidationInfo) -> bool:
    return bool((info.context or {}).get("limits", True))


def _decode_base64(data: str) -> bytes:
    try:
        return binascii.a2b_base64("".join(data.split()), strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"data is not base64 ({error})") from None
