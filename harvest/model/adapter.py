"""A PEFT adapter: where it is, and how it comes onto a model.

It is put into the model beside its weights and not merged with them, which would round them: what is read is what the adapted model
computes.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harvest.errors import ModelError
from harvest.model.pretrained import explained
from harvest.model.revision import folder_revision
from harvest.model.sources import Source, adapter_base, adapter_place

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


@dataclass(frozen=True)
class Adapter:
    """An adapter whose files are here.

    name: as the user wrote it.
    revision: a digest of the folder's files, or the Hub's commit.
    base: the model that it was trained on, as its config names it.
    """

    name: str
    folder: Path
    revision: str
    base: str


def find_adapter(source: Source, check: Callable[[], None] = lambda: None) -> Adapter | None:
    """The adapter that a source asks for, its files looked at, and fetched where they are the Hub's. Raises ModelError.

    check: called now and then while files are read, and raises to stop.
    """
    name = source.adapter
    if name is None:
        return None
    folder, repository, of_hub = adapter_place(name)
    if folder is None:
        if name.startswith(("/", ".", "~")):
            raise ModelError(f"adapter: there is no folder {name}")
        folder = _fetch(name, repository, of_hub)
        revision = folder.name
    else:
        folder = folder.resolve()
        revision = folder_revision(folder, check=check)
    if not (folder / _CONFIG).is_file():
        raise ModelError(f"adapter: {name} holds no {_CONFIG}, so it is no PEFT adapter; a whole model is named with --model")
    base = adapter_base(folder)
    if not (folder / _WEIGHTS).is_file() and not (source.allow_pickle and (folder / _PICKLE).is_file()):
        if (folder / _PICKLE).is_file():
            raise ModelError(
                f"adapter: the weights of {name} are a pickle file, {_PICKLE}, which can run code when it is read; "
                "give --allow-pickle where you trust it, or save it as safetensors"
            )
        raise ModelError(f"adapter: {name} holds no {_WEIGHTS}")
    return Adapter(name, folder, revision, base)


def put_on(model: Any, adapter: Adapter, n_layers: int) -> None:
    """Put an adapter into a model of so many layers, in place. Raises ModelError where it does not belong there, or lacks weights."""
    try:
        # transformers looks in a folder for the safetensors alone.
        pickle = adapter.folder / _PICKLE
        tensors = None if (adapter.folder / _WEIGHTS).is_file() else torch.load(pickle, map_location="cpu", weights_only=True)
        info = model.load_adapter(str(adapter.folder), adapter_state_dict=tensors)
    except ImportError as error:
        raise ModelError("adapter: it takes the package peft; pip install 'harvest[adapter]'") from error
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"adapter: {adapter.name} cannot be put on this model: {reason}; it was trained on {adapter.base}") from error
    wrong = [*info.missing_keys, *info.mismatched_keys]
    if wrong:
        # transformers fills them with random numbers, and only warns.
        raise ModelError(
            f"adapter: the files of {adapter.name} lack {len(wrong)} tensors that it puts into this model, such as {min(map(str, wrong))}; "
            f"it was trained on {adapter.base}"
        )
    if unknown := _strangers(model, info.unexpected_keys, n_layers):
        raise ModelError(
            f"adapter: {adapter.name} holds {len(unknown)} tensors for which this model has no place, such as {unknown[0]}; "
            f"it was trained on {adapter.base}"
        )


def _strangers(model: Any, names: Iterable[Any], n_layers: int) -> list[str]:
    """Those of an adapter's tensors that are of no block which was left out of the model on purpose."""
    path = getattr(model, "harvest_blocks", None)
    if path is None:
        return sorted(map(str, names))
    there = len(model.get_submodule(path))
    left_out = re.compile(rf"(?:.*\.)?{re.escape(path)}\.(\d+)\.")
    return sorted(name for name in map(str, names) if not ((found := left_out.match(name)) and there <= int(found[1]) < n_layers))


def _fetch(name: str, repository: str, revision: str | None) -> Path:
    """The folder in the Hub's cache of an adapter's files, named by its commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=["adapter_config.json", "adapter_model.*"]))
    except Exception as error:
        raise ModelError(f"adapter: {explained(error, 'adapter', name, repository, revision)}") from error
