"""Which device computes."""

import torch

from harvest.errors import RequestError


def resolve_device(asked: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda`, `cuda:1` or `mps` means on this machine. Raises RequestError for one that is not here."""
    if asked == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(kind)
    device = torch.device(asked)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            here = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise RequestError(f"device: {asked} was given, but torch {torch.__version__} sees {here} on this machine; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError("device: mps was given, but torch sees no Metal device on this machine; use auto or cpu")
    return device
