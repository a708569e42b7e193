"""A run in a few lines: what its documents and the sizes of its files say, whole or not. Light: neither torch nor zarr is imported."""

import json
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harvest.contract import HarvestJob, Manifest
from harvest.control import status
from harvest.errors import NotARunError
from harvest.output.folder import RunFolder
from harvest.output.job import read_job
from harvest.output.record import Record
from harvest.output.store import no_folder
from harvest.progress import size
from harvest.reading.documents import prompt_lengths, read_manifest, width_of
from harvest.reading.findings import Finding

_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_COLUMNS = 80
_LABEL = 11
_SHOWN_NORMS = 8
_SAVED = "of the process that made the run whole"


@dataclass(frozen=True)
class Summary:
    """What is known of a run without reading its values; None, or empty, where its folder does not say.

    state: the job's status; "done" for a folder with a manifest and no job, "copying" for a copy that is not whole yet.
    n_blocks, hidden_size: of the model. width: values a token, the hidden size or the number of directions.
    n_cut, n_doubled: prompts cut to the context, and those that begin with two start tokens.
    shortest, median, longest: tokens of a prompt, the start token counted.
    nonfinite_tokens: tokens with a value that is not finite, by layer, where there are any.
    stored_bytes: of the shard files that are there; value_bytes: of the values in them, before the codec.
    timings: seconds, of the process that made the run whole.
    mean_token_norm: by layer, the first token of each prompt left out.
    """

    folder: str
    state: str
    model: str | None = None
    error: str | None = None
    repository: str | None = None
    revision: str | None = None
    n_blocks: int | None = None
    hidden_size: int | None = None
    device: str | None = None
    compute_dtype: str | None = None
    store_dtype: str | None = None
    codec: str | None = None
    capture: str | None = None
    contents: str | None = None
    width: int | None = None
    layers: list[int] = field(default_factory=list)
    n_prompts: int | None = None
    n_cut: int | None = None
    n_doubled: int | None = None
    n_tokens: int | None = None
    shortest: int | None = None
    median: float | None = None
    longest: int | None = None
    nonfinite_tokens: dict[str, int] = field(default_factory=dict)
    n_shards: int | None = None
    n_shards_done: int = 0
    stored_bytes: int = 0
    value_bytes: int | None = None
    started_at: str | None = None
    completed_at: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    mean_token_norm: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Bytes of the values over bytes of the files that hold them."""
        return self.value_bytes / self.stored_bytes if self.value_bytes and self.stored_bytes else None

    def to_json(self) -> str:
        """The summary as JSON."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """The summary to read, 80 columns wide: on one screen, however many layers there are."""
        lines = [f"{self.folder}: {self.state}"]
        for label, text in _rows(self):
            lines += textwrap.wrap(
                text,
                _COLUMNS,
                initial_indent=f"{label:{_LABEL}}",
                subsequent_indent=" " * _LABEL,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join([*lines, *_norm_lines(self)])


def summarize(path: str | Path) -> Summary:
    """A run folder of either kind in a few facts, also one that is not whole. Raises NotARunError where there is none."""
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise no_folder(path)
    job = None if read_job(folder) is None else status(folder)
    if folder.manifest.exists():
        manifest = read_manifest(folder)
        if isinstance(manifest, Finding):
            raise NotARunError(f"{folder.manifest}: {manifest.what}")
        return _of_whole(str(path), folder, manifest, job)
    if folder.copying.exists():
        return Summary(
            str(path), "copying", error="a copy of a run was begun; run the same harvest export or harvest fetch again to finish it"
        )
    if job is None:
        raise NotARunError(f"{path}: holds neither the manifest.json nor the job.json of a run; name the folder that --out named")
    return _of_unfinished(str(path), folder, job)


def _of_whole(path: str, folder: RunFolder, manifest: Manifest, job: HarvestJob | None) -> Summary:
    local = manifest.local or {}
    model, engine = local.get("model", {}), local.get("engine", {})
    lengths = [length for entry in manifest.shards for length in prompt_lengths(entry)]
    width = width_of(manifest)
    files = [folder.find(entry.key) for entry in manifest.shards]
    there = [file.stat().st_size for file in files if file.is_file()]
    return Summary(
        folder=path,
        state=job.status if job else "done",
        error=None if len(there) == len(files) else _missing(len(files) - len(there)),
        model=manifest.model_id,
        repository=manifest.hf_repo,
        revision=model.get("revision"),
        n_blocks=model.get("n_layers"),
        hidden_size=model.get("hidden_size"),
        device=local.get("device"),
        compute_dtype=engine.get("compute_dtype"),
        store_dtype=manifest.dtype,
        codec=engine.get("codec"),
        capture=manifest.capture,
        contents=manifest.contents,
        width=width,
        layers=manifest.layer_indices,
        n_prompts=manifest.n_prompts,
        n_cut=len(local["truncated_prompts"]) if "truncated_prompts" in local else None,
        n_doubled=len(local["prompts_with_two_start_tokens"]) if "prompts_with_two_start_tokens" in local else None,
        n_tokens=sum(lengths),
        shortest=min(lengths),
        median=statistics.median(lengths),
        longest=max(lengths),
        nonfinite_tokens=local.get("nonfinite_tokens", {}),
        n_shards=len(files),
        n_shards_done=len(there),
        stored_bytes=sum(there),
        value_bytes=sum(lengths) * len(manifest.layer_indices) * width * _VALUE_BYTES[manifest.dtype],
        timings=job.result.timings.model_dump() if job and job.result else {},
        mean_token_norm=manifest.mean_token_norm,
        **_times(job),
    )


def _of_unfinished(path: str, folder: RunFolder, job: HarvestJob) -> Summary:
    records = [record for index in sorted(folder.recorded()) if (record := Record.read(folder.record(index))) is not None]
    try:
        shard_size = json.loads(folder.request.read_bytes())["shard_size"]
        n_shards = -(-job.n_prompts // shard_size)
    except (OSError, ValueError, TypeError, KeyError):
        n_shards = None
    return Summary(
        folder=path,
        state=job.status,
        error=job.error,
        model=job.model,
        layers=job.layers,
        n_prompts=job.n_prompts,
        n_tokens=sum(record.tokens for record in records),
        n_shards=n_shards,
        n_shards_done=len(records),
        stored_bytes=sum(record.bytes for record in records),
        **_times(job),
    )


def _missing(n: int) -> str:
    return f"{n} shard {'file is' if n == 1 else 'files are'} missing; harvest verify says which"


def _times(job: HarvestJob | None) -> dict[str, Any]:
    times = {"started_at": job and job.started_at, "completed_at": job and job.completed_at}
    return {name: time.isoformat(timespec="seconds") if time else None for name, time in times.items()}


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """A label and a text a row; rows of which nothing is known are left out."""
    is_whole = summary.contents is not None
    if summary.error:
        yield "note", summary.error
    if summary.model:
        yield "model", summary.model + (f", {summary.n_blocks} blocks of {summary.hidden_size} values" if summary.n_blocks else "")
    if summary.repository and summary.repository != summary.model:
        yield "from", summary.repository
    if summary.revision:
        yield "revision", summary.revision
    if summary.device:
        yield "computed", f"in {summary.compute_dtype} on {summary.device}"
    if summary.capture:
        yield "by", summary.capture
    if summary.contents:
        values = "values" if summary.contents == "activations" else "directions"
        codec = f", codec {summary.codec}" if summary.codec else ""
        yield "contents", f"{summary.contents}, {summary.width} {values} a token and layer, {summary.store_dtype}{codec}"
    if summary.layers:
        yield "layers", f"{len(summary.layers)}: {ranges(summary.layers)}"
    if summary.n_prompts is not None:
        faults = [(summary.n_cut, "cut to the context"), (summary.n_doubled, "with two start tokens")]
        yield "prompts", ", ".join([f"{summary.n_prompts:,}", *(f"{count:,} {what}" for count, what in faults if count)])
    if is_whole:
        lengths = f"{summary.shortest:,} to {summary.longest:,} a prompt, median {summary.median:,g}"
        yield "tokens", f"{summary.n_tokens:,} ({lengths})"
    if summary.nonfinite_tokens:
        counts = ", ".join(f"{count} in layer {layer}" for layer, count in summary.nonfinite_tokens.items())
        yield "not finite", f"tokens with such a value: {counts}"
    yield "shards", _shards(summary, is_whole)
    if summary.started_at or summary.completed_at:
        yield "when", _when(summary)
    if summary.timings:
        seconds = ", ".join(f"{name.removesuffix('_s')} {value:.1f} s" for name, value in summary.timings.items())
        yield "timings", f"{seconds} ({_SAVED})"


def _shards(summary: Summary, is_whole: bool) -> str:
    if is_whole:
        ratio = f", {summary.ratio:.2f} times smaller than the {size(summary.value_bytes or 0)} of values" if summary.ratio else ""
        return f"{summary.n_shards}, {size(summary.stored_bytes)}{ratio}"
    of = f" of {summary.n_shards}" if summary.n_shards else ""
    done = f": {summary.n_tokens:,} tokens, {size(summary.stored_bytes)}" if summary.n_shards_done else ""
    return f"{summary.n_shards_done}{of} published{done}"


def _when(summary: Summary) -> str:
    started, completed = (datetime.fromisoformat(time) if time else None for time in (summary.started_at, summary.completed_at))
    words = [f"{verb} {time:%Y-%m-%d %H:%M:%S} UTC" for verb, time in (("started", started), ("ended", completed)) if time]
    return ", ".join(words)


def _norm_lines(summary: Summary) -> Iterator[str]:
    """The mean norms in two lines: of all layers where they fit, or of a few that are spread evenly from the first to the last."""
    norms = list(summary.mean_token_norm.items())
    if not norms:
        return
    shown = norms if len(norms) <= _SHOWN_NORMS else [norms[place] for place in spread(len(norms), _SHOWN_NORMS)]
    cells = [(layer, f"{norm:.5g}") for layer, norm in shown]
    widths = [max(map(len, cell)) + 1 for cell in cells]
    some = "" if len(shown) == len(norms) else f"of {len(shown)} of {len(norms)} layers, "
    yield f"{'mean norm':{_LABEL}}{some}first tokens left out"
    for label, place in (("  layer", 0), ("  norm", 1)):
        yield f"{label:{_LABEL}}" + " ".join(f"{cell[place]:>{width}}" for cell, width in zip(cells, widths, strict=True))


def spread(n: int, n_shown: int) -> list[int]:
    """Places of at most so many of n things, the first and the last among them, spread evenly."""
    if n <= n_shown or n_shown < 2:
        return list(range(min(n, n_shown)))
    return [round(place * (n - 1) / (n_shown - 1)) for place in range(n_shown)]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as a reader writes them: 0-3, 8, 12-13."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
