"""How a run is carried out: what the API has no field for. Checked without torch."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Dtype = Literal["bfloat16", "float16", "float32"]
DtypeChoice = Literal["auto", Dtype]
CodecChoice = Literal["auto", "lz4", "zstd", "none"]


def _check_device(device: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", device, re.ASCII) is None:
        raise ValueError("a device is auto, cpu, cuda, cuda:N or mps")
    return device


def _check_start_token(text: str) -> str:
    if not text:
        raise ValueError("a start token is auto, none, a token's id, or its text")
    return text


_MEMORY = re.compile(r"(cpu|cuda:\d+)=(\d+(?:\.\d+)?)(|KiB|MiB|GiB|KB|MB|GB)", re.ASCII)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _check_max_memory(text: str) -> str:
    parts = text.split(",")
    if not all(map(_MEMORY.fullmatch, parts)) or len({part.split("=")[0] for part in parts}) < len(parts):
        raise ValueError("limits of memory are DEVICE=SIZE, parted by commas, each device once: cuda:0=70GiB,cpu=100GiB")
    return text


class Engine(BaseModel):
    """The engine's settings, as asked for; `auto` and None are resolved when the model is known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    device: Annotated[str, AfterValidator(_check_device)] = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps.")
    compute_dtype: DtypeChoice = Field(default="auto", description="Auto: the model's own dtype on a GPU, float32 on a CPU.")
    store_dtype: DtypeChoice = Field(default="auto", description="Auto: bfloat16.")
    codec: CodecChoice = Field(default="auto", description="Auto: lz4 for bfloat16, none for float16 and float32.")
    context_length: int | None = Field(default=None, ge=2, description="Tokens of context; a prompt keeps its first context - 1.")
    batch_tokens: int | None = Field(default=None, ge=1, description="Padded tokens of one forward pass.")
    window_bytes: int | None = Field(
        default=None, ge=1, description="Host memory for captured rows, in bytes. Left out: 2 GiB, and on a card up to 16 GiB."
    )
    revision: str | None = Field(default=None, min_length=1, description="A branch, tag or commit of a model on the Hub. Left out: main.")
    start_token: Annotated[str, AfterValidator(_check_start_token)] = Field(
        default="auto", description="Auto: the model's own. Else a token's id or text, or none."
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        default="auto", description="The attention of transformers. Auto: sdpa where the model has it, which is exact."
    )
    adapter: str | None = Field(
        default=None, min_length=1, description="A PEFT adapter's folder, or its Hugging Face id, also with @REVISION."
    )
    trust_remote_code: bool = Field(default=False, description="Run the code that a model's files bring along.")
    allow_pickle: bool = Field(default=False, description="Load weights from pickle files where there are no safetensors.")
    device_map: Literal["none", "auto"] = Field(
        default="none", description="Auto: spread the weights over cards, host memory and disk. None: all on the device."
    )
    max_memory: Annotated[str, AfterValidator(_check_max_memory)] | None = Field(
        default=None, description="With device_map auto: the most that the weights take on a device, such as cuda:0=70GiB,cpu=100GiB."
    )
    weights: Literal["auto", "resident", "stream"] = Field(
        default="auto",
        description="Resident: all needed weights on the device. Stream: each block is read from the files once a window. "
        "Auto: stream where they do not fit.",
    )
    window_tokens: int | None = Field(
        default=None,
        ge=1,
        description="The most tokens of a window. Left out: by window_bytes, or by the room that there is for streaming.",
    )
    scratch: str | None = Field(
        default=None, min_length=1, description="A folder for what does not fit host memory while blocks are streamed."
    )
    compile: bool = Field(
        default=False,
        description="Compile the decoder blocks with torch.compile, once the values are seen to agree with the uncompiled model.",
    )
    check: bool = Field(default=False, description="Before a run, read two of its prompts in a batch and alone, and compare.")
    allow_nonfinite: bool = Field(default=False, description="Store NaN and inf where the model computes them, and count them.")

    def memory_limits(self) -> dict[str, int]:
        """What max_memory says: bytes by device."""
        found = (_MEMORY.fullmatch(part) for part in (self.max_memory or "").split(","))
        return {limit[1]: int(float(limit[2]) * _UNITS[limit[3]]) for limit in found if limit}


def cache_folder() -> Path:
    """Where harvest keeps what it made once: $HARVEST_CACHE, or `harvest` below the user's cache folder."""
    if own := os.environ.get("HARVEST_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harvest"
