"""What this machine has, what a model would need here, and whether harvest covers it: looked at without loading weights."""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harvest.model.describe import describe
from harvest.model.device import Placement, free_memory_bytes, resolve_device, with_index
from harvest.model.sources import find_model
from harvest.model.start_token import about_token, start_token_id
from harvest.model.weigh import build, free_bytes
from harvest.output import durable
from harvest.output.manifest import versions
from harvest.request import quartiles
from harvest.settings import Engine

_TRIED_BYTES = 256 << 20
_BLOCK = 8 << 20


def examine_model(name: str, engine: Engine | None = None) -> dict[str, Any]:
    """What a model's config and tokenizer say, and whether its decoder blocks are found. Raises ModelError with the reason where not.

    The model is built without memory for its weights, so that the largest takes seconds. Whether its blocks run once, in order, on one
    stream is seen only when a run begins.
    """
    description = describe(find_model(name, engine))
    weighed = build(description)
    return {
        "model": name,
        "repository": description.repository,
        "revision": description.revision,
        "type": description.config.model_type,
        "class": type(weighed.model).__name__,
        "n_layers": description.n_layers,
        "quartiles": quartiles(description.n_layers),
        "hidden_size": description.hidden_size,
        "context_length": description.context_length,
        "start_token": about_token(description.tokenizer, start_token_id(description.tokenizer, description.config)),
        "dtype": description.dtype,
        "parameters": sum(weights.numel() for weights in weighed.model.parameters()),
        "parameters_a_block": max(weighed.blocks),
        "parameters_beside_the_blocks": weighed.beside,
    }


def examine_machine(folder: Path) -> dict[str, Any]:
    """What this machine has: libraries, devices, memory, and the disk of a folder, which 256 MiB are written to."""
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": dict(versions()),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "free_memory_bytes": free_memory_bytes(),
        "devices": _devices(),
        "hub_token": _has_hub_token(),
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(folder).free,
        "write_bytes_s": round(_write_rate(folder)),
    }


def needs(model: Mapping[str, Any], device: str = "auto") -> dict[str, Any]:
    """What a run of a model's quartiles and of all its layers needs on a device of this machine."""
    where = with_index(resolve_device(device))
    dtype = "float32" if where.type == "cpu" else model["dtype"]
    free = free_bytes(Placement(where))
    answer: dict[str, Any] = {"device": str(where), "compute_dtype": dtype, "free_bytes": free}
    for name, layers in (("quartiles", model["quartiles"]), ("all", list(range(model["n_layers"])))):
        n_blocks = layers[-1] + 1
        weights = (model["parameters_a_block"] * n_blocks + model["parameters_beside_the_blocks"]) * getattr(torch, dtype).itemsize
        answer[name] = {"weight_bytes": weights, "bytes_a_token_stored": len(layers) * model["hidden_size"] * 2, "fits": weights < free}
    return answer


def _devices() -> list[dict[str, Any]]:
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    found: list[dict[str, Any]] = [
        {"device": f"cuda:{card}", "name": torch.cuda.get_device_name(card), "bytes": torch.cuda.get_device_properties(card).total_memory}
        for card in cards
    ]
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": platform.processor(), "bytes": _memory_bytes()})
    return found


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _has_hub_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _write_rate(folder: Path) -> float:
    """Bytes a second to a file with fsync."""
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.monotonic()
        for _ in range(_TRIED_BYTES // _BLOCK):
            file.write(block)
        durable.flush(file)
        return _TRIED_BYTES / max(time.monotonic() - started, 1e-9)
