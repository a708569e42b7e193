"""harvest reads the residual stream of a language model for every token of a set of prompts, and writes it to disk.

The way of a prompt through the package: `input` makes texts into token ids and a plan; `model` turns them into the stream after each
decoder block; `output` carries it to files; `pipeline` is the run that holds them together; `reading` opens what was written.
CONTRIBUTING.md lists every module in that order.

    import harvest

    run = harvest.open("run1")
    run.prompt(0)           # [layer, token, hidden]
    run.layer(2)[:1000]     # [token, hidden]
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harvest.contract import HarvestJob, Manifest
    from harvest.errors import HarvestError
    from harvest.input.prompts import read_prompts
    from harvest.pipeline import run
    from harvest.reading.compare import compare
    from harvest.reading.dataset import torch_dataset
    from harvest.reading.run import Run
    from harvest.reading.run import open_run as open
    from harvest.reading.shard import Shard, open_shard
    from harvest.reading.verify import verify
    from harvest.request import HarvestRequest
    from harvest.settings import Engine

# Where each public name lives. They are imported when first used: the command answers --help without torch.
_PUBLIC = {
    "Engine": ("harvest.settings", "Engine"),
    "HarvestError": ("harvest.errors", "HarvestError"),
    "HarvestJob": ("harvest.contract", "HarvestJob"),
    "HarvestRequest": ("harvest.request", "HarvestRequest"),
    "Manifest": ("harvest.contract", "Manifest"),
    "Run": ("harvest.reading.run", "Run"),
    "Shard": ("harvest.reading.shard", "Shard"),
    "compare": ("harvest.reading.compare", "compare"),
    "open": ("harvest.reading.run", "open_run"),
    "open_shard": ("harvest.reading.shard", "open_shard"),
    "read_prompts": ("harvest.input.prompts", "read_prompts"),
    "run": ("harvest.pipeline", "run"),
    "torch_dataset": ("harvest.reading.dataset", "torch_dataset"),
    "verify": ("harvest.reading.verify", "verify"),
}

__all__ = [
    "Engine",
    "HarvestError",
    "HarvestJob",
    "HarvestRequest",
    "Manifest",
    "Run",
    "Shard",
    "compare",
    "open",
    "open_shard",
    "read_prompts",
    "run",
    "torch_dataset",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'harvest' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
