"""Where a model comes from: the registry, a folder, a GGUF file, the Hugging Face Hub, or harvest's own code."""

import difflib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from harvest.errors import ModelError
from harvest.model.registry import registry
from harvest.settings import Dtype, Engine

TINY = "tiny"


@dataclass(frozen=True)
class Source:
    """One model's place.

    name: as the user wrote it.
    location: a Hugging Face id, or a folder's path.
    gguf_file: the file in that folder, where the model is one GGUF file.
    context_length, dtype: what the registry says of it; None where it is not in the registry.
    revision: a branch, tag or commit on the Hub; None for main.
    adapter: a PEFT adapter that belongs on it: a folder, or a Hugging Face id, also with @REVISION.
    trust_remote_code, allow_pickle: whether code among its files may run, and pickle files may be read.
    """

    name: str
    location: str
    gguf_file: str | None = None
    context_length: int | None = None
    dtype: Dtype | None = None
    revision: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    @property
    def is_tiny(self) -> bool:
        """Whether this is the embedded model, which has no files."""
        return self.location == TINY

    @property
    def is_local(self) -> bool:
        """Whether the model's files lie in a local folder."""
        return not self.is_tiny and Path(self.location).is_dir()


def find_model(name: str, engine: Engine | None = None) -> Source:
    """The source of a model by registry id, path or Hugging Face id. Looks at local files only. Raises ModelError."""
    source, engine = _find(name), engine or Engine()
    if engine.revision is not None and (source.is_tiny or source.is_local):
        raise ModelError(
            f"revision: {engine.revision} was given, but {name} is not a model of the Hub; leave it out, or name a Hugging Face id"
        )
    if engine.adapter is not None and source.is_tiny:
        raise ModelError(f"adapter: {engine.adapter} was given, but tiny is made by code and takes none; name its base with --model")
    return replace(
        source,
        revision=engine.revision,
        adapter=engine.adapter,
        trust_remote_code=engine.trust_remote_code,
        allow_pickle=engine.allow_pickle,
    )


def _find(name: str) -> Source:
    if name == TINY:
        return Source(name, TINY)
    if name in registry():
        return _from_registry(name)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model: {name} is a file, but no GGUF file; a model is a folder with a config.json, or a .gguf file")
        return Source(name, str(path.resolve().parent), gguf_file=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                raise ModelError(f"model: {name} is an adapter; give it with --adapter, and with --model its base, {adapter_base(path)}")
            raise ModelError(f"model: the folder {name} holds no config.json, so it is no Hugging Face model")
        return Source(name, str(path.resolve()))
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise ModelError(f"model: there is no file or folder {name}")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII) is None:
        raise ModelError(f"model: {name!r} is no registry id, Hugging Face id, folder or GGUF file; known ids: {_known()}")
    near = difflib.get_close_matches(name, [TINY, *registry()], n=1, cutoff=0.75)
    if near and "/" not in name:
        raise ModelError(f"model: {name} is unknown; did you mean {near[0]}? Known ids: {_known()}")
    return Source(name, name)


def adapter_place(name: str) -> tuple[Path | None, str, str | None]:
    """Where an adapter is that a user named: its folder, where it is one; else its repository on the Hub, and a revision of it."""
    folder = Path(name).expanduser()
    repository, _, revision = name.partition("@")
    return (folder if folder.is_dir() else None), repository, revision or None


def adapter_base(folder: Path) -> str:
    """The model that an adapter's config names as its base, by the place where it was trained. Raises ModelError."""
    path = folder / "adapter_config.json"
    try:
        return str(json.loads(path.read_bytes()).get("base_model_name_or_path") or "a model that it does not name")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"adapter: {path} cannot be read ({error})") from None


def _from_registry(name: str) -> Source:
    entry = registry()[name]
    location = entry.repository
    if location is None:
        folder = entry.local_folder
        if folder is None or not (folder / "config.json").is_file():
            how = f"make it with: {entry.made_by}" if entry.made_by else "see to that folder, or mend the entry in the registry"
            raise ModelError(f"model: {name} is not on this machine yet ({folder} is missing); {how}")
        location = str(folder)
    return Source(name, location, context_length=entry.context_length, dtype=entry.dtype)


def _known() -> str:
    return ", ".join([TINY, *registry()])
