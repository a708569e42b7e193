"""Which revision of a model is here: the Hub's commit, or a digest of all files of a local folder, each read once and remembered."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harvest.errors import ModelError
from harvest.settings import cache_folder

_BLOCK_BYTES = 8 << 20
_THREADS = 4
# Files below this size are read anew each time: it costs less than to remember them.
_REMEMBERED_BYTES = 16 << 20


def folder_revision(folder: Path, gguf_file: str | None = None, check: Callable[[], None] = lambda: None) -> str:
    """A digest of a model folder that changes with its files, and not with their place or times. Raises ModelError.

    Every byte counts: a fine-tune that differs in one norm is another model. A large file's digest is remembered in the cache folder, by
    its path, size, time and inode. check: called between blocks, and raises to stop.
    """
    paths = [folder / gguf_file] if gguf_file else sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="harvest-revision") as pool:
        futures = [pool.submit(_digest, path, check) for path in paths]
        try:
            for path, future in zip(paths, futures, strict=True):
                digest.update(f"{path.name}\0{future.result()}\0".encode())
        except OSError as error:
            raise ModelError(f"model: {error.filename or folder}: cannot be read ({error.strerror or error})") from error
        finally:
            for future in futures:
                future.cancel()
    return f"sha256:{digest.hexdigest()}"


def cached_commit(repository: str, revision: str | None) -> str:
    """The commit that a branch or tag of the Hub stood for when it was last asked for, as the Hub's cache has it. Raises OSError."""
    from huggingface_hub.constants import HF_HUB_CACHE

    revision = revision or "main"
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    return (Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "refs" / revision).read_text().strip()


def _digest(path: Path, check: Callable[[], None]) -> str:
    found = path.stat()
    key = [str(path), found.st_size, found.st_mtime_ns, found.st_ino]
    memory = cache_folder() / "revisions" / f"{hashlib.sha256(str(path).encode()).hexdigest()}.json"
    if found.st_size >= _REMEMBERED_BYTES and (known := _recall(memory, key)):
        return known
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            check()
            digest.update(block)
    if found.st_size >= _REMEMBERED_BYTES:
        _remember(memory, key, digest.hexdigest())
    return digest.hexdigest()


def _recall(memory: Path, key: list[object]) -> str | None:
    try:
        entry = json.loads(memory.read_bytes())
        return str(entry["sha256"]) if entry["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(memory: Path, key: list[object], sha256: str) -> None:
    """Write a digest down. Where that cannot be, or what is written is torn, the file is read again the next time."""
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(json.dumps({"key": key, "sha256": sha256}))
