"""One run from end to end: the folder claimed, this process's windows read and written, and the run made whole where it is."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from harvest.asked import note_asked
from harvest.begin import begin, check_kind, empty, look, prepare_in
from harvest.contract import HarvestJob
from harvest.decoder import load, load_streamed
from harvest.errors import CancelledError, FolderError, HarvestError, RequestError, RequeuedError, StorageError
from harvest.finish import Clock, make_whole, missing_shards, say_missing
from harvest.input.plan import Window
from harvest.model.blocks import LoadedDecoder
from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.device import naming_failures
from harvest.output.folder import RunFolder
from harvest.output.job import JobFile, read_job, with_fresh_links
from harvest.output.presence import Presence, check_free, live_claims
from harvest.output.space import check_space, needed_bytes
from harvest.output.staged import open_folder
from harvest.output.writers import WindowBuffer, Writers
from harvest.parts import WHOLE, Part, find_rank
from harvest.prepare import Prepared
from harvest.progress import Counted, Reporter, Silent, duration
from harvest.request import HarvestRequest
from harvest.settings import Engine
from harvest.speed import estimate_s, remember
from harvest.stop import GOES_ON, StopFlag
from harvest.stream import StreamReader, make_buffers
from harvest.window import OnRead, WindowReader, read_windows

# What to do about a model that leaves too little room on the device, by whether its blocks are streamed already.
_SMALLER = {False: "pass --weights stream or --device-map auto for a model that is too large for it", True: "use a larger device"}


def run(
    request: HarvestRequest,
    out: str | Path | RunFolder | None = None,
    engine: Engine | None = None,
    reporter: Reporter | None = None,
    stop: StopFlag | None = None,
    root: str | Path = "runs",
    part: Part = WHOLE,
    overwrite: bool = False,
    space_check: bool = True,
) -> HarvestJob:
    """Read the residual stream of a request's prompts and write it to a run folder; answers the job.

    out: the run folder, or an object store's s3://BUCKET/PREFIX (also gs:// and az://); by default MODEL-DIGEST below `root`, where the
        digest tells requests apart.
    stop: looked at between batches; a stop that is asked for ends the run with its error.
    part: the share of the windows that this process takes; a rank of a launcher takes its share of that. Whoever finds all shards
        there makes the run whole, and the answer is done; one that ends before others answers a job that is not done yet.
    overwrite: remove what a run left in the folder, and start anew.
    space_check: whether too little space on the disk is an error before the model is loaded.
    The same request on an unfinished folder finishes it, and on a finished one answers what is there.

    Raises RequestError before anything is computed, CancelledError where the run was stopped, and another HarvestError where it fails:
    the job in the folder then says `cancelled`, `pending` or `failed`, and what was published stays. KeyboardInterrupt becomes
    CancelledError.
    """
    counted, stop, engine = Counted(reporter or Silent()), stop or StopFlag(), engine or Engine()
    reporter = counted
    rank = find_rank()
    share = rank.share(part)
    if overwrite and not share.is_whole:
        raise RequestError(f"overwrite: {share} would remove what the others write; start anew in one process, or remove the folder first")
    named = None if out is None else open_folder(out, stop=stop)
    folder, prepared = prepare_in(named, Path(root), request, engine, reporter, stop, rank, overwrite)
    reporter.note(f"run folder: {folder.name}" if share.is_whole else f"run folder: {folder.name}, {share}")
    check_free(folder, share)
    if overwrite and folder.exists:
        check_kind(folder)
    elif finished := look(folder, prepared, reporter):
        return _answer(finished, folder, prepared, engine, reporter)
    try:
        folder.make()
    except StorageError as error:
        raise FolderError(f"out: {error}") from error
    with _leaving_in_order(folder), Presence(folder, stop, share, reporter.note) as presence:
        presence.shows = counted.so_far
        if overwrite:
            empty(folder, reporter)
        elif finished := look(folder, prepared, Silent()):
            # Another process made it whole between the two looks.
            return _answer(finished, folder, prepared, engine, reporter)
        job = begin(folder, prepared, presence)
        with _telling(job, presence, folder, prepared, reporter):
            clock = Clock()
            _carry_out(folder, prepared, share, job, clock, space_check, reporter, stop)
            missing = missing_shards(folder, prepared)
            if not missing:
                return with_fresh_links(folder, make_whole(folder, prepared, engine, job, clock), reporter.note)
            say_missing(missing, share, presence, prepared, reporter)
    return read_job(folder) or job.job


@contextmanager
def _leaving_in_order(folder: RunFolder) -> Iterator[None]:
    """Once this process has given its claim back: a run that nobody works on any more, and that is not whole, waits to be gone on with."""
    try:
        yield
    finally:
        with suppress(OSError, StorageError):
            job = read_job(folder)
            if job is not None and job.status == "running" and not live_claims(folder):
                JobFile(folder, job).queue()


def _answer(finished: HarvestJob, folder: RunFolder, prepared: Prepared, engine: Engine, reporter: Reporter) -> HarvestJob:
    note_asked(folder, prepared.request, engine)
    reporter.note("this run is finished already; nothing was done")
    return finished


@contextmanager
def _telling(job: JobFile, presence: Presence, folder: RunFolder, prepared: Prepared, reporter: Reporter) -> Iterator[None]:
    """Write down in the job how the run ended where it did not end well, and raise the error on."""
    try:
        yield
    except KeyboardInterrupt:
        job.cancel()
        raise CancelledError(f"stopped at once; {GOES_ON}") from None
    except CancelledError as error:
        if not isinstance(error, RequeuedError):
            job.cancel()
        with suppress(OSError, StorageError):
            reporter.note(f"{len(folder.recorded())} of {len(prepared.plan.shards)} shards are finished")
        raise
    except Exception as error:
        # What is wrong, such as too many open files, may stand in the way of this too; it must not be hidden by another error.
        with suppress(OSError, StorageError):
            # Where another process has taken this one's place, the job is that one's too.
            if presence.holds:
                job.fail(str(error) if isinstance(error, HarvestError) else f"{type(error).__name__}: {error}")
        raise


def _carry_out(
    folder: RunFolder, prepared: Prepared, share: Part, job: JobFile, clock: Clock, space_check: bool, reporter: Reporter, stop: StopFlag
) -> None:
    """Run this process's windows whose shards are not published yet, and see all its shards to where the run lies."""
    units = [unit for number, unit in enumerate(prepared.plan.units()) if share.takes(number)]
    shards = {piece.shard.index: piece.shard for unit in units for window in unit for piece in window.pieces}
    done = _find_done(folder, prepared, shards, reporter, stop)
    if done:
        reporter.note(f"{len(done)} of {len(shards)} shards are {folder.where} already")
    job.start()
    todo = [window for unit in units for window in unit if window.is_left(done)]
    with folder.carrying(done, stop, reporter.note):
        if todo:
            if space_check:
                _check_space(folder, prepared, done)
            _compute(folder, prepared, todo, done, sum(window.n_tokens for unit in units for window in unit), clock, reporter, stop)
        left = time.monotonic()
    # What was left to be uploaded when the last shard was written.
    clock.wait_s += time.monotonic() - left
    clock.upload_s = folder.upload_s
    if todo or clock.upload_s:
        reporter.note(clock.say())


def _check_space(folder: RunFolder, prepared: Prepared, done: set[int]) -> None:
    """Raise StorageError where the disk has no room for the shards that no process has written yet, as many as lie there at once."""
    written = done | folder.recorded()
    unwritten = [shard for shard in prepared.plan.shards if shard.index not in written]
    check_space(folder, needed_bytes(prepared.layout, unwritten, prepared.reserved_tokens, folder.most_shards))


def _compute(
    folder: RunFolder,
    prepared: Prepared,
    todo: Sequence[Window],
    done: set[int],
    n_tokens: int,
    clock: Clock,
    reporter: Reporter,
    stop: StopFlag,
) -> None:
    """Load the model and run windows. n_tokens: of all windows of this process, those too whose shards are there already."""
    started = time.monotonic()
    device = torch.device(prepared.settings.device)
    streams = prepared.settings.weights == "stream"
    # Kernels that are compiled during the run are launched on the current card, whichever card their tensors are on.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with naming_failures(device, f"Lower --batch-tokens or --window-bytes, {_SMALLER[streams]}, or free memory there"), current:
        decoder = load_streamed(prepared, reporter, stop) if streams else load(prepared, reporter)
        clock.load_s = time.monotonic() - started
        stop.check()
        if isinstance(decoder, BlockwiseDecoder) and (seconds := estimate_s(prepared)) is not None:
            reporter.note(f"about {duration(seconds)} for the whole run, by the last of its kind on this machine")
        reporter.begin(n_tokens, n_tokens - sum(window.n_tokens for window in todo))
        try:
            _run_windows(folder, prepared, decoder, todo, done, clock, reporter, stop)
        finally:
            reporter.end()
    read_s = clock.forward_s - clock.starved_s + clock.wait_s
    remember(prepared, sum(window.n_tokens for window in todo), clock.load_s, read_s, clock.weights_s / len(todo))


def _find_done(folder: RunFolder, prepared: Prepared, shards: Iterable[int], reporter: Reporter, stop: StopFlag) -> set[int]:
    """The shards of this process that are published and still what they were; what is not is said, and made anew."""
    done: set[int] = set()
    damages: list[str] = []
    for index in shards:
        stop.check()
        if folder.finished(index, prepared.fingerprint, damages.append):
            done.add(index)
    if damages:
        shown = "; ".join(damages[:5]) + (f"; and {len(damages) - 5} more" if len(damages) > 5 else "")
        reporter.note(f"made anew: {shown}")
    return done


def _run_windows(
    folder: RunFolder,
    prepared: Prepared,
    decoder: LoadedDecoder | BlockwiseDecoder,
    todo: Sequence[Window],
    done: set[int],
    clock: Clock,
    reporter: Reporter,
    stop: StopFlag,
) -> None:
    """Read windows, and write their shards while the next windows are read."""
    buffers = make_buffers(prepared, todo)
    if buffers.lacks_pinned:
        reporter.note("warning: no memory could be pinned for the captured rows, so copies from the card are slower. See `ulimit -l`")

    def check() -> None:
        stop.check()
        writers.check()

    def waited(seconds: float) -> None:
        clock.wait_s += seconds
        reporter.waited(seconds)

    def submit(window: Window, buffer: WindowBuffer, lowered: int | None) -> None:
        writers.submit(window, buffer, done.__contains__, lowered)

    with (
        Writers(folder, prepared.layout, prepared.tokens, prepared.fingerprint, reporter.wrote) as writers,
        _reader(prepared, decoder, todo, reporter, stop, submit) as reader,
    ):
        started = time.monotonic()
        read_windows(reader, buffers, todo, check, waited)
        ended = time.monotonic()
        clock.forward_s = ended - started - clock.wait_s
        if isinstance(reader, StreamReader):
            clock.weights_s, clock.starved_s = reader.feed.read_s, reader.feed.wait_s
    # What was left to be written when the last window was read.
    clock.wait_s += time.monotonic() - ended
    clock.save_s = writers.busy_s


def _reader(
    prepared: Prepared,
    decoder: LoadedDecoder | BlockwiseDecoder,
    todo: Sequence[Window],
    reporter: Reporter,
    stop: StopFlag,
    on_read: OnRead,
) -> WindowReader | StreamReader:
    """Return what reads windows: through a model that is loaded, or one whose blocks are streamed."""
    if isinstance(decoder, BlockwiseDecoder):
        return StreamReader(prepared, decoder, todo, reporter, stop, on_read)
    return WindowReader(prepared, decoder, reporter, stop, on_read)
