"""A few prompts of a run read anew, as plainly as can be, and compared with what is on disk.

One prompt a pass, nothing padded, nothing stopped early, and another place to look than the run's own: layer k is what block k + 1 is
given, and only the last one what its block answers. So a fault of the batches, of the hooks or of the way to the file does not repeat here.

Shapes: T tokens, H hidden size, D directions, W values a token: H, or D where the run projects.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harvest.contract import Manifest
from harvest.errors import ModelError, NotARunError, RequestError
from harvest.model.blocks import LoadedDecoder
from harvest.model.describe import Description, describe
from harvest.model.device import naming_failures, place, resolve_device
from harvest.model.load import load_decoder
from harvest.model.plain import read_plain, tolerance
from harvest.model.start_token import start_token_id
from harvest.output.folder import RunFolder
from harvest.reading.findings import Finding
from harvest.reading.origin import read_model
from harvest.reading.run import Run
from harvest.reading.summary import spread
from harvest.request import HarvestRequest
from harvest.settings import Engine

# What one token may have of that: a row that belongs elsewhere has many times more.
_ONE_TOKEN = 10


@dataclass(frozen=True)
class LayerReread:
    """One layer of the prompts that were read anew: a token's cosine and relative error, and where the largest error is."""

    layer: int
    mean_cosine: float
    worst_cosine: float
    mean_error: float
    worst_error: float
    prompt: int
    position: int


@dataclass(frozen=True)
class Reread:
    """What reading anew gave. tolerance: of the mean error. notes: what may explain a difference."""

    prompts: list[int]
    compute_dtype: str
    device: str
    tolerance: float
    layers: list[LayerReread]
    notes: list[str]

    def to_lines(self) -> list[str]:
        """The figures to read, a line for each layer."""
        title = f"read anew in {self.compute_dtype} on {self.device}: prompts {', '.join(map(str, self.prompts))}"
        head = "layer  mean cosine  worst cosine  mean error  worst error  at prompt  position"
        rows = [
            f"{row.layer:5}  {row.mean_cosine:11.7f}  {row.worst_cosine:12.7f}  {row.mean_error:10.1e}  {row.worst_error:11.1e}  "
            f"{row.prompt:9}  {row.position:8}"
            for row in self.layers
        ]
        return [title, *([head, *rows] if rows else [])]


class Rereading:
    """A run and what is needed to read its prompts anew; the weights are loaded when it begins."""

    def __init__(self, path: Path, engine: Engine | None = None) -> None:
        """Find all that may be missing before time is spent.

        engine: where to compute, and what the model may bring along; the rest of it is the run's own.

        Raises NotARunError where the folder is no whole run, ModelError where its model is not to be had, RequestError for a device that
        is not here, or for projections in a folder without the request that holds their directions.
        """
        self._run = Run(path)
        manifest, local = self._run.manifest, self._run.manifest.local or {}
        engine = engine or Engine()
        self._placement = place(engine, resolve_device(engine.device))
        self._device = self._placement.device
        self._directions_DH = _directions(self._run)
        self._description = _describe(manifest, engine)
        self._check_shape()
        auto_dtype = "float32" if self._device.type == "cpu" else self._description.dtype
        self._compute_dtype = local.get("engine", {}).get("compute_dtype", auto_dtype)
        self._tallies = [_Tally() for _ in self._run.layers]
        self._notes: list[str] = []
        here = self._description.revision
        if (revision := local.get("model", {}).get("revision", here)) != here:
            self._notes.append(f"the run was made with revision {revision} of {manifest.model_id}, and here it is {here}")

    def read(self, n_prompts: int, findings: list[Finding]) -> Reread:
        """Read so many prompts, spread evenly over the run, and compare; what does not agree is added to the findings."""
        manifest = self._run.manifest
        attention = (manifest.local or {}).get("engine", {}).get("attention", "auto")
        dtype = getattr(torch, self._compute_dtype)
        prompts = spread(self._run.n_prompts, n_prompts)
        with naming_failures(self._device, "Pass --device cpu, or --device-map auto"):
            decoder = load_decoder(self._description, self._placement, dtype, self._description.n_layers, attention)
            for prompt in prompts:
                findings += self._check_prompt(prompt, decoder)
        rows = [tally.figures(layer) for layer, tally in zip(self._run.layers, self._tallies, strict=True) if tally.n_tokens]
        allowed = tolerance(manifest.dtype, self._compute_dtype)
        findings += _judge(rows, allowed, manifest)
        return Reread(prompts, self._compute_dtype, str(self._device), allowed, rows, self._notes)

    def _check_shape(self) -> None:
        """Raise ModelError where the model has too few layers, or another width than the run or its directions."""
        run, description = self._run, self._description
        width = run.width if self._directions_DH is None else self._directions_DH.shape[1]
        if max(run.layers) >= description.n_layers or width != description.hidden_size:
            raise ModelError(
                f"model: {run.manifest.model_id} has {description.n_layers} layers of {description.hidden_size} values here, "
                f"and the run was made with one of {width} values that has the layers {run.layers}"
            )

    def _check_prompt(self, prompt: int, decoder: LoadedDecoder) -> Iterator[Finding]:
        """Read one prompt's stored ids anew and tally the values; findings are of what cannot be read, and of its ids."""
        where = _shard_of(prompt, self._run.manifest)
        try:
            ids_T, stored_LTW = self._run.token_ids(prompt), self._run.prompt(prompt)
        except NotARunError as error:
            yield Finding(where, f"prompt {prompt} cannot be read ({error})")
            return
        yield from _check_ids(where, prompt, ids_T.tolist(), self._run.manifest, self._description, self._notes)
        vocab_size = self._description.vocab_size
        if int(ids_T.min()) < 0 or (vocab_size is not None and int(ids_T.max()) >= vocab_size):
            yield Finding(
                where, f"prompt {prompt} has token ids from {int(ids_T.min())} to {int(ids_T.max())}, of {vocab_size} in the model"
            )
            return

        def tally(position: int, stream_TH: torch.Tensor) -> None:
            self._tallies[position].add(prompt, stream_TH, stored_LTW[position].double(), self._directions_DH)

        read_plain(decoder, ids_T, self._run.layers, tally)


class _Tally:
    """The agreement of one layer, over the tokens of several prompts."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._cosine_sum = self._error_sum = 0.0
        self._worst_cosine = math.inf
        self._worst = (-math.inf, 0, 0)

    def add(self, prompt: int, stream_TH: torch.Tensor, stored_TW: torch.Tensor, directions_DH: torch.Tensor | None) -> None:
        """Add a prompt: its stream as it was read anew, and what is on disk, both float64."""
        size_T = stream_TH.norm(dim=1)
        anew_TW = stream_TH
        if directions_DH is not None:
            anew_TW = stream_TH @ directions_DH.T
            # A component may be next to nothing; what is right or wrong is measured by what a direction has of the stream on average.
            n_directions, hidden_size = directions_DH.shape
            size_T = torch.maximum(anew_TW.norm(dim=1), size_T * math.sqrt(n_directions / hidden_size))
        # Two rows of zeros agree: 0 of 0 is no error here, and a cosine of 1.
        differs_T = (stored_TW != anew_TW).any(dim=1)
        error_T = ((stored_TW - anew_TW).norm(dim=1) / size_T).where(differs_T, 0)
        cosine_T = torch.nn.functional.cosine_similarity(stored_TW, anew_TW, dim=1, eps=0).where(differs_T, 1)
        # A value that is not finite is as wrong as can be.
        error_T, cosine_T = error_T.where(~error_T.isnan(), math.inf), cosine_T.where(~cosine_T.isnan(), 0)
        self.n_tokens += len(error_T)
        self._error_sum += float(error_T.sum())
        self._cosine_sum += float(cosine_T.sum())
        self._worst_cosine = min(self._worst_cosine, float(cosine_T.min()))
        position = int(error_T.argmax())
        self._worst = max(self._worst, (float(error_T[position]), prompt, position), key=lambda worst: worst[0])

    def figures(self, layer: int) -> LayerReread:
        worst_error, prompt, position = self._worst
        mean_cosine, mean_error = self._cosine_sum / self.n_tokens, self._error_sum / self.n_tokens
        return LayerReread(layer, mean_cosine, self._worst_cosine, mean_error, worst_error, prompt, position)


def _judge(rows: Sequence[LayerReread], tolerance: float, manifest: Manifest) -> Iterator[Finding]:
    for row in rows:
        if not (row.mean_error <= tolerance and row.worst_error <= _ONE_TOKEN * tolerance):
            yield Finding(
                _shard_of(row.prompt, manifest),
                f"layer {row.layer} is not what the model computes: a token's relative error is {row.mean_error:.1e} on average and "
                f"{row.worst_error:.1e} at worst (prompt {row.prompt}, position {row.position}), where {tolerance:.0e} and "
                f"{_ONE_TOKEN * tolerance:.0e} are allowed",
            )


def _shard_of(prompt: int, manifest: Manifest) -> str:
    return next(entry.key for entry in manifest.shards if prompt in entry.prompt_indices)


def _check_ids(
    where: str, prompt: int, ids: list[int], manifest: Manifest, description: Description, notes: list[str]
) -> Iterator[Finding]:
    """A prompt's ids against those that its text has: the start token first, cut to the context."""
    local = manifest.local
    if local is None:
        start = start_token_id(description.tokenizer, description.config) if manifest.add_special_tokens else None
        context_length = description.context_length
    else:
        start = (local.get("start_token") or {}).get("id")
        context_length = local.get("engine", {}).get("context_length")
    own = description.tokenizer(manifest.prompts[prompt], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    if local is None and manifest.add_special_tokens and (begun_with := _begun_with(ids, own, start)) != start:
        # Nor does another manifest say which start token a user chose.
        notes.append(f"prompt {prompt} begins with the start token {begun_with}, and the model's own is {start}")
        start = begun_with
    anew = ([] if start is None else [start]) + own
    if context_length is not None:
        anew = anew[: context_length - 1]
    if ids == anew:
        return
    if local is None and ids == anew[: len(ids)]:
        # Only harvest's own manifest says which context a run was cut to.
        notes.append(f"prompt {prompt} was cut to {len(ids)} of its {len(anew)} tokens")
        return
    position = next(
        (place for place, (id_, id_anew) in enumerate(zip(ids, anew, strict=False)) if id_ != id_anew), min(len(ids), len(anew))
    )
    yield Finding(
        where, f"prompt {prompt} has other token ids than its text, from position {position}: {len(ids)} of them, anew {len(anew)}"
    )


def _begun_with(ids: list[int], own: list[int], start: int | None) -> int | None:
    """The id that stands before a text's own ids, all or the first of them; None where none does, `start` where they are not the text's."""
    if ids == own[: len(ids)]:
        return None
    return ids[0] if ids[1:] == own[: len(ids) - 1] else start


def _describe(manifest: Manifest, engine: Engine) -> Description:
    """The model of a run, with its adapter, which may lie elsewhere now. Raises ModelError."""
    adapter = ((manifest.local or {}).get("model", {}).get("adapter") or {}).get("name")
    return read_model(manifest, engine.model_copy(update={"adapter": engine.adapter or adapter, "revision": None}), describe)


def _directions(run: Run) -> torch.Tensor | None:
    """The directions of a run that projects, float64 [D, H]. Raises RequestError where they are not at hand."""
    if run.manifest.contents == "activations":
        return None
    path = RunFolder(run.path).request
    try:
        tensor = HarvestRequest.check(json.loads(path.read_bytes()), limits=False).project_onto
    except (OSError, ValueError):
        tensor = None
    if tensor is None:
        raise RequestError(f"--deep: the directions that a run projects onto stand in its request, and {path} has none; leave --deep out")
    return torch.from_numpy(tensor.directions()).double()
