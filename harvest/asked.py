"""What a command asks for, in a digest that takes neither torch nor a tokenizer: a finished run answers it at once."""

import glob
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from harvest.contract import HarvestJob
from harvest.errors import ModelError, StorageError
from harvest.model.revision import cached_commit
from harvest.model.sources import Source, adapter_place, find_model
from harvest.output.folder import RunFolder
from harvest.output.job import finished_job
from harvest.request import HarvestRequest
from harvest.settings import Engine


def digest_prompts(texts: Sequence[str]) -> str:
    """A digest of texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return f"sha256:{digest.hexdigest()}"


def folder_stem(model: str) -> str:
    """What the names of a model's default folders begin with."""
    return model.rstrip("/").replace("\\", "/").split("/")[-1].lower() or "model"


def note_asked(folder: RunFolder, request: HarvestRequest, engine: Engine) -> None:
    """Write down beside a finished run what was asked for, so that the same question finds its answer. No harm where it cannot be."""
    digest = _asked(request, engine)
    if digest is None or _read(folder) == digest:
        return
    try:
        folder.write(folder.asked, json.dumps({"asked": digest}).encode())
    except StorageError:
        # A run on a read-only disk is found the longer way.
        return


def find_answer(
    request: HarvestRequest,
    engine: Engine,
    out: Path | RunFolder | None,
    root: Path,
    note: Callable[[str], None] = lambda _: None,
) -> HarvestJob | None:
    """The job of a finished run of just this request and engine, in `out` or below `root`; None where a closer look is needed."""
    digest = _asked(request, engine)
    if digest is None:
        return None
    paths = [out] if out is not None else sorted(root.glob(f"{glob.escape(folder_stem(request.model))}-*"))
    for folder in (path if isinstance(path, RunFolder) else RunFolder(path) for path in paths):
        if _read(folder) == digest and not folder.copying.exists():
            fingerprint = folder.fingerprint()
            if fingerprint is not None and (job := finished_job(folder, fingerprint, note)):
                return job
    return None


def _asked(request: HarvestRequest, engine: Engine) -> str | None:
    """The digest of a request, an engine, and the state of the model's files; None where that state cannot be told."""
    try:
        state = _state(find_model(request.model, engine))
    except (ModelError, OSError):
        return None
    # Directions are arrays of the request, and its dump holds them as text.
    fields = request.model_dump(mode="json", exclude={"prompts"})
    body = {"request": fields, "prompts": digest_prompts(request.prompts), "engine": engine.model_dump(mode="json"), "model": state}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _state(source: Source) -> list[object]:
    """What changes when a model's files do, and those of the adapter on it."""
    if source.is_tiny:
        return [source.location]
    found: list[object] = [source.gguf_file]
    found += (
        _files(source.location, source.gguf_file) if source.is_local else [source.location, cached_commit(source.location, source.revision)]
    )
    if source.adapter is not None:
        folder, repository, revision = adapter_place(source.adapter)
        found += [repository, cached_commit(repository, revision)] if folder is None else _files(str(folder))
    return found


def _files(folder: str, only: str | None = None) -> list[object]:
    """The names, sizes and times of a folder's files."""
    place = Path(folder)
    paths = [place / only] if only else sorted(place.iterdir())
    return [folder, *((path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in paths if path.is_file())]


def _read(folder: RunFolder) -> str | None:
    try:
        return str(json.loads(folder.read(folder.asked))["asked"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
