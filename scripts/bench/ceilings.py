"""What the machine itself does: matrix products at a model's shapes, and bytes to a file that is on the disk when the clock stops."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

_PIECE_BYTES = 8 << 20


def matrix_rate(
    n_tokens: int,
    n_in: int,
    n_out: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    seconds: float = 1.0,
) -> float:
    """FLOP/s of the fastest of several products [tokens, in] x [in, out], with the weights as a linear layer holds them."""
    device = device or torch.device("cpu")
    inputs = torch.randn(n_tokens, n_in, dtype=dtype, device=device)
    weights = torch.randn(n_out, n_in, dtype=dtype, device=device)
    with torch.inference_mode():
        product_s = best_s(lambda: torch.nn.functional.linear(inputs, weights), device, seconds)
    return 2.0 * n_tokens * n_in * n_out / product_s


def disk_rate(folder: Path, n_bytes: int) -> float:
    """Bytes/s of one new file, written from front to back and flushed to the disk; the faster of two."""
    return max(_write_file(folder, n_bytes) for _ in range(2))


def _write_file(folder: Path, n_bytes: int) -> float:
    piece = memoryview(np.random.default_rng(0).bytes(min(_PIECE_BYTES, n_bytes)))
    path = folder / "ceiling.bin"
    started = time.perf_counter()
    try:
        with open(path, "wb", buffering=0) as file:
            written = 0
            while written < n_bytes:
                written += file.write(piece[: n_bytes - written])
            os.fsync(file.fileno())
        return n_bytes / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def copy_rate(device: torch.device, n_bytes: int, seconds: float = 1.0) -> float:
    """Bytes/s of the fastest of several copies to host memory: from a card into pinned memory, on a CPU from memory to memory."""
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return n_bytes / best_s(lambda: target.copy_(source, non_blocking=True), device, seconds)


def best_s(call: Callable[[], object], device: torch.device, seconds: float, repeats: int = 1) -> float:
    """Return the seconds of the fastest of several calls. repeats: calls between two looks at the clock, for those that are short."""
    call()
    fastest_s = float("inf")
    deadline = time.perf_counter() + seconds
    n_looks = 0
    while n_looks < 3 or time.perf_counter() < deadline:
        wait_for(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        wait_for(device)
        fastest_s = min(fastest_s, (time.perf_counter() - started) / repeats)
        n_looks += 1
    return fastest_s


def wait_for(device: torch.device) -> None:
    """Wait until a card has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
