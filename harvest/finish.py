"""The documents that make a run whole: stats, manifest and the done job, written by whoever finds the last record there."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.asked import note_asked
from harvest.contract import HarvestJob, HarvestResult
from harvest.errors import StorageError
from harvest.model.describe import Description
from harvest.model.start_token import about_token
from harvest.output.folder import RunFolder
from harvest.output.job import JobFile, round_timings
from harvest.output.manifest import make_manifest, shard_entries, versions
from harvest.output.presence import Presence
from harvest.output.record import Record
from harvest.output.shard import read_sums
from harvest.output.stats import RunStats, combine
from harvest.parts import Part
from harvest.prepare import Prepared
from harvest.progress import Reporter
from harvest.settings import Engine


@dataclass
class Clock:
    """Seconds that this process spent loading, computing, saving and uploading; and those in which it only waited for the last two.

    weights_s: of reading weights beside, where blocks are streamed; starved_s: those of forward_s in which computing waited for that.
    """

    load_s: float = 0.0
    forward_s: float = 0.0
    save_s: float = 0.0
    wait_s: float = 0.0
    upload_s: float = 0.0
    weights_s: float = 0.0
    starved_s: float = 0.0

    def say(self) -> str:
        """Where the time went, and what limited the run: of loading, computing and storage the one that took longest."""
        spent = {
            "loading": self.load_s,
            "computing": self.forward_s - self.starved_s,
            "reading weights": self.starved_s,
            "storage": self.wait_s,
        }
        limit = max(spent, key=lambda name: spent[name])
        uploading = f", {self.upload_s:.1f} s of uploading" if self.upload_s else ""
        weights = f"waiting for weights {self.starved_s:.1f} s (beside it {self.weights_s:.1f} s of reading), " if self.weights_s else ""
        return (
            f"loading {self.load_s:.1f} s, computing {spent['computing']:.1f} s, {weights}waiting for storage {self.wait_s:.1f} s "
            f"(beside it {self.save_s:.1f} s of encoding and writing{uploading}): limited by {limit}"
        )


def missing_shards(folder: RunFolder, prepared: Prepared) -> list[int]:
    """The numbers of the shards that are not published yet, by any process of this run."""
    folder.refresh()
    recorded = folder.recorded()
    return [
        shard.index
        for shard in prepared.plan.shards
        if shard.index not in recorded or not folder.is_there(shard.index, prepared.fingerprint)
    ]


def say_missing(missing: Sequence[int], share: Part, presence: Presence, prepared: Prepared, reporter: Reporter) -> None:
    """Say what others have still to do before the run is whole. Raises StorageError for a shard of this process's own that has gone."""
    units = prepared.plan.units()
    parts: dict[int, int] = {}
    for number, unit in enumerate(units):
        for window in unit:
            parts.update({piece.shard.index: number % share.count for piece in window.pieces})
    own = [index for index in missing if parts[index] == share.index]
    if own:
        raise StorageError(f"shard {own[0]} was published and has gone since; see who removes files there, then run the same command again")
    waiting = sorted({parts[index] for index in missing})
    shown = ", ".join(f"{part}/{share.count}" for part in waiting[:8]) + (", …" if len(waiting) > 8 else "")
    others = presence.others()
    working = f"; at work now: {', '.join(map(str, others))}" if others else ""
    reporter.note(
        f"{share} is done; {len(missing)} of {len(parts)} shards are still missing, those of part {shown}{working}; "
        "whichever part ends last makes the run whole"
    )


def make_whole(folder: RunFolder, prepared: Prepared, engine: Engine, job: JobFile, clock: Clock) -> HarvestJob:
    """Write stats, manifest and the done job of a run whose shards are all published.

    Two processes that find the last record at once write the same bytes, each whole. Raises NotARunError where a record has gone since.
    """
    job.refresh()
    stats = _add_up(folder, prepared)
    stats_file = stats.to_safetensors(prepared.layers)
    folder.write(folder.stats, stats_file)
    published = [folder.published(shard.index) for shard in prepared.plan.shards]
    _write_manifest(folder, prepared, job.job, stats, hashlib.sha256(stats_file).hexdigest(), published)
    note_asked(folder, prepared.request, engine)
    job.finish(
        HarvestResult(
            n_shards=len(published),
            layer_indices=prepared.layers,
            contents=prepared.layout.contents,
            tokens=len(prepared.tokens.ids),
            bytes_written=sum(record.bytes for record in published) + len(stats_file),
            timings=round_timings(clock.load_s, clock.forward_s, clock.save_s, folder.upload_s),
            **folder.links(len(published)),
        )
    )
    return job.job


def _add_up(folder: RunFolder, prepared: Prepared) -> RunStats:
    """The run's stats from the shards' sums."""

    def read(index: int) -> list[npt.NDArray[np.float64]]:
        with folder.open_shard(index) as file:
            return read_sums(file, prepared.layout)

    def read_all(pool: ThreadPoolExecutor) -> Iterator[list[npt.NDArray[np.float64]]]:
        # A few ahead: the sums of a long run need not all be in memory.
        indexes = [shard.index for shard in prepared.plan.shards]
        for first in range(0, len(indexes), folder.readers):
            yield from pool.map(read, indexes[first : first + folder.readers])

    with ThreadPoolExecutor(folder.readers) as pool:
        return combine(read_all(pool))


def _write_manifest(
    folder: RunFolder, prepared: Prepared, job: HarvestJob, stats: RunStats, stats_sha256: str, published: Sequence[Record]
) -> None:
    layout, tokens, description = prepared.layout, prepared.tokens, prepared.description
    local = {
        "versions": versions(),
        "model": _about_model(description),
        "device": _device_name(prepared.settings.device),
        "engine": prepared.settings.to_dict(),
        "start_token": about_token(description.tokenizer, tokens.start_token_id),
        "storage": layout.storage(),
        "checksums": {folder.shard_key(record.shard): f"sha256:{record.sha256}" for record in published}
        | {folder.stats.name: f"sha256:{stats_sha256}"},
        "nonfinite_tokens": _count_nonfinite(prepared, published),
        "lowered_batch_tokens": {folder.shard_key(record.shard): record.batch_tokens for record in published if record.batch_tokens},
        "truncated_prompts": tokens.cut,
        "prompts_with_two_start_tokens": tokens.doubled,
        "fingerprint": prepared.fingerprint,
    }
    manifest = make_manifest(
        run_id=job.run_id,
        model_id=prepared.request.model,
        hf_repo=description.repository,
        layout=layout,
        prompts=prepared.request.prompts,
        add_special_tokens=prepared.request.add_special_tokens,
        batch_size=prepared.request.batch_size,
        shards=shard_entries(folder, prepared.plan.shards, tokens.lengths.tolist(), layout),
        mean_norm_L=stats.mean_norm_L.tolist(),
        local=local,
    )
    folder.write(folder.manifest, manifest.to_json().encode())


def _about_model(description: Description) -> dict[str, Any]:
    about: dict[str, Any] = {
        "revision": description.revision,
        "n_layers": description.n_layers,
        "hidden_size": description.hidden_size,
    }
    if (adapter := description.adapter) is not None:
        about["adapter"] = {"name": adapter.name, "revision": adapter.revision, "base": adapter.base}
    return about


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _count_nonfinite(prepared: Prepared, published: Sequence[Record]) -> dict[str, int]:
    """Tokens with a value that is not finite, by layer, where there are any."""
    counts = [sum(record.nonfinite[position] for record in published if record.nonfinite) for position in range(len(prepared.layers))]
    return {str(layer): count for layer, count in zip(prepared.layers, counts, strict=True) if count}
