"""What other processes ask of a run: its status, and to cancel it. Light: neither torch nor zarr is imported."""

import time
from collections.abc import Callable

from harvest.contract import HarvestJob
from harvest.errors import NotARunError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.job import JobFile, read_job, with_fresh_links
from harvest.output.presence import claims, live_claims, progress_of
from harvest.progress import how_far
from harvest.stop import GOES_ON

_LOOK_EVERY_S = 0.1
_CANCEL_WITHIN_S = 600.0
ENDED = ("done", "failed", "cancelled")


def status(folder: RunFolder, wait_s: float = 0.0, note: Callable[[str], None] = lambda _: None) -> HarvestJob:
    """The job of a run folder as it is now, with fresh links; waits up to `wait_s` seconds for its status to change.

    A run whose process has died without a word is answered as failed, with the reason. Raises NotARunError where there is no job.
    note: told why the links end sooner than the API's 7 days, where they do.
    """
    job = _answer(folder)
    deadline = time.monotonic() + wait_s
    before = job.status
    while job.status == before and job.status not in ENDED and time.monotonic() < deadline:
        time.sleep(min(folder.look_every_s, max(deadline - time.monotonic(), 0)))
        job = _answer(folder)
    return with_fresh_links(folder, job, note)


def under_way(folder: RunFolder) -> list[str]:
    """How far each process is that works on a folder now, in a line each, a few seconds old."""
    found = [(claim, progress_of(claim)) for claim in live_claims(folder)]
    return [f"{claim}: {how_far(progress)}" for claim, progress in found if progress is not None]


def working(folder: RunFolder) -> HarvestJob | None:
    """The job of a folder that a process works on now; None where none does."""
    return read_job(folder) if live_claims(folder) else None


def cancel(folder: RunFolder) -> HarvestJob:
    """Cancel a queued or running run and answer its job; one that has ended stays as it is. Raises NotARunError where there is no job.

    All processes that work on it are asked to stop, and waited for.
    """
    job = _read(folder)
    if job.status not in ENDED and not folder.sees_processes:
        raise NotARunError(f"{folder.name}: its processes are not known on this machine; run harvest cancel on the one that they run on")
    if live_claims(folder):
        durable.write_whole(folder.cancel, b"{}")
        deadline = time.monotonic() + _CANCEL_WITHIN_S
        while live_claims(folder) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        job = _answer(folder)
    if job.status in ENDED:
        return with_fresh_links(folder, job)
    file = JobFile(folder, _read(folder))
    if not live_claims(folder):
        file.cancel()
    return file.job


def _answer(folder: RunFolder) -> HarvestJob:
    job = _read(folder)
    if job.status in ENDED or not folder.sees_processes:
        return job
    found = claims(folder)
    if any(claim.is_alive for claim in found):
        return job
    # Between the two looks the processes may have ended as they should.
    job = _read(folder)
    if job.status in ENDED:
        return job
    if not found:
        # Whoever ends in order takes its claim away: the rest waits for its parts to be started.
        return job.model_copy(update={"status": "pending", "tokens": None, "started_at": None})
    last = max(found, key=lambda claim: claim.beat_at)
    reason = f"{last} ended without a word; {GOES_ON}"
    return job.model_copy(update={"status": "failed", "tokens": 0, "completed_at": last.beat_at, "error": reason})


def _read(folder: RunFolder) -> HarvestJob:
    job = read_job(folder)
    if job is None:
        raise NotARunError(f"{folder.name}: holds no job.json of a run; name the folder that --out named")
    return job
