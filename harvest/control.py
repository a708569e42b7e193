"""What other processes ask of a run: its status, and to cancel it. Light: neither torch nor zarr is imported."""

import time

from harvest.contract import HarvestJob
from harvest.errors import NotARunError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.job import JobFile, read_job, with_fresh_links
from harvest.output.presence import read_process
from harvest.stop import GOES_ON

_LOOK_EVERY_S = 0.1
_CANCEL_WITHIN_S = 600.0
ENDED = ("done", "failed", "cancelled")


def status(folder: RunFolder, wait_s: float = 0.0) -> HarvestJob:
    """The job of a run folder as it is now, with fresh links; waits up to `wait_s` seconds for its status to change.

    A run whose process has died without a word is answered as failed, with the reason. Raises NotARunError where there is no job.
    """
    job = _answer(folder)
    deadline = time.monotonic() + wait_s
    before = job.status
    while job.status == before and job.status not in ENDED and time.monotonic() < deadline:
        time.sleep(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0)))
        job = _answer(folder)
    return job


def working(folder: RunFolder) -> HarvestJob | None:
    """The job of a folder that a process works on now; None where none does."""
    process = read_process(folder)
    return read_job(folder) if process is not None and process.is_alive else None


def cancel(folder: RunFolder) -> HarvestJob:
    """Cancel a queued or running run and answer its job; one that has ended stays as it is. Raises NotARunError where there is no job."""
    job = _read(folder)
    if job.status in ENDED:
        return with_fresh_links(folder, job)
    process = read_process(folder)
    if process is None or not process.is_alive:
        file = JobFile(folder, job)
        file.cancel()
        return file.job
    durable.write_whole(folder.cancel, b"{}")
    deadline = time.monotonic() + _CANCEL_WITHIN_S
    while (job := _answer(folder)).status not in ENDED and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return job


def _answer(folder: RunFolder) -> HarvestJob:
    job = _read(folder)
    if job.status in ENDED:
        return with_fresh_links(folder, job)
    process = read_process(folder)
    if (process is not None and process.is_alive) or (process is None and job.status == "pending"):
        return job
    # Between the two looks the process may have ended as it should.
    job = _read(folder)
    if job.status in ENDED:
        return with_fresh_links(folder, job)
    who = str(process) if process else "the process that worked on it"
    reason = f"{who} ended without a word; {GOES_ON}"
    return job.model_copy(update={"status": "failed", "tokens": 0, "completed_at": process and process.beat_time, "error": reason})


def _read(folder: RunFolder) -> HarvestJob:
    job = read_job(folder)
    if job is None:
        raise NotARunError(f"{folder.path}: holds no job.json of a run; name the folder that --out named")
    return job
