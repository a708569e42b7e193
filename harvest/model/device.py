"""Which device computes, which devices hold the weights, how much memory they have free, and what to say when one fails."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from harvest.errors import DeviceError, HarvestError, RequestError
from harvest.parts import ALONE, Rank
from harvest.settings import Engine

# The share of free memory, of a card or of the host, that weights take by default. The rest is for what is computed.
_WEIGHTS_SHARE = 0.8
# How libraries report that a device has no memory left, besides torch.OutOfMemoryError: the CUDA runtime (also for pinned memory),
# cuBLAS and cuDNN when they create a handle or a workspace, and torch's allocator on a CPU and on Metal.
_OUT_OF_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_SUPPORTED.",
    "can't allocate memory",
)
# How they report that a device failed: an illegal access, a card that fell off the bus, a driver that is gone.
_FAILED = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "MPS error")


@dataclass(frozen=True)
class Placement:
    """Where a model's weights are.

    device: where token ids go in and captured rows come out; a CUDA device has its index. Without limits the whole model lies there.
    limits: bytes of weights for each device, by accelerate's names: the number of a card, or cpu. What fits none of them stays on disk.
    """

    device: torch.device
    limits: Mapping[int | str, int] | None = None


def place(engine: Engine, device: torch.device) -> Placement:
    """Return where an engine puts a model's weights on this machine as it is now. Raises RequestError.

    With device_map auto a card named by its number is the only one used, and `cuda` means all cards. Otherwise `cuda` means the
    current card of the process.
    """
    given = {} if engine.max_memory is None else engine.memory_limits()
    if engine.device_map == "none":
        if given:
            raise RequestError(
                "max_memory: it bounds where --device-map auto puts weights, and means nothing without; leave one out or give both"
            )
        return Placement(with_index(device))
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


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index: `cuda` is the current card of the process. torch.cuda.set_device takes no device without one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _free_bytes(key: int | str) -> int:
    return free_card_bytes(torch.device("cuda", key)) if isinstance(key, int) else free_memory_bytes()


def free_card_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a card.

    torch's caching allocator keeps freed memory, which the driver reports as used: memory_reserved - memory_allocated is free to this
    process. Without it a second run in one process would see no room for a model that fits (torch docs, "Memory management").
    """
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + max(cached, 0)


def card_bytes(device: torch.device) -> int:
    """Return the bytes of a card's whole memory."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_memory_bytes() -> int:
    """Return the bytes of host memory that are free, or can be freed at once."""
    # accelerate, which spreads weights, needs psutil too.
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def resolve_device(asked: str, rank: Rank = ALONE, note: Callable[[str], None] = lambda _: None) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda`, `cuda:1` or `mps` means on this machine. Raises RequestError if it is not there.

    Each of several ranks on one machine takes its own card. If a launcher shows each rank only one card, the rank takes that.
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


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device. On a card the copy does not make the host wait: it goes through pinned memory, in stream order."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return host_copy(tensor).to(device, non_blocking=True)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a pinned copy of a tensor on the host, or the tensor itself if no more memory can be pinned."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return tensor


def host_empty(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Return an uninitialised tensor in host memory: pinned if requested and possible, else pageable."""
    if pinned:
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    return torch.empty(shape, dtype=dtype)


def pinned_bytes(n_bytes: int) -> int:
    """Return what a pinned buffer of n_bytes takes: torch's pinned allocator rounds up to a power of two (CachingHostAllocator)."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that a device, or the host, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def free_memory() -> None:
    """Return memory that nothing uses any more to the device."""
    # A raised error keeps the frames of the forward pass, and with them its tensors, until the garbage collector runs.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


@contextmanager
def naming_failures(device: torch.device, advice: str) -> Iterator[None]:
    """Raise DeviceError in place of torch's errors for a device that has no memory left, or that failed.

    advice: what to do if memory ran out, as a sentence without its full stop.
    """
    try:
        yield
    except HarvestError:
        raise
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if is_out_of_memory(error):
            raise DeviceError(f"device: {device} ran out of memory ({reason}). {advice}.") from error
        if is_failure(error):
            raise DeviceError(
                f"device: {device} failed ({reason}). "
                "Check the card (nvidia-smi, the kernel log), then run the same command again in a new process."
            ) from error
        raise


def is_failure(error: BaseException) -> bool:
    """Return whether an error reports a failed device. After an illegal access each later call to the card in this process fails too."""
    # Since torch 2.8 the CUDA runtime's errors have their own class.
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator_error) or any(words in str(error) for words in _FAILED)
