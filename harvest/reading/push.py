"""A whole run to the Hugging Face Hub, as a dataset with a card: all its files in one commit, the same bytes at the same places."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harvest.errors import FolderError, NotARunError, RequestError, StorageError
from harvest.output.folder import RunFolder
from harvest.progress import Reporter, Silent, size
from harvest.reading.run import Run

_TARGET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)/?", re.ASCII)


@dataclass(frozen=True)
class Pushed:
    """What was pushed: the dataset's page, the commit, files and their bytes."""

    url: str
    commit: str
    files: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def push(path: str | Path, target: str, public: bool = False, reporter: Reporter | None = None) -> Pushed:
    """Push a whole run to hf://datasets/USER/NAME, which is made where it is not there.

    public: whether a dataset that is made can be read by anybody: the manifest holds the prompts. One that is there stays as it is.
    job.json stays here, since its links lead to files of this machine. Raises RequestError, NotARunError, FolderError, and StorageError for
    what the Hub refuses.
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        raise RequestError(f"{target!r} was given; a dataset of the Hub is hf://datasets/USER/NAME")
    run, reporter = Run(path), reporter or Silent()
    files = _files(run)
    from huggingface_hub import CommitOperationAdd, HfApi

    api, repository = HfApi(), match[1]
    card = make_card(run, repository).encode()
    operations = [CommitOperationAdd(key, file) for key, file in files.items()] + [CommitOperationAdd("README.md", card)]
    n_bytes = sum(file.stat().st_size for file in files.values()) + len(card)
    reporter.note(f"pushing {len(operations)} files, {size(n_bytes)}, to {repository}")
    try:
        api.create_repo(repository, repo_type="dataset", private=not public, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message=f"Run {run.manifest.run_id}", repo_type="dataset")
    except Exception as error:
        # Of several libraries' classes, by what lies between this machine and the Hub.
        raise StorageError(f"{target}: {_why(error)}") from error
    return Pushed(str(commit.commit_url).split("/commit/")[0], commit.oid, len(operations), n_bytes)


def make_card(run: Run, repository: str) -> str:
    """The dataset's card: what was read, from which model, and how the files are read back."""
    manifest, local = run.manifest, run.manifest.local or {}
    model: Mapping[str, Any] = local.get("model", {})
    rows = [
        ("model", f"{manifest.hf_repo}, revision {model.get('revision', 'unknown')}"),
        ("layers", ", ".join(map(str, run.layers))),
        ("contents", f"{manifest.contents}, {manifest.dtype}, {run.width} values a token"),
        ("prompts", f"{run.n_prompts:,}"),
        ("tokens", f"{run.n_tokens:,}"),
        ("shards", f"{run.n_shards:,}"),
    ]
    if (adapter := model.get("adapter")) is not None:
        rows.insert(1, ("adapter", f"{adapter['name']}, revision {adapter['revision']}"))
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows)
    name = repository.split("/")[1]
    return f"""---
tags: [interpretability, residual-stream, activations]
---

# {name}

The residual stream of a language model after decoder blocks, for every token of a set of prompts, as `harvest` wrote it.

| | |
| --- | --- |
{table}

Layer k is the stream after decoder block k, counted from 0; the last is taken before the final norm. The prompts themselves stand in
`manifest.json`. Each shard is a Zarr v3 store in a ZIP file, whose attributes explain it.

```python
import harvest
from huggingface_hub import snapshot_download

run = harvest.open(snapshot_download("{repository}", repo_type="dataset"))
run.prompt(0)  # [layer, token, hidden]
```
"""


def _files(run: Run) -> dict[str, Path]:
    """The files of a whole run by their places in the dataset. Raises NotARunError for one that is missing."""
    folder = RunFolder(run.path)
    shards = {entry.key: folder.find(entry.key) for entry in run.manifest.shards}
    documents = [folder.manifest, folder.stats, folder.request, *(folder.record(index) for index in sorted(folder.recorded()))]
    found = shards | {path.relative_to(folder.path).as_posix(): path for path in documents if path.exists()}
    for key, path in found.items():
        if not path.is_file():
            raise NotARunError(f"{path} is missing, so the run is not whole; the command that made it makes it anew")
        if ".." in key.split("/") or key.startswith("/"):
            raise FolderError(f"{folder.manifest}: names a shard {key!r}, which lies outside the run")
    return found


def _why(error: Exception) -> str:
    kinds = {type(error).__name__, *(base.__name__ for base in type(error).__mro__)}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or "LocalTokenNotFoundError" in kinds:
        return "the Hub does not know who asks; log in on this machine with `hf auth login`, with a token that may write"
    if status == 403:
        return "the Hub does not let this user write there; name a dataset of your own, or use a token that may write"
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE is set, and a push needs the Hub; unset it"
    return f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}; run the same command again"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
