"""The documents of a run folder, each against the manifest: job.json, request.json and the records of its shards."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pydantic

from harvest.contract import HarvestJob, Manifest, ShardEntry
from harvest.errors import RequestError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.job import read_job
from harvest.output.presence import live_claims
from harvest.output.record import Record
from harvest.reading.findings import Finding, differing
from harvest.request import HarvestRequest
from harvest.settings import Dtype

_MANIFEST = "manifest.json"
_SAYS = "manifest.json says"


def read_manifest(folder: RunFolder) -> Manifest | Finding:
    """The manifest of a folder, or what is wrong with it."""
    try:
        return Manifest.model_validate_json(folder.manifest.read_bytes())
    except FileNotFoundError:
        job = read_job(folder)
        state = f"its job is {job.status}; " if job else ""
        return Finding(_MANIFEST, f"is missing, so the run is not whole; {state}the command that began it finishes it")
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        return Finding(_MANIFEST, f"is no manifest of a run ({'.'.join(map(str, first['loc']))}: {first['msg']})")
    except OSError as error:
        return Finding(_MANIFEST, f"cannot be read ({error.strerror or error})")


def is_copy(folder: RunFolder) -> bool:
    """Whether a folder was fetched or exported: such a one holds a run's files without its request and its records."""
    return not folder.request.exists() and not folder.record(0).parent.exists()


def prompt_lengths(entry: ShardEntry) -> list[int]:
    """The tokens of each prompt of a shard. Raises KeyError where the manifest does not say them."""
    shapes = {tensor.name: tensor.shape for tensor in entry.tensors}
    return [shapes[f"tokens_{prompt}"][0] for prompt in entry.prompt_indices]


def width_of(manifest: Manifest) -> int:
    """Values a token, by the first tensor of a run's manifest."""
    return next(tensor.shape[2] for tensor in manifest.shards[0].tensors if len(tensor.shape) == 3)


def digests(manifest: Manifest, key: str) -> dict[str, str]:
    """What the manifest says of a file's checksum, by the manifest's name; nothing where it says none."""
    checksums = (manifest.local or {}).get("checksums", {})
    return {_MANIFEST: checksums[key]} if key in checksums else {}


def check_manifest(folder: RunFolder, manifest: Manifest) -> Iterator[Finding]:
    """The manifest against itself: prompts, shards, tensors, layers, and a checksum for each file."""
    layers = manifest.layer_indices
    if not layers or layers != sorted(set(layers)) or layers[0] < 0:
        yield Finding(_MANIFEST, f"layer_indices are {layers}, and should ascend from 0 or above")
    prompts = list(itertools.chain.from_iterable(entry.prompt_indices for entry in manifest.shards))
    itself = {
        "the number of prompts": (len(manifest.prompts), manifest.n_prompts),
        "the list of all shards' prompts": (prompts, list(range(manifest.n_prompts))),
        "the layers of mean_token_norm": (sorted(manifest.mean_token_norm), sorted(map(str, layers))),
    }
    yield from differing(_MANIFEST, itself, "its other fields say")
    if (manifest.projection is not None) != (manifest.contents == "projections"):
        yield Finding(_MANIFEST, f"contents are {manifest.contents}, and projection is {manifest.projection}")
    width = manifest.projection.n_directions if manifest.projection else width_of(manifest)
    for index, entry in enumerate(manifest.shards):
        yield from _check_tensors(index, entry, len(layers), width)
    if manifest.local is not None:
        if (dtype := manifest.local["engine"]["compute_dtype"]) not in get_args(Dtype):
            yield Finding(_MANIFEST, f"the engine's compute_dtype is {dtype!r}, and should be one of {', '.join(get_args(Dtype))}")
        keys = {entry.key for entry in manifest.shards} | {folder.stats.name}
        yield from differing(
            _MANIFEST, {"the list of files with a checksum": (sorted(manifest.local["checksums"]), sorted(keys))}, "it needs"
        )


def _check_tensors(index: int, entry: ShardEntry, n_layers: int, width: int) -> Iterator[Finding]:
    shapes = {tensor.name: tensor.shape for tensor in entry.tensors}
    names = {f"{kind}_{prompt}" for prompt in entry.prompt_indices for kind in ("prompt", "tokens")}
    if shapes.keys() != names or len(shapes) != len(entry.tensors):
        yield Finding(_MANIFEST, f"the tensors of shard {index} are not prompt_i and tokens_i of each of its prompts")
        return
    for prompt in entry.prompt_indices:
        rows, ids = shapes[f"prompt_{prompt}"], shapes[f"tokens_{prompt}"]
        if len(ids) != 1 or ids[0] < 1 or rows != [n_layers, *ids, width]:
            yield Finding(
                _MANIFEST, f"prompt_{prompt} has shape {rows} and tokens_{prompt} {ids}, with {n_layers} layers of {width} values"
            )


def check_job(folder: RunFolder, manifest: Manifest) -> Iterator[Finding]:
    """job.json against the manifest."""
    where = folder.job.name
    if not folder.job.exists():
        if not is_copy(folder):
            yield Finding(where, "is missing")
        return
    try:
        job = HarvestJob.model_validate_json(folder.job.read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        yield Finding(where, f"is no job that can be read ({str(error).splitlines()[0]})")
        return
    same = {
        "run_id": (job.run_id, manifest.run_id),
        "model": (job.model, manifest.model_id),
        "n_prompts": (job.n_prompts, manifest.n_prompts),
        "layers": (job.layers, manifest.layer_indices),
    }
    yield from differing(where, same, _SAYS)
    if job.status != "done" or job.result is None:
        yield Finding(where, f"its status is {job.status}, and manifest.json stands, so the run is whole; run the same command again")
        return
    result = {
        "n_shards": (job.result.n_shards, len(manifest.shards)),
        "layer_indices": (job.result.layer_indices, manifest.layer_indices),
        "contents": (job.result.contents, manifest.contents),
        "tokens": (job.result.tokens, sum(sum(prompt_lengths(entry)) for entry in manifest.shards)),
    }
    yield from differing(where, result, _SAYS)
    records = [Record.read(folder.record(index)) for index in range(len(manifest.shards))]
    if folder.stats.exists() and all(records):
        n_bytes = sum(record.bytes for record in records if record) + folder.stats.stat().st_size
        yield from differing(where, {"bytes_written": (job.result.bytes_written, n_bytes)}, "the records and stats.safetensors have")


def check_request(folder: RunFolder, manifest: Manifest) -> Iterator[Finding]:
    """request.json, which a copy does not have, against the manifest."""
    where = folder.request.name
    if is_copy(folder):
        return
    if not folder.request.exists():
        yield Finding(where, "is missing")
        return
    try:
        request = HarvestRequest.check(json.loads(folder.request.read_bytes()), limits=False)
    except (OSError, ValueError, RequestError) as error:
        yield Finding(where, f"is no request that can be read ({error})")
        return
    same = {
        "model": (request.model, manifest.model_id),
        "prompts": (request.prompts, manifest.prompts),
        "layers": (request.layers, manifest.layer_indices),
        "add_special_tokens": (request.add_special_tokens, manifest.add_special_tokens),
        "batch_size": (request.batch_size, manifest.batch_size),
        "contents": ("activations" if request.project_onto is None else "projections", manifest.contents),
    }
    yield from differing(where, same, _SAYS)


def check_claim(folder: RunFolder, manifest: Manifest) -> Iterator[Finding]:
    """The fingerprint that the folder was begun with, which a copy does not have, against the manifest's."""
    held = None if is_copy(folder) else folder.fingerprint()
    if held is not None:
        yield from check_fingerprint(_below(folder, folder.record(0).parent), held, (manifest.local or {}).get("fingerprint", {}))


def check_record(folder: RunFolder, index: int, manifest: Manifest) -> Iterator[Finding]:
    """The record of one shard, which a copy does not have, against the manifest."""
    path, entry = folder.record(index), manifest.shards[index]
    where = _below(folder, path)
    if is_copy(folder):
        return
    record = Record.read(path)
    if record is None:
        yield Finding(where, "is no record that can be read" if path.exists() else "is missing")
        return
    local = manifest.local or {}
    same = {
        "shard": (record.shard, index),
        "prompts": (list(range(*record.prompts)), entry.prompt_indices),
        "tokens": (record.tokens, sum(prompt_lengths(entry))),
    }
    yield from differing(where, same, _SAYS)
    yield from check_fingerprint(where, record.fingerprint, local.get("fingerprint", {}))


def check_fingerprint(where: str, here: dict[str, object], there: dict[str, object], names: Sequence[str] = ()) -> Iterator[Finding]:
    """One finding where a shard or a record was made for another run. names: what is compared, by default all."""
    names = names or sorted(here.keys() | there.keys())
    pairs = {name: (here.get(name, "nothing"), there.get(name, "nothing")) for name in names}
    differences = [f"{name}: {own!r} here, {other!r} there" for name, (own, other) in pairs.items() if own != other]
    if differences:
        yield Finding(where, f"is of another run than manifest.json ({'; '.join(differences)})")


def check_strangers(folder: RunFolder, manifest: Manifest) -> Iterator[Finding]:
    """Shards and records that the run does not have."""
    own = {folder.path / entry.key for entry in manifest.shards} | {folder.record(index) for index in range(len(manifest.shards))}
    for path in sorted({*folder.path.glob("shard_*"), *folder.path.glob("*/shard_*")} - own):
        if not durable.is_temporary(path):
            yield Finding(_below(folder, path), "belongs to no shard of manifest.json")


def leftovers(folder: RunFolder) -> list[str]:
    """What processes left that ended while they worked on a folder; or the process that works on it."""
    at_work = live_claims(folder)
    if at_work:
        return [f"{claim} is working on it" for claim in at_work]
    paths = [path for path in sorted(folder.path.rglob("*")) if durable.is_temporary(path)]
    paths += [path for path in (*sorted(folder.processes.glob("*.json")), folder.cancel, folder.copying) if path.exists()]
    return [f"{_below(folder, path)}: left by a process that ended while it worked; no part of the run" for path in paths]


def _below(folder: RunFolder, path: Path) -> str:
    return path.relative_to(folder.path).as_posix()
