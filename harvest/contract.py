"""The documents of the hosted harvest API that a run takes and writes: request, job and manifest.

These models are the one place that knows the API's field names, types and bounds (`reference.txt`, and the facts known beyond it).
They import neither torch, transformers nor zarr: a bad request is an error within a second.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from harvest.checks import check, show
from harvest.errors import RequestError
from harvest.settings import Dtype

MAX_LAYER_ENTRIES = 256
URL_LIFETIME = timedelta(days=7)

RESIDUAL_STREAM_CONVENTION = (
    "Layer k is the residual stream after decoder block k, counted from 0. "
    "The last layer is taken before the final norm; the embeddings are no layer."
)


def utc_now() -> datetime:
    """The time now in UTC, to the millisecond, which is how the API writes times."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def _serialize_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


UtcTime = Annotated[datetime, PlainSerializer(_serialize_time)]


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


class HarvestRequest(BaseModel):
    """The body of Create Harvest.

    An unknown field is an error, never ignored: a mistyped name must not silently take a default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: Annotated[str, AfterValidator(_check_model_id)] = Field(description="The model whose residual stream is read.")
    prompts: list[Prompt] = Field(min_length=1, description="The texts, in order. Token ids are not taken.")
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

    @classmethod
    def check(cls, body: Mapping[str, Any]) -> Self:
        """The request in a body, or a RequestError that names the field, what was given and what is allowed."""
        return check(cls, body)

    def resolve_layers(self, n_layers: int) -> list[int]:
        """The layers to read of a model with `n_layers` decoder blocks, ascending, each once. Raises RequestError."""
        if self.layers == "all":
            return list(range(n_layers))
        if self.layers is None:
            return sorted({n_layers // 4, n_layers // 2, 3 * n_layers // 4})
        for layer in self.layers:
            if layer >= n_layers:
                raise RequestError(
                    f"layers: {show(layer)} was given, but {self.model} has {n_layers} decoder blocks, numbered 0 to {n_layers - 1}"
                )
        return sorted(set(self.layers))


class Timings(BaseModel):
    """Seconds: loading the model, its forward passes, encoding and writing shards, uploading them."""

    model_config = ConfigDict(extra="forbid")

    load_s: float = Field(ge=0)
    forward_s: float = Field(ge=0)
    save_s: float = Field(ge=0)
    upload_s: float = Field(ge=0)


class HarvestResult(BaseModel):
    """The files of a done job."""

    model_config = ConfigDict(extra="forbid")

    n_shards: int = Field(ge=1)
    layer_indices: list[int]
    manifest_url: str
    shard_urls: list[str]
    stats_url: str
    contents: Literal["activations", "projections"]
    tokens: int = Field(ge=1)
    bytes_written: int = Field(ge=1)
    timings: Timings


class HarvestJob(BaseModel):
    """The answer of Create, Get and Cancel Harvest: the keys of the API, and no others."""

    model_config = ConfigDict(extra="forbid")

    job_id: UUID
    run_id: UUID
    status: Literal["pending", "running", "done", "failed", "cancelled"]
    model: str
    n_prompts: int = Field(ge=1)
    reserved_tokens: int = Field(ge=1)
    layers: list[int]
    tokens: int | None
    created_at: UtcTime
    started_at: UtcTime | None
    completed_at: UtcTime | None
    result: HarvestResult | None = None
    urls_expire_at: UtcTime | None = None
    error: str | None = None

    def to_json(self) -> str:
        """The job as the API answers it: result, urls_expire_at and error stand only where they mean something."""
        absent = {name for name in ("result", "urls_expire_at", "error") if getattr(self, name) is None}
        return self.model_dump_json(indent=2, exclude=absent)


class TensorEntry(BaseModel):
    """One tensor of a shard, by the API's name for it."""

    name: str
    shape: list[int]


class ShardEntry(BaseModel):
    """One shard file: its place below the run folder, its prompts, and its tensors."""

    key: str
    prompt_indices: list[int]
    tensors: list[TensorEntry]


class Manifest(BaseModel):
    """manifest.json: every key of the API's manifest, and `local` for all that the API has no key for."""

    model_config = ConfigDict(extra="forbid")

    run_id: UUID
    layout_version: Literal[2] = 2
    model_id: str
    hf_repo: str
    dtype: Dtype
    compression: Literal["none", "gzip"] = "none"
    capture: str
    add_special_tokens: bool
    layer_indices: list[int]
    residual_stream_convention: str = RESIDUAL_STREAM_CONVENTION
    n_prompts: int = Field(ge=1)
    batch_size: int | None
    prompts: list[str]
    shards: list[ShardEntry]
    contents: Literal["activations", "projections"]
    tensor_layout: str
    tokens_layout: str
    statistics: str
    mean_token_norm: dict[str, float]
    local: dict[str, Any]


def parse_layers(text: str) -> list[int] | Literal["all"]:
    """The layers in a command's text: `all`, or numbers and ranges such as `8,16,24` or `0-3,31`. Raises RequestError."""
    if text == "all":
        return "all"
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        if match is None:
            raise RequestError(f'--layers: {show(text)} was given; allowed are "all", numbers such as 8,16,24 and ranges such as 0-3')
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise RequestError(f"--layers: the range {part.strip()} runs backwards; write {last}-{first}")
        layers.extend(range(first, last + 1))
    # A range is a short way to write layers; the API's bound is on what a request holds, where each needs to stand but once.
    return sorted(set(layers))
