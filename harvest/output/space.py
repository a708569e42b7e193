"""How many bytes a run will write, and whether the disk has room for them: before the model is loaded, and not hours later."""

import shutil
from collections.abc import Iterable

from harvest.errors import StorageError
from harvest.input.plan import Shard
from harvest.output import durable
from harvest.output.folder import RunFolder
from harvest.output.layout import ShardLayout
from harvest.progress import size

# A ZIP entry's two headers without its name, which stands in both, and with a ZIP64 field; the end of the directory.
_ENTRY_BYTES = 30 + 46 + 12
_END_BYTES = 22 + 56 + 20
# A chunk that does not shrink grows by this much in blosc's frame.
_FRAME_BYTES = 16
# A record, and its shard's line in the manifest; and the documents of the run.
_RECORD_BYTES = 4096
_PROMPT_BYTES = 256


def shard_bytes(layout: ShardLayout, n_tokens: int, n_prompts: int) -> int:
    """The most bytes that a shard's file takes: exact to a few bytes an entry where nothing is compressed."""
    n_layers, width = len(layout.layers), layout.width
    documents = layout.documents(n_tokens, n_prompts)
    chunk_tokens = layout.chunk_tokens(n_tokens)
    n_chunks = -(-n_tokens // chunk_tokens) * n_layers
    small = 4 * n_tokens + 8 * (n_prompts + 1) + 8 * n_prompts + 4 * n_layers + 2 * 8 * n_layers * width + 2 * 8 * n_layers
    names = sum(len(key) + len(document) + len(key) for key, document in documents.items()) + 2 * 24 * (len(documents) - 1)
    rows = n_chunks * (chunk_tokens * layout.token_bytes // n_layers + _FRAME_BYTES + 2 * len(layout.row_key(n_layers, n_chunks)))
    return rows + small + names + (n_chunks + 2 * len(documents)) * _ENTRY_BYTES + _END_BYTES


def needed_bytes(layout: ShardLayout, shards: Iterable[Shard], text_bytes: int, most_at_once: int | None = None) -> int:
    """The most bytes that a run still writes for these shards, with their records, and request and manifest with the prompts' text.

    most_at_once: how many of the shards lie on the disk at a time, where they go on to another place; None for all.
    """
    per_prompt = _PROMPT_BYTES + 2 * len(layout.layers)
    return 4 * text_bytes + sum(
        shard_bytes(layout, shard.n_tokens, shard.end - shard.first) + _RECORD_BYTES + per_prompt * (shard.end - shard.first)
        for shard in sorted(shards, key=lambda shard: -shard.n_tokens)[:most_at_once]
    )


def check_space(folder: RunFolder, needed: int) -> None:
    """Raise StorageError where the disk of a run folder has no room for so many bytes more. What is half written there counts as room."""
    with durable.storing(folder.path):
        free = shutil.disk_usage(folder.path).free
        # Another part's shard that grows now has taken room that this count still asks for.
        growing = sum(path.stat().st_size for path in folder.temporary() if path.exists())
    if needed > free + growing:
        raise StorageError(
            f"{folder.path}: the run writes up to {size(needed)} ({needed:,} bytes), and the disk has {size(free)} ({free:,} bytes) free; "
            "free some space, name another folder, ask for fewer layers, or go on all the same with --no-space-check"
        )
