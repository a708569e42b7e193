"""The models that have a short id: those of configs/models.toml, and over them the user's own."""

import functools
import os
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harvest.checks import check
from harvest.errors import ModelError, RequestError
from harvest.settings import Dtype, cache_folder


class ModelEntry(BaseModel):
    """One model of the registry. configs/models.toml explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    repository: str | None = None
    folder: str | None = None
    made_by: str | None = None
    context_length: int | None = Field(default=None, ge=2)
    dtype: Dtype | None = None
    n_layers: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.repository is None) == (self.folder is None):
            raise ValueError("an entry has either a repository or a folder")
        return self

    @property
    def local_folder(self) -> Path | None:
        """The folder of a model that is not on the Hub: absolute, or below harvest's cache."""
        return None if self.folder is None else cache_folder() / Path(self.folder).expanduser()

    @property
    def is_here(self) -> bool:
        """Whether its files are on this machine: in its folder, or with their index in the Hub's cache."""
        if self.repository is None:
            folder = self.local_folder
            return folder is not None and (folder / "config.json").is_file()
        from huggingface_hub import try_to_load_from_cache

        names = ("model.safetensors", "model.safetensors.index.json")
        return any(isinstance(try_to_load_from_cache(self.repository, name), str) for name in names)


@functools.cache
def registry() -> dict[str, ModelEntry]:
    """The entries by id. Raises ModelError for a file of the user's that cannot be read or has a wrong entry."""
    # In a wheel the folder travels inside the package; in a checkout it lies beside it.
    package = Path(__file__).parent.parent
    folder = next(place for place in (package / "configs", package.parent / "configs") if place.is_dir())
    entries = _read(folder / "models.toml")
    named = os.environ.get("HARVEST_MODELS")
    own = Path(named) if named else Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "harvest" / "models.toml"
    if named or own.exists():
        entries |= _read(own)
    return entries


def listing() -> list[dict[str, Any]]:
    """What is known of each model, and whether its files are here, as plain values."""
    return [
        {
            "id": name,
            "repository": entry.repository or str(entry.local_folder),
            "context_length": entry.context_length,
            "n_layers": entry.n_layers,
            "dtype": entry.dtype,
            "here": entry.is_here,
        }
        for name, entry in registry().items()
    ]


def _read(path: Path) -> dict[str, ModelEntry]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"models: {path} cannot be read ({error})") from None
    entries = {}
    for name, table in tables.items():
        try:
            entries[name] = check(ModelEntry, table)
        except RequestError as error:
            raise ModelError(f"models: [{name}] in {path}: {error}") from None
    return entries
