"""Batches of one layer's tokens for training: shuffled, in bounded memory, for a DataLoader with workers and for many ranks.

A chunk of the layer is the unit of work. Their order is shuffled for each pass, and they are dealt out to the ranks and to the workers of
each; a reader decodes each of its chunks once, and draws its batches at random from a buffer that holds the rows of many chunks.

Shapes: T tokens of a chunk, B tokens of a batch, W values a token.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
import torch.utils.data

from harvest.reading.axis import Chunk, Ints
from harvest.reading.buffer import Buffer, OrderedBuffer, ShuffleBuffer
from harvest.reading.chunks import LayerChunks, Places
from harvest.reading.deal import Share, deal
from harvest.reading.run import Run, open_run

# The buffer of a reader, unless it is said: the rows of 64 chunks of 4 MiB. Rows of a few directions are so small that there are more
# of them than are worth shuffling.
_BUFFER_BYTES = 256 << 20
_BUFFER_ROWS = 1 << 18

# A shuffled bfloat16 moves as an integer: numpy has no other type for it.
_BITS = {2: torch.int16, 4: torch.int32}


class TokenBatch(NamedTuple):
    """A batch that says where its rows come from. rows: [B, W]; token_ids int32, prompts and positions int64: [B].

    prompts: the number of each row's prompt in the run; positions: the place of its token in that prompt.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    prompts: torch.Tensor
    positions: torch.Tensor


class TokenBatches(torch.utils.data.IterableDataset[torch.Tensor | TokenBatch]):
    """One layer of a run as batches of tokens, [batch_tokens, hidden] or [batch_tokens, direction], for `DataLoader(..., batch_size=None)`.

    A pass hands out every token of the run exactly once over all workers and ranks: with `drop_first` all but each prompt's first, whose
    norm swamps the others, and which the run's stats leave out too. Rows are as they were stored, among them any that are not finite,
    which a run holds only where it was asked to (`allow_nonfinite`).

    The same seed, epoch, ranks and workers give the same batches. Call `set_epoch` before each pass; without it all passes are alike.

    The last batch of each worker is smaller, and ranks may differ by a chunk, so by some batches. `drop_last` leaves such batches out, and
    the same number on every rank, which is what DistributedDataParallel needs: it waits for ever where one rank ends before the others.
    All ranks need the same number of workers.

    mean, std: float32 [hidden], of the layer, position 0 left out. n_tokens: that a pass hands out over all ranks.
    """

    def __init__(
        self,
        run: Run | str | Path,
        layer: int,
        batch_tokens: int = 4096,
        shuffle: bool = True,
        drop_first: bool = True,
        *,
        seed: int = 0,
        buffer_tokens: int | None = None,
        drop_last: bool = False,
        dtype: torch.dtype | None = torch.float32,
        normalize: bool = False,
        with_tokens: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """run: a run, or its folder. layer: the number of a decoder block.

        shuffle: False hands out the tokens in the order of the run, by one reader; each of several has its chunks in order.
        buffer_tokens: rows that a reader draws from, in the stored type; by default as many as 256 MiB hold, at most 262,144. Beside
            them it holds three chunks and a batch.
        dtype: of the batches; None for the type that the run stored.
        normalize: subtract `mean` and divide by `std`, in float32.
        with_tokens: hand out a TokenBatch of rows, token ids, prompts and positions.
        rank, world_size: by default those of torch.distributed where it is initialised when a pass begins.

        Raises NotARunError for what is no whole run, KeyError for a layer that the run does not hold, ValueError for another argument,
        and while it reads NotARunError for a damaged file.
        """
        self.run = run if isinstance(run, Run) else open_run(run)
        self.layer = layer
        self.batch_tokens = batch_tokens
        self._position = self.run.layer_position(layer)
        if self.run.manifest.compression != "none":
            raise ValueError(
                f"{self.run.path}: its shards are gzipped, and would be unpacked anew for every chunk; "
                "unpack them once with harvest export, and train on that folder"
            )
        for name, value, least in (("batch_tokens", batch_tokens, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name} is {least} or more; {value} was given")
        if (rank is None) != (world_size is None) or (rank is not None and not 0 <= rank < (world_size or 0)):
            raise ValueError(f"rank is from 0 to world_size - 1, and both are given or neither; {rank} of {world_size} was given")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype is a floating type such as torch.float32, or None; {dtype} was given")
        self._shuffle, self._drop_first, self._drop_last, self._with_tokens = shuffle, drop_first, drop_last, with_tokens
        self._seed = seed
        self._dtype = self.run.dtype if dtype is None else dtype
        self._normalize = normalize
        self._rank = None if rank is None or world_size is None else (rank, world_size)
        # Shared memory, so that workers that outlive a pass learn of the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._places: Places = {}
        stats = self.run.stats
        self.mean, self.std = stats.mean[self._position].clone(), stats.std[self._position].clone()
        self._rows_C = self._count_rows()
        self._buffer_tokens = self._size_buffer(buffer_tokens)

    @property
    def n_tokens(self) -> int:
        """Tokens that a pass hands out, over all workers and ranks."""
        return int(self._rows_C.sum())

    def set_epoch(self, epoch: int) -> None:
        """Say which pass comes next: it has an order of its own. Raises ValueError below 0."""
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more; {epoch} was given")
        self._epoch.fill_(epoch)

    def count_batches(self, num_workers: int = 0) -> int:
        """How many batches the next pass has on this rank, under a DataLoader with so many workers."""
        return sum(share.n_batches for share in self._shares(max(num_workers, 1)))

    def __iter__(self) -> Iterator[torch.Tensor | TokenBatch]:
        info = torch.utils.data.get_worker_info()
        worker, n_workers = (0, 1) if info is None else (info.id, info.num_workers)
        share = self._shares(n_workers)[worker]
        yield from itertools.islice(self._batches(share, self._make_buffer(share, worker)), share.n_batches)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked has no torch.distributed to ask.
        return self.__dict__ | {"_rank": self._rank or _distributed()}

    def __repr__(self) -> str:
        return f"<TokenBatches of {self.batch_tokens}: layer {self.layer} of {self.run.path.name}, {self.n_tokens} tokens>"

    def _ranks(self) -> tuple[int, int]:
        """The rank, and how many there are."""
        return self._rank or _distributed() or (0, 1)

    def _count_rows(self) -> Ints:
        """How many rows each chunk gives, int64 [chunk]."""
        axis = self.run.axis
        rows_C: Ints = np.diff(axis.chunk_offsets)
        return rows_C - np.diff(np.searchsorted(axis.prompt_offsets[:-1], axis.chunk_offsets)) if self._drop_first else rows_C

    def _size_buffer(self, asked: int | None) -> int:
        # When a chunk does not fit, there must be a batch to draw.
        least = int(self._rows_C.max()) + self.batch_tokens - 1
        if asked is not None and asked < least:
            raise ValueError(f"buffer_tokens is {least} or more here, for a batch and the largest chunk; {asked} was given")
        return asked or max(least, min(_BUFFER_ROWS, _BUFFER_BYTES // (self.run.width * self.run.dtype.itemsize)))

    def _random(self, *reader: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self._seed, int(self._epoch)], spawn_key=reader))

    def _shares(self, n_workers: int) -> list[Share]:
        """The share of each worker of this rank in the next pass. Raises ValueError where it would have no batch at all."""
        rank, n_ranks = self._ranks()
        order_C = self._random().permutation(len(self._rows_C)) if self._shuffle else np.arange(len(self._rows_C))
        shares = deal(self._rows_C.tolist(), order_C.tolist(), self.batch_tokens, self._drop_last, n_ranks, n_workers)[rank]
        if self._drop_last and not any(share.n_batches for share in shares):
            raise ValueError(
                f"{self.n_tokens} tokens in {len(order_C)} chunks make no whole batch of {self.batch_tokens} for each of {n_ranks} ranks "
                f"with {n_workers} workers; take smaller batches, fewer ranks or workers, or drop_last=False"
            )
        return shares

    def _make_buffer(self, share: Share, worker: int) -> Buffer:
        if not self._shuffle:
            return OrderedBuffer()
        capacity = min(self._buffer_tokens, int(self._rows_C[share.chunks].sum()))
        return ShuffleBuffer(capacity, self._random(self._ranks()[0], worker))

    def _batches(self, share: Share, buffer: Buffer) -> Iterator[torch.Tensor | TokenBatch]:
        for columns, left_out in self._read_ahead(share):
            while len(buffer) + len(columns[0]) - len(left_out) > self._buffer_tokens:
                yield self._batch(buffer.draw(self.batch_tokens))
            buffer.add(columns, left_out)
        while len(buffer):
            yield self._batch(buffer.draw(min(self.batch_tokens, len(buffer))))

    def _read_ahead(self, share: Share) -> Iterator[tuple[list[npt.NDArray[Any]], Ints]]:
        """What `_read` answers of each chunk; the next one is read and decoded, which holds no lock, while one is put to use."""
        # Each answers its own memory, so one is read into while the other is put to use.
        readers = itertools.cycle([LayerChunks(self.run, self._position, self._places) for _ in range(2)])
        with ThreadPoolExecutor(1) as thread:
            ahead = None
            for index in share.chunks:
                coming = thread.submit(self._read, next(readers), self.run.axis.chunk(index))
                if ahead is not None:
                    yield ahead.result()
                ahead = coming
            if ahead is not None:
                yield ahead.result()

    def _read(self, chunks: LayerChunks, chunk: Chunk) -> tuple[list[npt.NDArray[Any]], Ints]:
        """The rows of a chunk, with `with_tokens` the number in the run and the id of each one's token, and which rows do not count."""
        rows_TW = chunks.read(chunk)
        columns = [rows_TW.view(_BITS[rows_TW.element_size()]).numpy()]
        if self._with_tokens:
            columns += [np.arange(chunk.first, chunk.first + chunk.n_tokens), chunks.read_token_ids(chunk).numpy()]
        end = chunk.first + (chunk.n_tokens if self._drop_first else 0)
        return columns, self.run.axis.starts_in(chunk.first, end) - chunk.first

    def _batch(self, columns: list[npt.NDArray[Any]]) -> torch.Tensor | TokenBatch:
        rows_BW = torch.from_numpy(columns[0]).view(self.run.dtype)
        if self._normalize:
            # A value that is always the same has no deviation to divide by.
            rows_BW = (rows_BW.float() - self.mean) / torch.where(self.std > 0, self.std, 1)
        rows_BW = rows_BW.to(self._dtype)
        if not self._with_tokens:
            return rows_BW
        tokens_B, ids_B = columns[1:]
        places = (torch.from_numpy(places_B) for places_B in self.run.axis.places(tokens_B))
        return TokenBatch(rows_BW, torch.from_numpy(ids_B), *places)


def _distributed() -> tuple[int, int] | None:
    """This process's rank and how many there are, where torch.distributed is initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


torch_dataset = TokenBatches
