"""How fast this machine has read a model before, remembered in the cache: what a plan's time is reckoned from."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from harvest.contract import utc_now
from harvest.errors import StorageError
from harvest.output import durable
from harvest.prepare import Prepared
from harvest.settings import cache_folder

# A shorter run tells more of how it began than of how it went on.
_LEAST_S = 2.0


@dataclass(frozen=True)
class Speed:
    """One earlier run: tokens that were read through n_blocks blocks, and seconds of loading and of reading, waits for storage counted."""

    tokens: int
    n_blocks: int
    load_s: float
    read_s: float
    at: str

    def estimate_s(self, n_tokens: int, n_blocks: int) -> float:
        """Seconds that so many tokens through so many blocks would take: each block costs the same."""
        return self.load_s + self.read_s * n_tokens / self.tokens * n_blocks / self.n_blocks


def remember(prepared: Prepared, n_tokens: int, load_s: float, read_s: float) -> None:
    """Write down how fast a run was that has just ended; no harm where it cannot be written."""
    if read_s < _LEAST_S:
        return
    speed = Speed(n_tokens, prepared.layers[-1] + 1, load_s, read_s, utc_now().isoformat(timespec="seconds"))
    path = _path(prepared)
    with suppress(OSError, StorageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_whole(path, json.dumps(asdict(speed)).encode())


def recall(prepared: Prepared) -> Speed | None:
    """The last run of this model, in this type, on this device; None where there was none."""
    try:
        return Speed(**json.loads(_path(prepared).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _path(prepared: Prepared) -> Path:
    description, settings = prepared.description, prepared.settings
    device = torch.device(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
    adapter = description.adapter.revision if description.adapter is not None else None
    key = [description.repository, description.revision, adapter, name, settings.compute_dtype, settings.attention, settings.device_map]
    return cache_folder() / "speeds" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"
