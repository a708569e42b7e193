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
    """One earlier run.

    tokens: that were read through n_blocks blocks. load_s, read_s: seconds of loading and of reading, waits for storage counted, but not
        those for weights.
    weights_s: seconds in which a pass over the weights read them beside, where blocks were streamed; else 0.
    """

    tokens: int
    n_blocks: int
    load_s: float
    read_s: float
    at: str
    weights_s: float = 0.0

    def estimate_s(self, n_tokens: int, n_blocks: int, n_windows: int = 1) -> float:
        """Seconds that so many tokens through so many blocks would take: each block costs the same, to compute and to read."""
        computing = self.read_s * n_tokens / self.tokens * n_blocks / self.n_blocks
        return self.load_s + max(computing, self.weights_s * n_windows * n_blocks / self.n_blocks)


def remember(prepared: Prepared, n_tokens: int, load_s: float, read_s: float, weights_s: float = 0.0) -> None:
    """Write down how fast a run was that has just ended, for the fields see Speed; no harm where it cannot be written."""
    if read_s < _LEAST_S:
        return
    speed = Speed(n_tokens, prepared.n_blocks, load_s, read_s, utc_now().isoformat(timespec="seconds"), weights_s)
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


def estimate_s(prepared: Prepared) -> float | None:
    """Seconds that a whole run would take, by the last run of its kind; None where there was none."""
    speed = recall(prepared)
    return None if speed is None else speed.estimate_s(len(prepared.tokens.ids), prepared.n_blocks, len(prepared.plan.windows))


def _path(prepared: Prepared) -> Path:
    description, settings = prepared.description, prepared.settings
    device = torch.device(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
    adapter = description.adapter.revision if description.adapter is not None else None
    key = [description.repository, description.revision, adapter, name, settings.compute_dtype, settings.attention, settings.device_map]
    if settings.weights == "stream":
        key.append(settings.weights)
    if settings.compile:
        key.append("compile")
    return cache_folder() / "speeds" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"
