"""The documents that a run writes for clients of the hosted harvest API: the job and the manifest.

Field names, types and bounds are the API's (`reference.txt`, and the facts known beyond it). No torch, transformers or zarr here.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from harvest.settings import Dtype

Contents = Literal["activations", "projections"]

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
    contents: Contents
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


class Projection(BaseModel):
    """What a run's projections are onto."""

    n_directions: int = Field(ge=1)
    normalized: Literal[True] = True
    note: str


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
    contents: Contents
    projection: Projection | None = None
    tensor_layout: str
    tokens_layout: str
    statistics: str
    mean_token_norm: dict[str, float]
    local: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The manifest as the API writes it: `projection` stands only where the run projects, `local` only where harvest made it."""
        return self.model_dump_json(indent=1, exclude={name for name in ("projection", "local") if getattr(self, name) is None})
