"""What host and card do while the engine reads, by torch's profiler: kernel launches, waits of the host, and the card's idle time."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from engine import plan_figures, read_all
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from harvest.model.blocks import LoadedDecoder
from harvest.prepare import Prepared

_RANGE = "bench: reading"
# Runtime and driver calls by the start of their names.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")
# These return when the copy is done; the names of those that do not end with Async.
_BLOCKING_COPIES = ("cudaMemcpy", "cuMemcpy")
# What a card does that is not a kernel, by the start of its name.
_NO_KERNELS = ("Memcpy", "Memset", "Stream ", "Event ", "Context ", _RANGE)
_MOST_KERNELS = 12


def profile_reading(prepared: Prepared, decoder: LoadedDecoder) -> dict[str, Any]:
    """Read a run twice, and profile the second reading. Return what `count_events` finds, or a reason why nothing was found."""
    if decoder.device.type != "cuda":
        return {"reason": "there is no card"}
    if ProfilerActivity.CUDA not in supported_activities():
        return {"reason": "torch's profiler sees no card"}
    read_all(prepared, decoder)
    torch.cuda.synchronize(decoder.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, record_function(_RANGE):
        read_all(prepared, decoder)
    return count_events(list(profiler.events()), plan_figures(prepared)["batches"])


def count_events(events: Sequence[Any], n_batches: int) -> dict[str, Any]:
    """Return launches and waits a batch, the share of the time in which no kernel ran, and the kernels that took the longest.

    events: of torch's profiler. The time is that from the first kernel's start to the last one's end, and it is longer than without a
    profiler, whose own work delays the launches.
    """
    on_host = [event for event in events if event.device_type.name == "CPU"]
    reading = next(event.time_range for event in on_host if event.name == _RANGE)
    calls = Counter(event.name for event in on_host if reading.start <= event.time_range.start <= reading.end)
    kernels = [event for event in events if event.device_type.name == "CUDA" and not event.name.startswith(_NO_KERNELS)]
    if not kernels:
        return {"reason": "torch's profiler recorded no kernel"}
    intervals = [(event.time_range.start, event.time_range.end) for event in kernels]
    kernel_us: Counter[str] = Counter()
    for event, (start, end) in zip(kernels, intervals, strict=True):
        kernel_us[event.name] += end - start
    waits = {name: count for name, count in calls.items() if _waits(name)}
    return {
        "batches": n_batches,
        "launches_per_batch": sum(count for name, count in calls.items() if name.startswith(_LAUNCHES)) / n_batches,
        "waits_per_batch": {name: count / n_batches for name, count in sorted(waits.items())},
        "idle_share": idle_share(intervals),
        "kernel_shares": {name: took / kernel_us.total() for name, took in kernel_us.most_common(_MOST_KERNELS)},
    }


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time between the first start and the last end that no interval covers. Intervals may overlap."""
    ordered = sorted(intervals)
    first, covered, until = ordered[0][0], 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return 1 - covered / (until - first) if until > first else 0.0


def _waits(name: str) -> bool:
    return name.startswith(_WAITS) or (name.startswith(_BLOCKING_COPIES) and "Async" not in name)
