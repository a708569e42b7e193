"""Whether a model's blocks are streamed: read from its files once a window, where the device has no room for all of them.

And then how large a window is, since each costs one pass over the weights: as many tokens as there is room for their rows and for the
streams that wait between two blocks, in host memory or in a scratch folder.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers

from harvest.errors import ModelError, RequestError
from harvest.model.blockwise import loads_by_block
from harvest.model.describe import Description
from harvest.model.device import Placement, free_memory
from harvest.model.weigh import build, free_bytes
from harvest.parts import Rank
from harvest.progress import size
from harvest.settings import Engine

# Weights are not loaded whole where they would take more of what is free: a forward pass needs room too.
_FITS = 0.9
# Of the whole of a machine's memory, and of what is free in a scratch folder, a process takes at most so much.
_MEMORY_SHARE, _SCRATCH_SHARE = 0.5, 0.8
# Waiting streams are padded; batches of neighbours in length have some per cent more tokens than are real.
_PADDED = 1.1
# On a card they are pinned, each in a power of two of bytes: up to twice as much.
_PINNED = 2.0


def choose_weights(
    engine: Engine,
    placement: Placement,
    description: Description,
    n_blocks: int,
    compute_dtype: str,
    note: Callable[[str], None],
) -> Literal["resident", "stream"]:
    """How the weights of the first n_blocks blocks are had: all on the device, or streamed. Raises RequestError."""
    why_not = _why_not(engine, placement, description)
    if engine.weights == "stream":
        if why_not is not None:
            raise RequestError(f"weights: stream was given, but {why_not}; leave it out")
        return "stream"
    if engine.weights == "resident" or why_not is not None or getattr(description.config, "quantization_config", None) is not None:
        if engine.scratch is not None and engine.weights == "resident":
            raise RequestError("scratch: it holds what waits while blocks are streamed, and weights are resident; leave one out")
        return "resident"
    try:
        weighed = build(description)
    except ModelError:
        # Loading says what is wrong with it.
        return "resident"
    needed, free = weighed.n_bytes(n_blocks, compute_dtype), free_bytes(placement)
    if needed > _FITS * free:
        # An earlier run of this process may have left its model to the garbage collector.
        free_memory()
        free = free_bytes(placement)
    if needed <= _FITS * free:
        return "resident"
    note(
        f"the weights of {n_blocks} blocks take {size(needed)} as {compute_dtype}, and {placement.device} has {size(free)} free: "
        "the blocks are streamed, each read once a window"
    )
    return "stream"


def _why_not(engine: Engine, placement: Placement, description: Description) -> str | None:
    if placement.device.type == "mps":
        return "the device is mps, which blocks are not streamed to"
    if not loads_by_block():
        return f"transformers {transformers.__version__} loads weights in another way than 5.24, with which blocks can be streamed"
    if engine.device_map != "none":
        return "device_map auto spreads the weights instead of streaming them"
    if description.source.is_tiny:
        return "tiny is made by code and has no files"
    if description.source.gguf_file is not None:
        return "the model is a GGUF file, which is read as a whole"
    if description.adapter is not None:
        return "an adapter is put on a model that is loaded whole"
    return None


@dataclass(frozen=True)
class Room:
    """Where rows and waiting streams of windows may lie while blocks are streamed.

    memory_bytes: of host memory for this process. scratch: a folder for what is more, and scratch_bytes: how much of it.
    is_pinned: whether host memory is pinned, for a card.
    """

    memory_bytes: int
    scratch: Path | None
    scratch_bytes: int
    is_pinned: bool = False

    def window_tokens(self, row_bytes: int, state_bytes: float, n_tokens: int) -> int:
        """How many of a run's n_tokens have room at once.

        row_bytes: captured for one token, over all layers; state_bytes: of its stream between two blocks. While one window's shards are
        written the next one's rows are there too.
        """
        room = max(self.memory_bytes, self.scratch_bytes)
        state_bytes = state_bytes * (_PADDED * _PINNED if self.is_pinned and room == self.memory_bytes else _PADDED)
        if n_tokens * (row_bytes + state_bytes) <= room:
            return n_tokens
        return max(int(room / (2 * row_bytes + state_bytes)), 1)

    def fits_memory(self, *n_bytes: int) -> bool:
        """Whether so much stays in host memory."""
        return self.scratch is None or sum(n_bytes) <= self.memory_bytes


def find_room(engine: Engine, rank: Rank, device: torch.device) -> Room:
    """The room that an engine gives, shared with the other ranks on this machine. Raises RequestError for a scratch folder that is none.

    Powers of two, and of a machine's whole memory: a window must be the same when the run is taken up again, and in all its parts.
    """
    memory = engine.window_bytes or _share(_MEMORY_SHARE * _total_memory(), rank)
    is_pinned = device.type == "cuda"
    if engine.scratch is None:
        return Room(memory, None, 0, is_pinned)
    folder = Path(engine.scratch).expanduser()
    if not folder.is_dir():
        raise RequestError(f"scratch: there is no folder {engine.scratch}; make it, or name one on a fast disk")
    return Room(memory, folder, _share(_SCRATCH_SHARE * shutil.disk_usage(folder).free, rank), is_pinned)


def _share(n_bytes: float, rank: Rank) -> int:
    own = max(int(n_bytes) // rank.local_size, 1)
    return 1 << (own.bit_length() - 1)


def _total_memory() -> int:
    # accelerate needs it too.
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().total)
