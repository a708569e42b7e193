"""The chunks of one layer of a run, read in any order, each decoded once and into the same memory.

Shapes: T tokens, W values a token.
"""

import torch

from harvest.errors import NotARunError
from harvest.reading.axis import Chunk
from harvest.reading.run import Run
from harvest.reading.shard import Shard, ZarrShard
from harvest.reading.stored import StoredLayer

# Where a layer's chunks stand in each shard that was looked at; None for one that is read by its own reader.
Places = dict[int, StoredLayer | None]


class LayerChunks:
    """Reads chunks of one layer. What it answers is its own memory, into which it reads the next chunk."""

    def __init__(self, run: Run, position: int, places: Places) -> None:
        """position: of the layer, on the run's layer axis. places: those of this layer that are known from before; more are added."""
        self._run = run
        self._position = position
        self._stored = places
        self._rows_TW = torch.empty(0, run.width, dtype=run.dtype)

    def read(self, chunk: Chunk) -> torch.Tensor:
        """The rows of one chunk, [T, W] in the stored type. Raises NotARunError where they cannot be read."""
        stored = self._find(chunk)
        if stored is None:
            with self._open(chunk) as shard:
                return shard.layer(self._position, chunk.start, chunk.start + chunk.n_tokens)
        if len(self._rows_TW) < stored.chunk_tokens:
            self._rows_TW = torch.empty(stored.chunk_tokens, self._run.width, dtype=self._run.dtype)
        stored.read(chunk.number, self._rows_TW[: stored.chunk_tokens])
        return self._rows_TW[: chunk.n_tokens]

    def read_token_ids(self, chunk: Chunk) -> torch.Tensor:
        """The ids of a chunk's tokens, int32 [T]. Raises NotARunError where they cannot be read."""
        stored = self._find(chunk)
        if stored is None:
            with self._open(chunk) as shard:
                ids_T = torch.cat([shard[f"tokens_{prompt}"] for prompt in shard.prompts])
            return ids_T[chunk.start : chunk.start + chunk.n_tokens]
        ids_T = torch.empty(chunk.n_tokens, dtype=torch.int32)
        stored.read_ids(chunk.start, ids_T)
        return ids_T

    def _find(self, chunk: Chunk) -> StoredLayer | None:
        """The places of a shard's chunks, looked up once; None where its file has none, or others than the run's axis says."""
        if chunk.shard not in self._stored:
            with self._open(chunk) as shard:
                stored = shard.stored(self._position) if isinstance(shard, ZarrShard) else None
            is_alike = stored is not None and stored.chunk_tokens * chunk.number == chunk.start
            self._stored[chunk.shard] = stored if is_alike else None
        return self._stored[chunk.shard]

    def _open(self, chunk: Chunk) -> Shard:
        shard = self._run.shard(chunk.shard)
        if (shard.n_tokens, shard.width, shard.dtype) != (chunk.n_shard_tokens, self._run.width, self._run.dtype):
            shard.close()
            raise NotARunError(f"{shard.path}: does not hold what manifest.json says; see what is wrong with harvest verify")
        return shard
