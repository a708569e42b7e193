"""Which device computes."""

from collections.abc import Callable

import torch

from harvest.errors import RequestError
from harvest.parts import ALONE, Rank


def resolve_device(asked: str, rank: Rank = ALONE, note: Callable[[str], None] = lambda _: None) -> torch.device:
    """The device that `auto`, `cpu`, `cuda`, `cuda:1` or `mps` means on this machine. Raises RequestError for one that is not here.

    Of several ranks on one machine each takes a card of its own; where a launcher shows each rank only its own card, it takes that.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            here = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise RequestError(f"device: {asked} was given, but torch {torch.__version__} sees {here} on this machine; use auto or cpu")
        if rank.local_size > 1:
            return _card_of(rank, device, count, note)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError("device: mps was given, but torch sees no Metal device on this machine; use auto or cpu")
    return device


def _card_of(rank: Rank, device: torch.device, count: int, note: Callable[[str], None]) -> torch.device:
    if device.index is not None:
        raise RequestError(
            f"device: {device} was given to each of {rank.local_size} ranks on this machine, which would share it; leave --device out, or "
            "give cuda, and each rank takes a card of its own"
        )
    if 1 < count < rank.local_size and rank.local == 0:
        note(f"warning: {rank.local_size} ranks share the {count} cards of this machine; start one rank a card")
    return torch.device("cuda", rank.local % count)
