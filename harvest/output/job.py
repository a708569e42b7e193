"""job.json: the HarvestJob of a run, rewritten whole at each change of its state."""

import contextlib
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pydantic

from harvest.contract import URL_LIFETIME, HarvestJob, HarvestResult, Timings, utc_now
from harvest.errors import StorageError
from harvest.output.folder import RunFolder
from harvest.output.record import Fingerprint


class JobFile:
    """The job of a run folder, and its file."""

    def __init__(self, folder: RunFolder, job: HarvestJob) -> None:
        self._folder = folder
        self.job = job

    @classmethod
    def begin(cls, folder: RunFolder, previous: HarvestJob | None, is_shared: bool = False, **fields: Any) -> "JobFile":
        """A pending job, written; with the ids and the age of the previous one where this run goes on with it.

        is_shared: other processes work on the same run, so a job that is there is theirs, and stays as it is.
        """
        fresh = {"job_id": uuid4(), "run_id": uuid4(), "created_at": utc_now()}
        kept = {} if previous is None else previous.model_dump(include=set(fresh))
        job = HarvestJob(**{**fresh, **kept, **fields}, status="pending", tokens=None, started_at=None, completed_at=None)
        file = cls(folder, job)
        if previous is None:
            # Of several parts that begin at once one gives the run its ids.
            if not folder.write_new(folder.job, job.to_json().encode()):
                file.refresh()
        elif is_shared:
            file.job = previous
        else:
            file._write()
        return file

    def start(self) -> None:
        """The model is about to be loaded."""
        self.refresh()
        if self.job.status != "running":
            self._change(status="running", tokens=None, started_at=utc_now(), completed_at=None, error=None)

    def finish(self, result: HarvestResult) -> None:
        """All files are in place."""
        self.refresh()
        now = utc_now()
        fields: dict[str, Any] = {"completed_at": now, "tokens": result.tokens, "result": result, "urls_expire_at": now + URL_LIFETIME}
        self._change(status="done", started_at=self.job.started_at or now, error=None, **fields)

    def queue(self) -> None:
        """The run stops here and will be gone on with: by the same command, or by its other parts."""
        self._end(status="pending", tokens=None, started_at=None, completed_at=None)

    def fail(self, error: str) -> None:
        """The run ended before its files were whole. A failed job is charged no tokens."""
        self._end(status="failed", tokens=0, error=error, completed_at=utc_now())

    def cancel(self) -> None:
        """The run was stopped. It is charged what it had reserved where it had started."""
        with contextlib.suppress(StorageError):
            self.refresh()
        tokens = 0 if self.job.started_at is None else self.job.reserved_tokens
        self._end(status="cancelled", tokens=tokens, completed_at=utc_now())

    def _end(self, **fields: Any) -> None:
        # The error that ended the run, such as a full disk, may stand in the way of saying so too; it must not be hidden by another.
        with contextlib.suppress(StorageError):
            self.refresh()
            # Where it is done, another process of the same run made it whole meanwhile.
            if self.job.status != "done":
                self._change(**fields)

    def refresh(self) -> None:
        """The job as it is on disk: other processes of the run change it too."""
        self.job = read_job(self._folder) or self.job

    def _change(self, **fields: Any) -> None:
        self.job = self.job.model_copy(update=fields)
        self._write()

    def _write(self) -> None:
        self._folder.write(self._folder.job, self.job.to_json().encode())


def read_job(folder: RunFolder) -> HarvestJob | None:
    """The job in a folder, or None where there is none that can be read."""
    try:
        return HarvestJob.model_validate_json(folder.read(folder.job))
    except (OSError, pydantic.ValidationError):
        return None


def finished_job(folder: RunFolder, fingerprint: Fingerprint, note: Callable[[str], None] = lambda _: None) -> HarvestJob | None:
    """The job of a finished run of this fingerprint, all of whose files are there, with fresh links; else None.

    note: told why the links end sooner than those of the API, where they do.
    """
    job = read_job(folder)
    if job is None or job.status != "done" or job.result is None or not (folder.has(folder.manifest) and folder.has(folder.stats)):
        return None
    if not all(folder.is_there(index, fingerprint) for index in range(job.result.n_shards)):
        return None
    return with_fresh_links(folder, job, note)


def with_fresh_links(folder: RunFolder, job: HarvestJob, note: Callable[[str], None] = lambda _: None) -> HarvestJob:
    """A done job with links to where its folder lies now, good for seven days from now, as each answer of the API has them.

    note: told why they end sooner than that, where they do.
    """
    if job.result is None:
        return job
    links = folder.fresh_links(job.result.n_shards)
    if links.sooner is not None:
        note(links.sooner)
    return job.model_copy(update={"result": job.result.model_copy(update=links.fields), "urls_expire_at": links.expire_at})


def round_timings(load_s: float, forward_s: float, save_s: float, upload_s: float) -> Timings:
    """Seconds to the millisecond."""
    return Timings(load_s=round(load_s, 3), forward_s=round(forward_s, 3), save_s=round(save_s, 3), upload_s=round(upload_s, 3))
