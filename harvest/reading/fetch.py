"""The files of a done job, downloaded by its links into a folder that `harvest.open` reads: harvest's own, and those of the hosted API."""

import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pydantic

from harvest.checks import check
from harvest.contract import HarvestJob, HarvestResult, Manifest, Timings
from harvest.errors import DownloadError, RequestError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.job import read_job, with_fresh_links
from harvest.progress import Reporter, Silent
from harvest.reading.copying import copying
from harvest.reading.links import check_link, download, shown
from harvest.stop import StopFlag

# A shard's name in a folder. What else stands there, and temporary files, have other names.
_SHARD_NAME = re.compile(r"shard_[0-9]+(\.[0-9A-Za-z]+)+")


def read_answer(path: str | Path) -> HarvestJob:
    """The job in a file, or on standard input for "-": an answer of the API, or a run's job.json. Raises RequestError.

    Keys that this harvest does not know are left out, so that an answer with more of them can be fetched too.
    """
    try:
        body = json.loads(sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes())
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror or error}); name a file that holds a job, or - for standard input"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: is not JSON that can be read ({error})") from None
    job = _known(HarvestJob, body)
    if isinstance(job, dict) and isinstance(job.get("result"), dict):
        job["result"] = result = _known(HarvestResult, job["result"])
        result["timings"] = _known(Timings, result.get("timings"))
    return check(HarvestJob, job)


def fetch(job: HarvestJob, out: str | Path, reporter: Reporter | None = None, stop: StopFlag | None = None) -> HarvestJob:
    """Download a done job's files into a folder of their own; answers the job, with links to the files there.

    A second call goes on where the first stopped, in the middle of a file too; on a whole folder it answers at once.
    Raises RequestError where the job has no files, FolderError where the folder holds something else, DownloadError where a link is
    refused or gives something else than it should, StorageError where a file cannot be written, and what `stop` asks for.
    """
    reporter, stop = reporter or Silent(), stop or StopFlag()
    result = _result(job)
    folder = RunFolder(Path(out))
    if (held := _finished(folder, job)) is not None:
        reporter.note("this job was fetched already; nothing was done")
        return with_fresh_links(folder, held)
    data = _download_manifest(result.manifest_url, folder, stop)
    manifest = _read_manifest(data, result)
    files = _places(manifest, result)
    with copying(folder, "fetch", manifest, stop):
        _download_all(folder, files, _checksums(manifest), result.bytes_written, reporter, stop)
        answer = with_fresh_links(folder, job)
        durable.write_whole(folder.job, answer.to_json().encode())
        durable.write_whole(folder.manifest, data)
    return answer


def _known(model: type[pydantic.BaseModel], body: Any) -> Any:
    """An object without the keys that a model does not have; anything else as it is."""
    return {name: value for name, value in body.items() if name in model.model_fields} if isinstance(body, dict) else body


def _result(job: HarvestJob) -> HarvestResult:
    """The result of a job that is done, its links checked. Raises RequestError."""
    if job.result is None:
        end = {"failed": f"it failed: {job.error}", "cancelled": "it was cancelled"}.get(job.status, "ask for it again until it is done")
        raise RequestError(f"job: {job.job_id} is {job.status} and has no files yet to fetch; {end}")
    for link in (job.result.manifest_url, job.result.stats_url, *job.result.shard_urls):
        check_link(link)
    return job.result


def _finished(folder: RunFolder, job: HarvestJob) -> HarvestJob | None:
    """The job of a folder that holds all files of this one, else None."""
    held = read_job(folder)
    if held is None or held.job_id != job.job_id or not folder.manifest.exists() or folder.copying.exists():
        return None
    try:
        keys = [entry.key for entry in Manifest.model_validate_json(folder.manifest.read_bytes()).shards]
    except pydantic.ValidationError:
        return None
    return held if folder.stats.is_file() and all(folder.find(key).is_file() for key in keys) else None


def _download_manifest(link: str, folder: RunFolder, stop: StopFlag) -> bytes:
    """The manifest says which files there are, so it comes first; it is written last, since it says that they are there."""
    data = io.BytesIO()
    download(link, data, folder.manifest, lambda _n_bytes: None, stop.check)
    return data.getvalue()


def _read_manifest(data: bytes, result: HarvestResult) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise DownloadError(f"{shown(result.manifest_url)}: is no manifest of layout 2 ({where}: {first['msg']})") from None
    if not len(manifest.shards) == len(result.shard_urls) == result.n_shards:
        raise DownloadError(
            f"{shown(result.manifest_url)}: lists {len(manifest.shards)} shards, and the job has {len(result.shard_urls)} links of "
            f"{result.n_shards} shards; ask for the job again and fetch with the new answer"
        )
    return manifest


def _places(manifest: Manifest, result: HarvestResult) -> dict[str, str]:
    """The links by the place below the folder where each file goes: stats, and shards. Raises DownloadError for a place outside."""
    places = {"stats.safetensors": result.stats_url}
    for entry, link in zip(manifest.shards, result.shard_urls, strict=True):
        key = PurePosixPath(entry.key)
        # harvest's own keys are places below the run folder; the API's begin with a place in its own storage, which is nothing here.
        place = f"shards/{key.name}" if manifest.local is not None else key.name
        is_own = manifest.local is None or entry.key == place
        if not is_own or _SHARD_NAME.fullmatch(key.name) is None or place in places:
            raise DownloadError(
                f"{shown(result.manifest_url)}: the shard key {entry.key!r} was given; a key ends in a name of its own such as "
                "shard_00000.safetensors, and harvest's own begin with shards/ alone"
            )
        places[place] = link
    return places


def _checksums(manifest: Manifest) -> Mapping[str, str]:
    """The SHA-256 of each file by its place, where harvest made the run; the API's manifest holds none."""
    checksums = (manifest.local or {}).get("checksums")
    found = checksums if isinstance(checksums, dict) else {}
    return {place: str(value).removeprefix("sha256:") for place, value in found.items()}


def _download_all(
    folder: RunFolder, files: Mapping[str, str], checksums: Mapping[str, str], n_bytes: int, reporter: Reporter, stop: StopFlag
) -> None:
    """Download the files that are not there whole. n_bytes: of all files, as the job says it."""
    missing = {}
    for place, link in files.items():
        path = folder.path / place
        durable.make_folder(path.parent)
        if not path.is_file() or (place in checksums and durable.file_sha256(path) != checksums[place]):
            missing[path] = link
    done = [path for place in files if (path := folder.path / place) not in missing]
    partial = [path for path in map(durable.partial_name, missing) if path.is_file()]
    if done or partial:
        reporter.note(f"{len(done)} of {len(files)} files are there already, and {len(partial)} in part")
    reporter.begin(n_bytes, sum(path.stat().st_size for path in done + partial))
    try:
        for path, link in missing.items():
            _download_file(link, path, checksums.get(path.relative_to(folder.path).as_posix()), reporter, stop)
    finally:
        reporter.end()


def _download_file(link: str, path: Path, sha256: str | None, reporter: Reporter, stop: StopFlag) -> None:
    """Download and publish one file."""
    with durable.growing(path) as file:
        download(link, file, path, reporter.advance, stop.check)
        partial = durable.partial_name(path)
        if sha256 is not None and durable.file_sha256(partial) != sha256:
            partial.unlink()
            raise DownloadError(
                f"{shown(link)}: its bytes are not those that the manifest tells of; run the same command again to fetch it anew"
            )
