"""What a run would take, before it is begun: its prompts tokenised, its batches and shards planned, and no weights loaded."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from harvest.begin import look, prepare_in
from harvest.errors import FolderError
from harvest.model.device import free_memory_bytes
from harvest.model.start_token import about_token
from harvest.model.weigh import build, free_bytes
from harvest.output.folder import RunFolder
from harvest.output.space import needed_bytes
from harvest.output.staged import open_folder
from harvest.prepare import STREAMED_BLOCKS, Prepared
from harvest.progress import Reporter, duration, size
from harvest.request import HarvestRequest
from harvest.settings import Engine
from harvest.speed import estimate_s
from harvest.stop import StopFlag
from harvest.stream import kept_bytes


@dataclass(frozen=True)
class Forecast:
    """What a run would take.

    padding: padded tokens for each real one. rows_bytes: of the captured rows before the codec. most_bytes: that the run may still write,
        where its codec gains nothing. free_bytes: on the disk of the folder.
    weight_bytes: of the needed blocks, embeddings and norms, on the device. buffer_bytes: of host memory for captured rows, and for
        streams between two blocks and pieces of weights where blocks are streamed. For a card it is pinned, in powers of two of bytes.
    streamed: whether blocks are read from the files once a window; weight_read_bytes: by all windows that are left; scratch_bytes: in the
        scratch folder at once.
    seconds: by an earlier run of this model on this machine, or None where there was none.
    problems: why the run could not work as it stands.
    """

    folder: str
    model: str
    revision: str
    layers: list[int]
    contents: str
    n_prompts: int
    n_cut: int
    longest_prompt: int
    start_token: str | None
    tokens: int
    n_batches: int
    batch_tokens: int
    padding: float
    n_windows: int
    n_shards: int
    n_shards_done: int
    store_dtype: str
    codec: str
    rows_bytes: int
    most_bytes: int
    free_bytes: int
    device: str
    compute_dtype: str
    weight_bytes: int
    device_free_bytes: int
    buffer_bytes: int
    streamed: bool
    weight_read_bytes: int
    scratch_bytes: int
    seconds: float | None
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The forecast as JSON."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """The forecast to read."""
        done = f", {self.n_shards_done} of them finished already" if self.n_shards_done else ""
        time = "unknown: this machine keeps no run of this model" if self.seconds is None else f"about {duration(self.seconds)}"
        pinned = ", pinned" if self.device.startswith("cuda") else ""
        rows: list[tuple[str, Any]] = [
            ("run folder", self.folder),
            ("model", f"{self.model}, {len(self.layers)} layers up to {self.layers[-1]}, {self.contents}"),
            ("prompts", f"{self.n_prompts:,}, the longest of {self.longest_prompt:,} tokens, {self.n_cut:,} cut to the context"),
            ("start token", self.start_token or "none"),
            ("tokens", f"{self.tokens:,}, with padding {self.padding:.3f} times as many"),
            ("batches", f"{self.n_batches:,} of at most {self.batch_tokens:,} tokens, in {self.n_windows:,} windows"),
            ("shards", f"{self.n_shards:,}{done}"),
            ("stored", f"{size(self.rows_bytes)} as {self.store_dtype}; with codec {self.codec} at most {size(self.most_bytes)} to write"),
            ("disk", f"{size(self.free_bytes)} free"),
            ("weights", f"{size(self.weight_bytes)} as {self.compute_dtype} on {self.device}, {size(self.device_free_bytes)} free there"),
            *([("streamed", f"{size(self.weight_read_bytes)} of weights to read, each block once a window")] if self.streamed else []),
            ("host memory", f"{size(self.buffer_bytes)} for captured rows{' and waiting streams' if self.streamed else ''}{pinned}"),
            *([("scratch", size(self.scratch_bytes))] if self.scratch_bytes else []),
            ("time", time),
            *(("problem", problem) for problem in self.problems),
        ]
        return "\n".join(f"{name:12} {value}" for name, value in rows)


def forecast(
    request: HarvestRequest, out: str | Path | None, engine: Engine, reporter: Reporter, stop: StopFlag, root: str | Path = "runs"
) -> Forecast:
    """What a run would take, in `out` or in its own folder below `root`. Raises what a run raises before it begins."""
    named = None if out is None else open_folder(out)
    folder, prepared = prepare_in(named, Path(root), request, engine, reporter, stop)
    plan, layout, lengths = prepared.plan, prepared.layout, prepared.plan.lengths
    by_window = [plan.batches(window) for window in plan.windows]
    batches = [batch for window in by_window for batch in window]
    done = folder.recorded()
    unwritten = [shard for shard in plan.shards if shard.index not in done]
    on_disk = needed_bytes(layout, unwritten, prepared.reserved_tokens, folder.most_shards)
    free = shutil.disk_usage(_standing(folder.path)).free
    weighed, n_blocks = build(prepared.description), prepared.n_blocks
    weights = weighed.n_bytes(n_blocks, prepared.settings.compute_dtype)
    n_read = 0
    if prepared.room is not None:
        # One block computes while the next is there, or is put together from its files.
        largest = max(weighed.blocks[:n_blocks]) * getattr(torch, prepared.settings.compute_dtype).itemsize
        weights = weighed.n_bytes(0, prepared.settings.compute_dtype) + min(STREAMED_BLOCKS, n_blocks) * largest
        n_read = (
            sum(window.is_left(done) for window in plan.windows)
            * sum(weighed.blocks[:n_blocks])
            * getattr(torch, prepared.description.dtype).itemsize
        )
    device_free = free_bytes(prepared.placement)
    in_memory, in_scratch = kept_bytes(prepared, by_window)
    seconds = estimate_s(prepared)
    start = about_token(prepared.description.tokenizer, prepared.tokens.start_token_id)
    return Forecast(
        folder=folder.name,
        model=request.model,
        revision=prepared.description.revision,
        layers=prepared.layers,
        contents=layout.contents,
        n_prompts=len(lengths),
        n_cut=len(prepared.tokens.cut),
        longest_prompt=int(lengths.max()),
        start_token=None if start is None else start["text"],
        tokens=len(prepared.tokens.ids),
        n_batches=len(batches),
        batch_tokens=plan.batch_tokens,
        padding=round(sum(len(batch) * int(lengths[batch].max()) for batch in batches) / len(prepared.tokens.ids), 4),
        n_windows=len(plan.windows),
        n_shards=len(plan.shards),
        n_shards_done=len(done & {shard.index for shard in plan.shards}),
        store_dtype=prepared.settings.store_dtype,
        codec=prepared.settings.codec,
        rows_bytes=len(prepared.tokens.ids) * layout.token_bytes,
        most_bytes=needed_bytes(layout, unwritten, prepared.reserved_tokens),
        free_bytes=free,
        device=prepared.settings.device,
        compute_dtype=prepared.settings.compute_dtype,
        weight_bytes=weights,
        device_free_bytes=device_free,
        buffer_bytes=in_memory,
        streamed=prepared.room is not None,
        weight_read_bytes=n_read,
        scratch_bytes=in_scratch,
        seconds=None if seconds is None else round(seconds, 1),
        problems=_problems(prepared, folder, on_disk, free, weights, device_free, in_memory, in_scratch, reporter),
    )


def _problems(
    prepared: Prepared,
    folder: RunFolder,
    on_disk: int,
    free: int,
    weights: int,
    device_free: int,
    in_memory: int,
    scratch: int,
    reporter: Reporter,
) -> list[str]:
    found = []
    try:
        if look(folder, prepared, reporter):
            reporter.note("this run is finished already")
    except FolderError as error:
        found.append(str(error))
    if on_disk > free:
        found.append(f"the run may have {size(on_disk)} on the disk of {folder.path}, which has {size(free)} free")
    if in_memory > (free_memory := free_memory_bytes()):
        found.append(f"the run takes {size(in_memory)} of host memory, and {size(free_memory)} are free. Lower --window-bytes")
    room = prepared.room
    if room is not None and room.scratch is not None and scratch > shutil.disk_usage(room.scratch).free:
        found.append(f"the run puts {size(scratch)} into {room.scratch}, which has {size(shutil.disk_usage(room.scratch).free)} free")
    if room is not None and weights > device_free:
        found.append(
            f"the blocks that are there at once, and what stands beside them, take {size(weights)} on {prepared.settings.device}, "
            f"which has {size(device_free)} free"
        )
    elif weights > device_free and prepared.settings.device_map == "none":
        found.append(
            f"the weights take {size(weights)} on {prepared.settings.device}, which has {size(device_free)} free; --weights stream reads "
            "each block when its turn comes, and --device-map auto spreads them over cards, host memory and disk"
        )
    return found


def _standing(path: Path) -> Path:
    """The nearest folder on the way to a path that is there already."""
    return next(parent for parent in (path, *path.parents) if parent.is_dir())
