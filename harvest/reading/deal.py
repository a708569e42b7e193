"""Which chunks each reader of a pass reads, in what order, and how many batches it makes of them: a pure function of their sizes.

A reader is a worker of a DataLoader (or the one process without workers) of a rank. Shapes: C chunks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Share:
    """What one reader reads: its chunks in order, and how many batches it hands out of their rows."""

    chunks: list[int]
    n_batches: int


def deal(
    rows_C: Sequence[int], order_C: Sequence[int], batch_rows: int, drop_last: bool, n_ranks: int, n_workers: int
) -> list[list[Share]]:
    """The share of each worker of each rank, [rank][worker]: all chunks, none twice.

    rows_C: of each chunk. order_C: the chunks in the order of the pass.
    Each chunk in turn goes to the rank with the fewest rows, and there to the worker with the fewest, so that at the end no two ranks,
    and no two workers of a rank, are further apart than one chunk.
    drop_last: hand out whole batches only, and on each rank the same number of them, that of the rank with the fewest. Without it, each
    worker's last batch may be smaller, and ranks may differ.
    """
    chunks: list[list[list[int]]] = [[[] for _ in range(n_workers)] for _ in range(n_ranks)]
    rows = np.zeros((n_ranks, n_workers), dtype=np.int64)
    ranks = [(0, rank) for rank in range(n_ranks)]
    workers = [[(0, worker) for worker in range(n_workers)] for _ in range(n_ranks)]
    for chunk in order_C:
        n_rows = rows_C[chunk]
        of_rank, rank = ranks[0]
        of_worker, worker = workers[rank][0]
        heapq.heapreplace(ranks, (of_rank + n_rows, rank))
        heapq.heapreplace(workers[rank], (of_worker + n_rows, worker))
        chunks[rank][worker].append(chunk)
        rows[rank, worker] += n_rows
    batches = _whole_batches(rows // batch_rows) if drop_last else -(-rows // batch_rows)
    return [[Share(chunks[rank][worker], int(batches[rank, worker])) for worker in range(n_workers)] for rank in range(n_ranks)]


def _whole_batches(batches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each rank's batches, by worker, cut to as many as the rank with the fewest has; the workers with the most give theirs up."""
    least = batches.sum(axis=1).min()
    for of_workers in batches:
        for _ in range(of_workers.sum() - least):
            of_workers[of_workers.argmax()] -= 1
    return batches
