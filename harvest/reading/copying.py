"""A folder that becomes a copy of a run, file after file: claimed for that one copy, and by one process at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pydantic

from harvest.contract import Manifest
from harvest.errors import CancelledError, FolderError
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.presence import Presence, check_free
from harvest.stop import StopFlag

Command = Literal["export", "fetch"]


@contextmanager
def copying(folder: RunFolder, command: Command, manifest: Manifest, stop: StopFlag) -> Iterator[None]:
    """A folder that is empty, or holds what an earlier attempt at this very copy left, while the files that are missing come into it.

    manifest: that of the copy, which the caller writes last.
    A note in the folder says whose copy it is until the context ends well. Raises FolderError where something else is there.
    """
    claim = json.dumps({"command": command, "run_id": str(manifest.run_id)}).encode()
    _check(folder, claim, manifest)
    durable.make_folder(folder.path)
    with Presence(folder, stop):
        durable.write_whole(folder.copying, claim)
        try:
            yield
        except KeyboardInterrupt:
            raise CancelledError("stopped at once; the files that were finished stay, and the same command goes on with the rest") from None
    with durable.storing(folder.copying):
        folder.copying.unlink()


def _check(folder: RunFolder, claim: bytes, manifest: Manifest) -> None:
    """Raise FolderError where a folder is not the place for a copy, or not for this one."""
    where = f"out: {folder.path}"
    if not folder.path.exists():
        return
    if not folder.path.is_dir():
        raise FolderError(f"{where} is a file; a copy of a run needs a folder of its own")
    check_free(folder)
    if folder.copying.exists():
        if folder.copying.read_bytes() != claim:
            raise FolderError(f"{where} holds an unfinished copy of another run; finish that first, or name another folder")
    elif folder.manifest.exists():
        if not _is_same(folder, manifest):
            raise FolderError(f"{where} holds another run, or the same in other files; name another folder")
    elif not folder.is_vacant:
        raise FolderError(f"{where} is not empty, and what it holds is no copy of this run; name another folder")


def _is_same(folder: RunFolder, manifest: Manifest) -> bool:
    """Whether a folder's manifest is of the same run in the same files."""
    try:
        held = Manifest.model_validate_json(folder.manifest.read_bytes())
    except pydantic.ValidationError:
        return False
    return (held.run_id, held.shards) == (manifest.run_id, manifest.shards)
