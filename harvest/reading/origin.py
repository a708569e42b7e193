"""The model that a run was made with, found again."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from harvest.contract import Manifest
from harvest.errors import ModelError
from harvest.model.sources import Source, find_model
from harvest.settings import Engine

Read = TypeVar("Read")


def read_model(manifest: Manifest, engine: Engine, read: Callable[[Source], Read]) -> Read:
    """What `read` makes of a run's model: by the id that its user wrote, or else by the place where it was found then.

    A model of the Hub is read at the run's commit. Raises ModelError where neither is to be had.
    """
    commit = (manifest.local or {}).get("model", {}).get("revision", "")

    def find(name: str) -> Read:
        source = find_model(name, engine)
        is_commit = not source.is_local and re.fullmatch(r"[0-9a-f]{40}", commit) is not None
        return read(replace(source, revision=commit) if is_commit else source)

    try:
        return find(manifest.model_id)
    except ModelError:
        if manifest.hf_repo == manifest.model_id:
            raise
        return find(manifest.hf_repo)
