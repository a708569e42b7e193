"""A run folder checked as far as it can be without its model; and, on demand, a few prompts against the model itself.

Documents first, then each shard's bytes, then what it holds, and the stats against all values. What is wrong is listed, not raised.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from harvest.contract import Manifest
from harvest.output.folder import RunFolder
from harvest.output.record import Record
from harvest.output.store import no_folder
from harvest.progress import Reporter, Silent
from harvest.reading import documents
from harvest.reading.findings import Finding, guarded
from harvest.reading.shard_checks import Sums, check_bytes, check_shard, layers_off
from harvest.settings import Engine

if TYPE_CHECKING:
    from harvest.reading.reread import Reread, Rereading

_MANIFEST = "manifest.json"
# Of the values' root mean square: stats are rounded to float32, which is right to 6e-8.
_STATS_TOLERANCE = 1e-6
# Mean norms are written with four decimals.
_NORM_TOLERANCE = 1e-4


@dataclass
class Verification:
    """What is wrong with a run folder, and how much was looked at. notes: what is no damage, but good to know."""

    path: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_shards: int = 0
    n_prompts: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    reread: "Reread | None" = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> str:
        """The verification as JSON; a figure that is no finite number is null."""
        fields = {"is_sound": self.is_sound, **asdict(self)}
        for layer in fields["reread"]["layers"] if self.reread else ():
            layer.update({name: None for name, value in layer.items() if not math.isfinite(value)})
        return json.dumps(fields, indent=2)

    def to_text(self) -> str:
        """The verification to read: a line for each finding, and a last one that sums up."""
        lines = [] if self.reread is None else self.reread.to_lines()
        lines += [f"note: {note}" for note in self.notes]
        lines += [str(finding) for finding in self.findings]
        verdict = "sound" if self.is_sound else f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}"
        what = f"{self.n_shards} shards, {self.n_prompts} prompts, {self.n_tokens} tokens, {self.n_bytes} bytes"
        return "\n".join([*lines, f"{self.path}: {verdict} ({what})"])


def verify(path: str | Path, deep: int = 0, engine: Engine | None = None, reporter: Reporter | None = None) -> Verification:
    """Check a run folder of either kind; with `deep` also so many of its prompts, read anew with the model.

    engine: where the model is read, and what it may bring along.

    Raises NotARunError where there is no folder, and with `deep` what `harvest.reading.reread.Rereading` raises.
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise no_folder(path)
    result = Verification(str(path), notes=documents.leftovers(folder))
    manifest = documents.read_manifest(folder)
    if isinstance(manifest, Finding):
        result.findings += [manifest, *_check_published(folder)]
        return result
    result.n_shards, result.n_prompts = len(manifest.shards), manifest.n_prompts
    for where, check in (
        (_MANIFEST, documents.check_manifest(folder, manifest)),
        (folder.job.name, documents.check_job(folder, manifest)),
        (folder.request.name, documents.check_request(folder, manifest)),
        ("records", documents.check_claim(folder, manifest)),
        ("shards", documents.check_strangers(folder, manifest)),
    ):
        result.findings += guarded(where, check)
    is_clear = all(finding.where != _MANIFEST for finding in result.findings)
    rereading = _prepare_rereading(folder, engine) if deep and is_clear else None
    _check_shards(folder, manifest, is_clear, result, reporter or Silent())
    if deep and rereading is None:
        result.notes.append("no prompt was read anew, since manifest.json contradicts itself")
    if rereading is not None:
        result.reread = rereading.read(deep, result.findings)
        result.notes += result.reread.notes
    return result


def _prepare_rereading(folder: RunFolder, engine: Engine | None) -> "Rereading":
    # It brings transformers, which takes seconds to import, and which no other check needs.
    from harvest.reading.reread import Rereading

    return Rereading(folder.path, engine)


def _check_published(folder: RunFolder) -> Iterator[Finding]:
    """What is published of a run that is not whole: each shard against its record."""
    for path in map(folder.record, sorted(folder.recorded())):
        name = path.relative_to(folder.path).as_posix()
        record = Record.read(path)
        if record is None:
            yield Finding(name, "is no record that can be read")
        else:
            where, digests = folder.shard_key(record.shard), {name: f"sha256:{record.sha256}"}
            yield from guarded(where, check_bytes(folder.shard(record.shard), where, digests, (name, record.bytes)))


def _check_shards(folder: RunFolder, manifest: Manifest, is_clear: bool, result: Verification, reporter: Reporter) -> None:
    """Every shard, and the stats. Where the manifest contradicts itself, is_clear is false, and only bytes are looked at."""
    lengths = [sum(documents.prompt_lengths(entry)) if is_clear else 0 for entry in manifest.shards]
    sums = Sums(len(manifest.layer_indices), documents.width_of(manifest)) if is_clear else None
    n_before = len(result.findings)
    reporter.begin(sum(lengths), 0)
    try:
        for index, (entry, n_tokens) in enumerate(zip(manifest.shards, lengths, strict=True)):
            result.findings += guarded(entry.key, _check_one(folder, index, manifest, sums))
            path = folder.path / entry.key
            result.n_bytes += path.stat().st_size if path.is_file() else 0
            result.n_tokens += n_tokens
            reporter.advance(n_tokens)
    finally:
        reporter.end()
    # Stats are those of all shards: nothing can be said of them where one is not what it was.
    whole = sums if len(result.findings) == n_before else None
    result.findings += guarded(folder.stats.name, _check_stats(folder, manifest, whole))


def _check_one(folder: RunFolder, index: int, manifest: Manifest, sums: Sums | None) -> Iterator[Finding]:
    entry, path = manifest.shards[index], folder.path / manifest.shards[index].key
    at_record = list(documents.check_record(folder, index, manifest))
    yield from at_record
    digests = documents.digests(manifest, entry.key)
    record = Record.read(folder.record(index))
    published = None
    # A record that is wrong itself says nothing of the shard.
    if record is not None and not at_record:
        published = folder.record(index).relative_to(folder.path).as_posix(), record.bytes
        digests[published[0]] = f"sha256:{record.sha256}"
    damages = list(check_bytes(path, entry.key, digests, published))
    yield from damages
    if all(damage.where != entry.key for damage in damages) and sums is not None:
        yield from check_shard(path, entry, manifest, sums)


def _check_stats(folder: RunFolder, manifest: Manifest, sums: Sums | None) -> Iterator[Finding]:
    """stats.safetensors and mean_token_norm: their form, and where there are sums of all shards, their values."""
    where, n_findings = folder.stats.name, 0
    for finding in check_bytes(folder.stats, where, documents.digests(manifest, where)):
        n_findings += 1
        yield finding
    if n_findings or sums is None:
        return
    stats: dict[str, Any] = safetensors.numpy.load_file(folder.stats)
    shape = sums.sum_LW.shape
    forms = {name: (tensor.shape, str(tensor.dtype)) for name, tensor in stats.items()}
    expected = {"mean": (shape, "float32"), "std": (shape, "float32"), "layer_indices": (shape[:1], "int32")}
    if forms != expected:
        yield Finding(where, f"holds {forms}, and should hold {expected}")
        return
    if stats["layer_indices"].tolist() != manifest.layer_indices:
        yield Finding(where, f"layer_indices are {stats['layer_indices'].tolist()}, and manifest.json says {manifest.layer_indices}")
    yield from _check_figures(where, stats, manifest, sums)


def _check_figures(where: str, stats: dict[str, Any], manifest: Manifest, sums: Sums) -> Iterator[Finding]:
    counted_L = np.maximum(sums.count_L, 1)
    counted_LW = counted_L[:, None]
    mean_LW = sums.sum_LW / counted_LW
    mean_sq_LW = sums.sum_sq_LW / counted_LW
    std_LW = np.sqrt(np.maximum(mean_sq_LW - mean_LW**2, 0))
    tolerance_LW = _STATS_TOLERANCE * np.sqrt(mean_sq_LW)
    # Whether the service divides by n or by n - 1 is not known.
    slack_LW = tolerance_LW if manifest.local else tolerance_LW + std_LW / counted_LW
    counted = (manifest.local or {}).get("nonfinite_tokens", {})
    found = {str(layer): int(count) for layer, count in zip(manifest.layer_indices, sums.nonfinite_L, strict=True) if count}
    if counted != found:
        yield Finding(_MANIFEST, f"nonfinite_tokens are {counted}, and the shards hold {found}")
    norms = np.array([manifest.mean_token_norm[str(layer)] for layer in manifest.layer_indices])
    norm_L = sums.norm_sum_L / counted_L
    for name, place, stored, anew, tolerance in (
        ("mean", where, stats["mean"], mean_LW, tolerance_LW),
        ("std", where, stats["std"], std_LW, slack_LW),
        ("mean_token_norm", _MANIFEST, norms, norm_L, _NORM_TOLERANCE + _STATS_TOLERANCE * norm_L),
    ):
        if positions := layers_off(stored, anew, tolerance):
            layers = [manifest.layer_indices[position] for position in positions]
            yield Finding(place, f"{name} is not that of the stored values in layers {layers}")
