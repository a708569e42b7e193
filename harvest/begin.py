"""Whose a run folder is: looked at before anything is written there, and then begun, taken up again, or emptied."""

from pathlib import Path

from harvest.asked import folder_stem
from harvest.contract import HarvestJob
from harvest.errors import FolderError
from harvest.output.folder import RunFolder
from harvest.output.job import JobFile, finished_job, read_job
from harvest.output.presence import Presence, live_claims
from harvest.output.process import owner_id
from harvest.output.record import Fingerprint
from harvest.parts import ALONE, Rank
from harvest.prepare import Prepared, prepare
from harvest.progress import Reporter, size
from harvest.request import HarvestRequest
from harvest.settings import Engine
from harvest.stop import StopFlag


def default_folder(root: Path, prepared: Prepared) -> Path:
    """MODEL-DIGEST below a root folder: the same for the same request, so that running it again goes on with it."""
    return root / f"{folder_stem(prepared.request.model)}-{prepared.digest[:10]}"


def prepare_in(
    named: RunFolder | None,
    root: Path,
    request: HarvestRequest,
    engine: Engine,
    reporter: Reporter,
    stop: StopFlag,
    rank: Rank = ALONE,
    anew: bool = False,
) -> tuple[RunFolder, Prepared]:
    """A run's folder, its own below `root` where none is named, and the run prepared for it: as it was begun there, or anew.

    Raises what `prepare` raises.
    """
    held = None if named is None or anew else _begun_with(named)
    prepared = prepare(request, engine, reporter, stop, rank, held)
    stop.check()
    if named is not None:
        return named, prepared
    folder = RunFolder(default_folder(root, prepared))
    if not anew and (held := _begun_with(folder)) not in (None, prepared.fingerprint):
        prepared = prepare(request, engine, reporter, stop, rank, held)
    return folder, prepared


def _begun_with(folder: RunFolder) -> Fingerprint | None:
    """The fingerprint of a run that is gone on with: one that has finished shards, or on which another process works."""
    return folder.fingerprint() if folder.recorded() or live_claims(folder) else None


def look(folder: RunFolder, prepared: Prepared, reporter: Reporter) -> HarvestJob | None:
    """The job of a folder where this request is finished already, else None. Raises FolderError where something else is there."""
    if not folder.exists:
        return None
    check_kind(folder)
    held = folder.fingerprint()
    if folder.copying.exists() or (held is None and folder.has(folder.manifest)):
        raise FolderError(f"out: {folder.name} holds the copy of a run, fetched or exported; name another folder")
    if held is not None and held != prepared.fingerprint:
        differences = _differences(held, prepared.fingerprint)
        if folder.recorded():
            raise FolderError(
                f"out: {folder.name} holds shards of another request ({differences}); name another folder, or start anew with --overwrite"
            )
        reporter.note(f"the folder was begun by another request that finished no shard ({differences}); it is this one's now")
        return None
    return finished_job(folder, prepared.fingerprint, reporter.note)


def check_kind(folder: RunFolder) -> None:
    """Raise FolderError where a path that exists is no place for a run: a file, or a folder of other things."""
    if folder.path.exists() and not folder.path.is_dir():
        raise FolderError(f"out: {folder.path} is a file; a run needs a folder of its own")
    if read_job(folder) is None and not folder.has(folder.request) and folder.fingerprint() is None and not folder.is_vacant:
        raise FolderError(f"out: {folder.name} is not empty and holds no run of harvest; name another folder")


def begin(folder: RunFolder, prepared: Prepared, presence: Presence) -> JobFile:
    """Write the request as resolved and the pending job; an earlier run of the same request keeps its ids.

    Where other processes work on the folder too, what they wrote stays. Raises FolderError where that is of another request.
    """
    others = presence.others()
    folder.remove_temporary([owner_id(), *(owner_id(claim.process) for claim in others)])
    if not others:
        # Readers of a run that is whole look for the manifest, so it goes before what is missing is made anew.
        folder.remove(folder.manifest)
    folder.write_fingerprint(prepared.fingerprint, is_shared=bool(others))
    held = folder.fingerprint()
    if held != prepared.fingerprint:
        raise FolderError(
            f"out: {others[0] if others else 'another process'} works on {folder.name} with another request "
            f"({_differences(held or {}, prepared.fingerprint)}); name another folder"
        )
    request = prepared.request.model_copy(update={"layers": prepared.layers})
    body = request.model_dump_json(indent=2).encode()
    goes_on = folder.has(folder.request) and folder.read(folder.request) == body
    previous = read_job(folder) if goes_on else None
    if not goes_on:
        if folder.has(folder.request) and not others:
            folder.remove(folder.job)
        folder.write(folder.request, body)
    return JobFile.begin(
        folder,
        previous,
        is_shared=bool(others),
        model=request.model,
        n_prompts=len(request.prompts),
        reserved_tokens=prepared.reserved_tokens,
        layers=prepared.layers,
    )


def empty(folder: RunFolder, reporter: Reporter) -> None:
    """Remove a run from its folder, and say what: `--overwrite`. What is not harvest's own stays."""
    sizes = folder.contents()
    if not sizes:
        return
    n_shards = len(folder.recorded())
    reporter.note(
        f"--overwrite: removing {n_shards} finished shard{'' if n_shards == 1 else 's'} and {len(sizes)} files in all "
        f"({size(sum(sizes.values()))}) from {folder.name}"
    )
    for path in sizes:
        folder.remove(path)


def _differences(held: Fingerprint, own: Fingerprint) -> str:
    names = [name for name in sorted(held.keys() | own.keys()) if held.get(name) != own.get(name)]
    if "device" in names and "card" in names:
        # It follows from the device.
        names.remove("card")
    return "; ".join(f"{name}: {held.get(name)!r} there, {own.get(name)!r} here" for name in names)
