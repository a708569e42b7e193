"""The token axis of a whole run, all prompts end to end: where prompts, shards and chunks begin.

Shapes: P prompts, S shards, C chunks of one layer, T tokens.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.contract import Manifest
from harvest.errors import NotARunError
from harvest.reading.blocks import chunk_tokens

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """One chunk of a layer: chunk `number` of its shard, tokens first to first + n_tokens - 1 of the run.

    start: the first of them as a token of the shard. n_shard_tokens: of the whole shard.
    """

    shard: int
    number: int
    start: int
    first: int
    n_tokens: int
    n_shard_tokens: int


@dataclass(frozen=True)
class TokenAxis:
    """Where things begin on the token axis, and one past the last token: prompt_offsets int64 [P + 1], shard_offsets [S + 1],
    chunk_offsets [C + 1]; chunk_shards [C] is the shard of each chunk.
    """

    prompt_offsets: Ints
    shard_offsets: Ints
    chunk_offsets: Ints
    chunk_shards: Ints

    @property
    def n_tokens(self) -> int:
        """Tokens of the run."""
        return int(self.prompt_offsets[-1])

    @property
    def n_chunks(self) -> int:
        """Chunks of one layer."""
        return len(self.chunk_shards)

    def chunk(self, index: int) -> Chunk:
        """One chunk, by its number over the whole run."""
        shard, (first, end) = int(self.chunk_shards[index]), self.chunk_offsets[index : index + 2].tolist()
        base, shard_end = self.shard_offsets[shard : shard + 2].tolist()
        number = index - int(np.searchsorted(self.chunk_shards, shard))
        return Chunk(shard, number, first - base, first, end - first, shard_end - base)

    def chunks_of(self, shard: int) -> Ints:
        """Where the chunks of one shard begin, as tokens of that shard, and one past its last token."""
        low, high = np.searchsorted(self.chunk_shards, (shard, shard + 1))
        offsets: Ints = self.chunk_offsets[low : high + 1] - self.shard_offsets[shard]
        return offsets

    def places(self, tokens_T: Ints) -> tuple[Ints, Ints]:
        """The prompt of each token of the run, and its position there: int64 [T] both."""
        prompts_T = np.searchsorted(self.prompt_offsets, tokens_T, side="right").astype(np.int64) - 1
        return prompts_T, tokens_T - self.prompt_offsets[prompts_T]

    def starts_in(self, first: int, end: int) -> Ints:
        """The tokens from `first` to `end` - 1 that are the first of a prompt."""
        low, high = np.searchsorted(self.prompt_offsets[:-1], (first, end))
        return self.prompt_offsets[low:high]


def token_axis(manifest: Manifest, width: int, dtype: torch.dtype) -> TokenAxis:
    """The axis of a run, from its manifest alone. Raises NotARunError where that does not give every prompt's length."""
    prompt_lengths: list[int] = []
    shard_lengths: list[int] = []
    chunk_lengths: list[int] = []
    chunk_shards: list[int] = []
    for index, entry in enumerate(manifest.shards):
        shapes: dict[str, Any] = {tensor.name: tensor.shape for tensor in entry.tensors}
        try:
            lengths = [shapes[f"tokens_{prompt}"][0] for prompt in entry.prompt_indices]
        except (KeyError, IndexError) as error:
            raise NotARunError(f"manifest.json: shard {index} does not list the tensor tokens_i of each of its prompts") from error
        n_tokens = sum(lengths)
        step = chunk_tokens(manifest.layer_indices, width, dtype, n_tokens)
        of_chunks = [min(step, n_tokens - start) for start in range(0, n_tokens, step)]
        prompt_lengths += lengths
        shard_lengths.append(n_tokens)
        chunk_lengths += of_chunks
        chunk_shards += [index] * len(of_chunks)
    return TokenAxis(_offsets(prompt_lengths), _offsets(shard_lengths), _offsets(chunk_lengths), np.array(chunk_shards, dtype=np.int64))


def _offsets(lengths: list[int]) -> Ints:
    return np.array([0, *itertools.accumulate(lengths)], dtype=np.int64)
