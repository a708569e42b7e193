"""The documents that make a run whole: stats, manifest and the done job, written by whoever finds the last record there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harvest.asked import note_asked
from harvest.contract import HarvestJob, HarvestResult
from harvest.model.describe import Description
from harvest.output import durable
from harvest.output.folder import Record, RunFolder
from harvest.output.job import JobFile, make_links, round_timings
from harvest.output.manifest import make_manifest, shard_entries, versions
from harvest.output.shard import read_sums
from harvest.output.stats import RunStats, combine
from harvest.prepare import Prepared
from harvest.settings import Engine


@dataclass
class Clock:
    """Seconds that this process spent loading, computing and saving; and those in which it only waited for what was being saved."""

    load_s: float = 0.0
    forward_s: float = 0.0
    save_s: float = 0.0
    wait_s: float = 0.0

    def say(self) -> str:
        """Where the time went, and what limited the run: of loading, computing and storage the one that took longest."""
        spent = {"loading": self.load_s, "computing": self.forward_s, "storage": self.wait_s}
        limit = max(spent, key=lambda name: spent[name])
        return (
            f"loading {self.load_s:.1f} s, computing {self.forward_s:.1f} s, waiting for storage {self.wait_s:.1f} s "
            f"(beside it {self.save_s:.1f} s of encoding and writing): limited by {limit}"
        )


def missing_shards(folder: RunFolder, prepared: Prepared) -> list[int]:
    """The numbers of the shards that are not published yet, by any process of this run."""
    recorded = folder.recorded()
    return [
        shard.index
        for shard in prepared.plan.shards
        if shard.index not in recorded or not folder.is_there(shard.index, prepared.fingerprint)
    ]


def make_whole(folder: RunFolder, prepared: Prepared, engine: Engine, job: JobFile, clock: Clock) -> HarvestJob:
    """Write stats, manifest and the done job of a run whose shards are all published.

    Two processes that find the last record at once write the same bytes, each whole. Raises NotARunError where a record has gone since.
    """
    job.refresh()
    stats = _write_stats(folder, prepared)
    published = [folder.published(shard.index) for shard in prepared.plan.shards]
    _write_manifest(folder, prepared, job.job, stats, published)
    note_asked(folder, prepared.request, engine)
    job.finish(
        HarvestResult(
            n_shards=len(published),
            layer_indices=prepared.layers,
            contents=prepared.layout.contents,
            tokens=len(prepared.tokens.ids),
            bytes_written=sum(record.bytes for record in published) + folder.stats.stat().st_size,
            timings=round_timings(clock.load_s, clock.forward_s, clock.save_s, 0.0),
            **make_links(folder, len(published)),
        )
    )
    return job.job


def _write_stats(folder: RunFolder, prepared: Prepared) -> RunStats:
    """Add up the shards' sums and write stats.safetensors."""
    shards = (read_sums(folder.shard(shard.index), prepared.layout) for shard in prepared.plan.shards)
    stats = combine(shards)
    durable.write_whole(folder.stats, stats.to_safetensors(prepared.layers))
    return stats


def _write_manifest(folder: RunFolder, prepared: Prepared, job: HarvestJob, stats: RunStats, published: Sequence[Record]) -> None:
    layout, tokens, description = prepared.layout, prepared.tokens, prepared.description
    start = tokens.start_token_id
    local = {
        "versions": versions(),
        "model": _about_model(description),
        "device": _device_name(prepared.settings.device),
        "engine": asdict(prepared.settings),
        "start_token": None if start is None else {"id": start, "text": description.tokenizer.convert_ids_to_tokens(start)},
        "storage": layout.storage(),
        "checksums": {folder.shard_key(record.shard): f"sha256:{record.sha256}" for record in published}
        | {folder.stats.name: f"sha256:{durable.file_sha256(folder.stats)}"},
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
    durable.write_whole(folder.manifest, manifest.to_json().encode())


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
