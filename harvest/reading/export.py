"""A run written anew as the API's first version has it: safetensors shards, stats and a manifest, for code that was written for those.

Memory stays bounded whatever the size of a shard: a few prompts at a time, and of a prompt that is larger than that a layer at a time.

Shapes: L layers, T tokens, W values a token.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from harvest.contract import Contents, Manifest, ShardEntry, TensorEntry
from harvest.errors import NotARunError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.progress import Reporter, Silent
from harvest.reading.copying import copying
from harvest.reading.run import Run
from harvest.reading.shard import Shard
from harvest.settings import Dtype
from harvest.stop import StopFlag

# Rows of one shard that are held in memory while they are put into the order of a safetensors file.
_GROUP_BYTES = 256 << 20

# Names and sizes of the types in a safetensors file (https://github.com/huggingface/safetensors#format).
_STORED_AS: dict[Dtype, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
_TOKEN_BYTES = 4

_TENSOR_LAYOUTS: dict[Contents, str] = {
    "activations": "prompt_{i} is the residual stream of prompt i, [layer, token, hidden]",
    "projections": "prompt_{i} is the residual stream of prompt i along each direction, [layer, token, direction]",
}
_IN_A_SHARD = "in the order of layer_indices: the tensor of that name in the safetensors file of its shard."
_TOKENS_LAYOUT = "tokens_{i} are the ids that the model read for prompt i, int32 [token], in the order of the token axis of prompt_{i}."


@dataclass(frozen=True)
class Exported:
    """What an export wrote. n_shards_written: those that were not there already; bytes: of all files."""

    out: str
    format: str
    run_id: str
    n_prompts: int
    n_shards: int
    n_shards_written: int
    bytes: int

    def to_json(self) -> str:
        """The summary as the command prints it."""
        return json.dumps(asdict(self), indent=2)


def export_safetensors(run: Run, out: str | Path, reporter: Reporter | None = None, stop: StopFlag | None = None) -> Exported:
    """Write a run's files as the API's first version has them into a folder of their own; a second call finishes what is missing.

    Raises FolderError where the folder holds something else, NotARunError where the run's files do not hold what its manifest says,
    StorageError where a file cannot be written, and what `stop` asks for.
    """
    reporter, stop = reporter or Silent(), stop or StopFlag()
    folder = RunFolder(Path(out))
    manifest = _make_manifest(run.manifest)
    stats = _read_stats(run)
    with copying(folder, "export", manifest, stop):
        folder.remove_temporary()
        missing = [index for index, entry in enumerate(manifest.shards) if not _is_whole(folder.path / entry.key, entry, manifest.dtype)]
        if len(missing) < len(manifest.shards):
            reporter.note(f"{len(manifest.shards) - len(missing)} of {len(manifest.shards)} shards are there already")
        bounds = run.shard_token_offsets
        reporter.begin(run.n_tokens, run.n_tokens - sum(bounds[index + 1] - bounds[index] for index in missing))
        try:
            for index in missing:
                _write_shard(run, index, folder.path / manifest.shards[index].key, manifest, reporter, stop)
        finally:
            reporter.end()
        if not folder.stats.is_file() or folder.stats.read_bytes() != stats:
            durable.write_whole(folder.stats, stats)
        if not folder.manifest.exists():
            durable.write_whole(folder.manifest, manifest.to_json().encode())
    files = [folder.stats, folder.manifest, *(folder.path / entry.key for entry in manifest.shards)]
    n_bytes = sum(path.stat().st_size for path in files)
    return Exported(str(folder.path), "safetensors", str(manifest.run_id), manifest.n_prompts, len(manifest.shards), len(missing), n_bytes)


def _make_manifest(manifest: Manifest) -> Manifest:
    """The manifest of the exported files: the API's keys alone, and sentences that tell of safetensors files."""
    return manifest.model_copy(
        update={
            "compression": "none",
            "shards": [_make_entry(index, entry) for index, entry in enumerate(manifest.shards)],
            "tensor_layout": f"{_TENSOR_LAYOUTS[manifest.contents]}, {_IN_A_SHARD}",
            "tokens_layout": _TOKENS_LAYOUT,
            "local": None,
        }
    )


def _make_entry(index: int, entry: ShardEntry) -> ShardEntry:
    shapes = {tensor.name: tensor.shape for tensor in entry.tensors}
    names = [name for prompt in entry.prompt_indices for name in (f"prompt_{prompt}", f"tokens_{prompt}")]
    if not names or not shapes.keys() >= set(names):
        raise NotARunError(f"manifest.json: shard {index} does not list the tensors prompt_i and tokens_i of each of its prompts")
    tensors = [TensorEntry(name=name, shape=shapes[name]) for name in names]
    return ShardEntry(key=f"shard_{index:05d}.safetensors", prompt_indices=entry.prompt_indices, tensors=tensors)


def _read_stats(run: Run) -> bytes:
    path = RunFolder(run.path).stats
    if not path.is_file():
        raise NotARunError(f"{path}: the run's stats are gone; see what else is wrong with harvest verify")
    return path.read_bytes()


def _write_shard(run: Run, index: int, path: Path, manifest: Manifest, reporter: Reporter, stop: StopFlag) -> None:
    """Write and publish one safetensors shard."""
    header, _ = _make_header(manifest.shards[index], manifest.dtype)
    with run.shard(index) as shard:
        _check_agrees(shard, manifest.shards[index], run)
        with durable.writing(path) as file:
            with durable.storing(path):
                file.write(header)
            for prompt in shard.prompts:
                _write(file, path, shard[f"tokens_{prompt}"])
            for first, end in _groups(shard, run):
                stop.check()
                _write_prompts(file, path, shard, first, end, len(run.layers))
                reporter.advance(shard.token_offsets[end] - shard.token_offsets[first])
    reporter.wrote(path.stat().st_size)


def _make_header(entry: ShardEntry, dtype: Dtype) -> tuple[bytes, int]:
    """The head of a safetensors file, and how many bytes the tensors after it have."""
    tensors: dict[str, Any] = {}
    end = 0
    # Ids first: they are the widest values where rows are bfloat16, and so every tensor begins at a multiple of its values' size.
    for kind, (stored, value_bytes) in (("tokens", ("I32", _TOKEN_BYTES)), ("prompt", _STORED_AS[dtype])):
        for tensor in entry.tensors:
            if tensor.name.startswith(kind):
                start, end = end, end + math.prod(tensor.shape) * value_bytes
                tensors[tensor.name] = {"dtype": stored, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _is_whole(path: Path, entry: ShardEntry, dtype: Dtype) -> bool:
    """Whether a shard is there already. It was published whole; that its head and size fit says that nobody put another in its place."""
    if not path.is_file():
        return False
    header, n_bytes = _make_header(entry, dtype)
    with open(path, "rb") as file:
        return file.read(len(header)) == header and path.stat().st_size == len(header) + n_bytes


def _check_agrees(shard: Shard, entry: ShardEntry, run: Run) -> None:
    """Raise NotARunError where a shard does not hold what its manifest says."""
    shapes: Mapping[str, list[int]] = {tensor.name: tensor.shape for tensor in entry.tensors}
    held = dict(zip(shard.prompts, np.diff(shard.token_offsets).tolist(), strict=True))
    expected = {prompt: shapes[f"tokens_{prompt}"][0] for prompt in entry.prompt_indices}
    is_same = list(held.items()) == list(expected.items()) and (shard.width, shard.layers) == (run.width, run.layers)
    if not is_same or shard.dtype != run.dtype:
        raise NotARunError(f"{shard.path}: does not hold the tensors that manifest.json says; see what is wrong with harvest verify")


def _groups(shard: Shard, run: Run) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring prompts, each as long as fits into memory, as a first place and one past the last."""
    token_bytes = len(run.layers) * run.width * run.dtype.itemsize
    first = 0
    for place in range(1, len(shard.prompts)):
        if (shard.token_offsets[place + 1] - shard.token_offsets[first]) * token_bytes > _GROUP_BYTES:
            yield first, place
            first = place
    yield first, len(shard.prompts)


def _write_prompts(file: BinaryIO, path: Path, shard: Shard, first: int, end: int, n_layers: int) -> None:
    """Write the rows of a few prompts, prompt after prompt; a prompt alone a layer at a time, since it may be larger than memory."""
    offsets = shard.token_offsets[first : end + 1]
    layers_TW = (shard.layer(position, offsets[0], offsets[-1]) for position in range(n_layers))
    if end == first + 1:
        for rows_TW in layers_TW:
            _write(file, path, rows_TW)
        return
    rows_LTW = torch.empty(n_layers, offsets[-1] - offsets[0], shard.width, dtype=shard.dtype)
    for position, rows_TW in enumerate(layers_TW):
        rows_LTW[position] = rows_TW
    for start, stop in itertools.pairwise(offset - offsets[0] for offset in offsets):
        _write(file, path, rows_LTW[:, start:stop])


def _write(file: BinaryIO, path: Path, tensor: torch.Tensor) -> None:
    data: Any = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    with durable.storing(path):
        file.write(data)
