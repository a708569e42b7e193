"""One run from end to end: the folder claimed, windows read and written, and the documents that make the run whole."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from harvest.contract import HarvestJob, HarvestResult
from harvest.errors import CancelledError, FolderError, HarvestError, StorageError
from harvest.model.capture import Capture
from harvest.model.load import load_decoder
from harvest.model.soundness import check_stream
from harvest.model.transfer import Transfer
from harvest.output import durable
from harvest.output.folder import Record, RunFolder
from harvest.output.job import JobFile, make_links, read_job, round_timings, with_fresh_links
from harvest.output.manifest import make_manifest, shard_entries, versions
from harvest.output.presence import Presence, read_process
from harvest.output.shard import read_sums
from harvest.output.stats import RunStats, combine
from harvest.output.writers import WindowBuffers, Writers
from harvest.prepare import Prepared, prepare
from harvest.progress import Reporter, Silent
from harvest.request import HarvestRequest
from harvest.settings import Engine
from harvest.stop import GOES_ON, StopFlag
from harvest.window import read_window


@dataclass
class _Clock:
    """Seconds that a run spent loading, computing and saving."""

    load_s: float = 0.0
    forward_s: float = 0.0
    save_s: float = 0.0


def run(
    request: HarvestRequest,
    out: str | Path | None = None,
    engine: Engine | None = None,
    reporter: Reporter | None = None,
    stop: StopFlag | None = None,
    root: str | Path = "runs",
) -> HarvestJob:
    """Read the residual stream of a request's prompts and write it to a run folder; answers the job, done.

    out: the run folder; by default MODEL-DIGEST below `root`, where the digest tells requests apart.
    stop: looked at between batches; a stop that is asked for ends the run with its error.
    The same request on an unfinished folder finishes it, and on a finished one answers what is there.

    Raises RequestError before anything is computed, CancelledError where the run was stopped, and another HarvestError where it fails:
    the job in the folder then says `cancelled` or `failed`, and what was published stays. KeyboardInterrupt becomes CancelledError.
    """
    reporter = reporter or Silent()
    stop = stop or StopFlag()
    prepared = prepare(request, engine or Engine(), reporter)
    stop.check()
    folder = RunFolder(Path(out) if out is not None else default_folder(Path(root), prepared))
    reporter.note(f"run folder: {folder.path}")
    finished = _claim(folder, prepared, reporter)
    if finished is not None:
        reporter.note("this run is finished already; nothing was done")
        return finished
    try:
        folder.make()
    except StorageError as error:
        raise FolderError(f"out: {error}") from error
    with Presence(folder, stop):
        job = _begin(folder, prepared)
        try:
            return with_fresh_links(folder, _carry_out(folder, prepared, job, reporter, stop))
        except KeyboardInterrupt:
            job.cancel()
            raise CancelledError(f"stopped at once; {GOES_ON}") from None
        except CancelledError:
            job.cancel()
            reporter.note(f"{folder.n_records()} of {len(prepared.plan.shards)} shards are finished")
            raise
        except HarvestError as error:
            job.fail(str(error))
            raise
        except Exception as error:
            job.fail(f"{type(error).__name__}: {error}")
            raise


def default_folder(root: Path, prepared: Prepared) -> Path:
    """MODEL-DIGEST below a root folder: the same for the same request, so that running it again goes on with it."""
    name = prepared.request.model.rstrip("/").replace("\\", "/").split("/")[-1].lower() or "model"
    return root / f"{name}-{prepared.digest[:10]}"


def _claim(folder: RunFolder, prepared: Prepared, reporter: Reporter) -> HarvestJob | None:
    """The job of a folder where this request is finished already, else None. Raises FolderError where something else is there."""
    if not folder.path.exists():
        return None
    if not folder.path.is_dir():
        raise FolderError(f"out: {folder.path} is a file; a run needs a folder of its own")
    process = read_process(folder)
    if process is not None and process.is_alive:
        raise FolderError(f"out: {process} is working on {folder.path}; wait for it, stop it with harvest cancel, or name another folder")
    job = read_job(folder)
    if job is None and any(folder.path.iterdir()) and not folder.request.exists():
        raise FolderError(f"out: {folder.path} is not empty and holds no run of harvest; name another folder")
    held = folder.fingerprint()
    if folder.copying.exists() or (held is None and folder.manifest.exists()):
        raise FolderError(f"out: {folder.path} holds the copy of a run, fetched or exported; name another folder")
    if held is not None and held != prepared.fingerprint:
        differences = "; ".join(
            f"{name}: {held.get(name)!r} there, {prepared.fingerprint.get(name)!r} here"
            for name in sorted(held.keys() | prepared.fingerprint.keys())
            if held.get(name) != prepared.fingerprint.get(name)
        )
        if folder.n_records():
            raise FolderError(f"out: {folder.path} holds shards of another request ({differences}); name another folder")
        reporter.note(f"the folder was begun by another request that finished no shard ({differences}); it is this one's now")
        return None
    if held is None or job is None or job.status != "done" or not folder.manifest.exists():
        return None
    if not all(folder.is_there(shard.index) for shard in prepared.plan.shards):
        # The manifest says that the run is whole, so it goes before what is missing is made anew.
        durable.remove(folder.manifest)
        return None
    return with_fresh_links(folder, job)


def _begin(folder: RunFolder, prepared: Prepared) -> JobFile:
    """Make the folder, write the request as resolved and the pending job; an earlier run of the same request keeps its ids."""
    request = prepared.request.model_copy(update={"layers": prepared.layers})
    body = request.model_dump_json(indent=2).encode()
    folder.remove_temporary()
    goes_on = folder.request.exists() and folder.request.read_bytes() == body
    previous = read_job(folder) if goes_on else None
    durable.write_whole(folder.request, body)
    folder.write_fingerprint(prepared.fingerprint)
    return JobFile.begin(
        folder,
        previous,
        model=request.model,
        n_prompts=len(request.prompts),
        reserved_tokens=prepared.reserved_tokens,
        layers=prepared.layers,
    )


def _carry_out(folder: RunFolder, prepared: Prepared, job: JobFile, reporter: Reporter, stop: StopFlag) -> HarvestJob:
    """Load the model, run the windows that are not on disk yet, and write the documents."""
    clock = _Clock()
    records = {shard.index: folder.finished(shard.index, prepared.fingerprint) for shard in prepared.plan.shards}
    done = {index for index, record in records.items() if record is not None}
    if done:
        reporter.note(f"{len(done)} of {len(records)} shards are on disk already")
    job.start()
    if len(done) < len(records):
        started = time.monotonic()
        decoder = load_decoder(
            prepared.description, torch.device(prepared.settings.device), getattr(torch, prepared.settings.compute_dtype)
        )
        clock.load_s = time.monotonic() - started
        stop.check()
        longest = prepared.plan.lengths.argmax()
        check_stream(decoder, prepared.description.n_layers, prepared.tokens.of(int(longest)))
        _run_windows(folder, prepared, decoder, done, clock, reporter, stop)
    stats = _write_stats(folder, prepared)
    published = [folder.published(shard.index) for shard in prepared.plan.shards]
    _write_manifest(folder, prepared, job.job, stats, published)
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


def _run_windows(
    folder: RunFolder, prepared: Prepared, decoder: torch.nn.Module, done: set[int], clock: _Clock, reporter: Reporter, stop: StopFlag
) -> None:
    """Read every window that has a shard to write, and write its shards beside the next window's forward passes."""
    plan, layout, settings = prepared.plan, prepared.layout, prepared.settings
    todo = [window for window in plan.windows if any(piece.shard.index not in done for piece in window.pieces)]
    n_todo = sum(window.n_tokens for window in todo)
    buffers = WindowBuffers(todo, layout, settings.window_bytes)
    reporter.begin(len(prepared.tokens.ids), len(prepared.tokens.ids) - n_todo)
    try:
        with (
            _capture(prepared, decoder) as capture,
            Writers(folder, layout, prepared.tokens, prepared.fingerprint, reporter.wrote) as writers,
        ):
            transfer = Transfer(torch.device(settings.device))
            for window in todo:
                buffer = buffers.acquire(window.n_tokens, writers.check)
                started = time.monotonic()
                read_window(window, buffer, prepared, capture, transfer, reporter, stop)
                clock.forward_s += time.monotonic() - started
                writers.submit(window, buffer, done.__contains__)
        clock.save_s = writers.busy_s
    finally:
        reporter.end()


def _capture(prepared: Prepared, decoder: torch.nn.Module) -> Capture:
    description = prepared.description
    store_dtype = getattr(torch, prepared.settings.store_dtype)
    return Capture(decoder, prepared.layers, description.n_layers, description.hidden_size, store_dtype, prepared.directions_DH)


def _write_stats(folder: RunFolder, prepared: Prepared) -> RunStats:
    """Add up the shards' sums and write stats.safetensors."""
    shards = (read_sums(folder.shard(shard.index), prepared.layout) for shard in prepared.plan.shards)
    stats = combine(shards, n_counted=len(prepared.tokens.ids) - len(prepared.request.prompts))
    durable.write_whole(folder.stats, stats.to_safetensors(prepared.layers))
    return stats


def _write_manifest(folder: RunFolder, prepared: Prepared, job: HarvestJob, stats: RunStats, published: Sequence[Record]) -> None:
    layout, tokens, description = prepared.layout, prepared.tokens, prepared.description
    start = tokens.start_token_id
    local = {
        "versions": versions(),
        "model": {"revision": description.revision, "n_layers": description.n_layers, "hidden_size": description.hidden_size},
        "device": _device_name(prepared.settings.device),
        "engine": asdict(prepared.settings),
        "start_token": None if start is None else {"id": start, "text": description.tokenizer.convert_ids_to_tokens(start)},
        "storage": layout.storage(),
        "checksums": {folder.shard_key(record.shard): f"sha256:{record.sha256}" for record in published}
        | {folder.stats.name: f"sha256:{durable.file_sha256(folder.stats)}"},
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


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
