"""Which device computes, and which hold the weights of a model that is larger than one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from harvest.errors import RequestError
from harvest.parts import ALONE, Rank
from harvest.settings import Engine

# Of the free memory of a card or of the host, weights take so much where nobody says; the rest is for what is computed.
_WEIGHTS_SHARE = 0.8


@dataclass(frozen=True)
class Placement:
    """Where a model's weights lie.

    device: where token ids go in and captured rows come out. Without limits the whole model lies there.
    limits: bytes of weights for each device, by accelerate's names: the number of a card, or cpu. What fits none of them stays on disk.
    """

    device: torch.device
    limits: Mapping[int | str, int] | None = None

    @property
    def cards(self) -> int:
        """How many cards hold weights."""
        named = 0 if self.limits is None else sum(isinstance(name, int) and size > 0 for name, size in self.limits.items())
        return named or int(self.device.type == "cuda")


def place(engine: Engine, device: torch.device) -> Placement:
    """The places of a model's weights that an engine asks for, on this machine as it is now. Raises RequestError.

    With device_map auto a card that is named by its number is the only one that is taken, and one that is not stands for all.
    """
    given = {} if engine.max_memory is None else engine.memory_limits()
    if engine.device_map == "none":
        if given:
            raise RequestError(
                "max_memory: it bounds where --device-map auto puts weights, and means nothing without; leave one out or give both"
            )
        return Placement(device)
    if device.type == "mps":
        raise RequestError(
            "device_map: auto spreads a model over CUDA cards, host memory and disk, and the device is mps; give --device cpu"
        )
    cards: list[int] = []
    if device.type == "cuda":
        cards = list(range(torch.cuda.device_count())) if device.index is None else [device.index]
    known: dict[str, int | str] = {**{f"cuda:{card}": card for card in cards}, "cpu": "cpu"}
    if strangers := sorted(set(given) - set(known)):
        raise RequestError(f"max_memory: {strangers[0]} was given, but this run may use {', '.join(known)}; name those")
    limits: dict[int | str, int] = {}
    for name, key in known.items():
        limits[key] = given[name] if name in given else int(_WEIGHTS_SHARE * _free_bytes(key))
    return Placement(torch.device("cuda", cards[0]) if cards else device, limits)


def _free_bytes(key: int | str) -> int:
    return torch.cuda.mem_get_info(key)[0] if isinstance(key, int) else free_memory_bytes()


def free_memory_bytes() -> int:
    """The host's memory that is free, or can be freed at once, in bytes."""
    # accelerate, which spreads weights, needs it too.
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


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
