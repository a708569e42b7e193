"""Buffers between chunks and batches: rows go in as chunks are read, and come out as batches, in random order or in theirs.

A row may have several columns, arrays whose first axis is the row. Each row that was put in comes out once.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Columns = Sequence[npt.NDArray[Any]]


class Buffer(Protocol):
    """What both kinds do. len: how many rows are in it."""

    def __len__(self) -> int: ...

    def add(self, columns: Columns, left_out: Ints) -> None:
        """Put rows in, but those numbered in `left_out`; copies them."""

    def draw(self, n_rows: int) -> list[npt.NDArray[Any]]:
        """Take so many rows out, which must be there; answers copies."""


class ShuffleBuffer:
    """Draws each batch at random from all the rows that are in it, at most `capacity`. Takes its memory when the first come."""

    def __init__(self, capacity: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._columns: list[npt.NDArray[Any]] = []
        # All places of the buffer; the first n_rows of them hold a row.
        self._places = np.arange(capacity)
        self._n_rows = 0

    def __len__(self) -> int:
        return self._n_rows

    def add(self, columns: Columns, left_out: Ints) -> None:
        """Put rows in, but those numbered in `left_out`. There must be room for them."""
        capacity, n_given = len(self._places), len(columns[0])
        if not self._columns:
            self._columns = [np.empty((capacity + 1, *column.shape[1:]), dtype=column.dtype) for column in columns]
        end = self._n_rows + n_given - len(left_out)
        # Rows that are left out go to a row beyond the capacity that is never read: cheaper than to copy the others together first.
        is_kept = np.ones(n_given, dtype=bool)
        is_kept[left_out] = False
        places = np.full(n_given, capacity)
        places[is_kept] = self._places[self._n_rows : end]
        for held, column in zip(self._columns, columns, strict=True):
            held[places] = column
        self._n_rows = end

    def draw(self, n_rows: int) -> list[npt.NDArray[Any]]:
        """Take so many rows out, any of those that are in it with the same chance."""
        left = self._n_rows - n_rows
        drawn = self._rng.choice(self._n_rows, n_rows, replace=False)
        taken = self._places[drawn]
        # The places that are free now go to the end, and the last ones that are not to where those were.
        is_kept = np.ones(n_rows, dtype=bool)
        is_kept[drawn[drawn >= left] - left] = False
        self._places[drawn[drawn < left]] = self._places[left : self._n_rows][is_kept]
        self._places[left : self._n_rows] = taken
        self._n_rows = left
        return [held[taken] for held in self._columns]


class OrderedBuffer:
    """Hands rows out in the order in which they came in."""

    def __init__(self) -> None:
        self._parts: deque[list[npt.NDArray[Any]]] = deque()
        self._n_rows = 0

    def __len__(self) -> int:
        return self._n_rows

    def add(self, columns: Columns, left_out: Ints) -> None:
        """Put rows in, but those numbered in `left_out`."""
        self._parts.append([np.delete(column, left_out, axis=0) for column in columns])
        self._n_rows += len(columns[0]) - len(left_out)

    def draw(self, n_rows: int) -> list[npt.NDArray[Any]]:
        """Take the first rows out."""
        taken: list[list[npt.NDArray[Any]]] = []
        missing = n_rows
        while missing:
            part = self._parts.popleft()
            taken.append([column[:missing] for column in part])
            if len(part[0]) > missing:
                self._parts.appendleft([column[missing:] for column in part])
            missing -= len(taken[-1][0])
        self._n_rows -= n_rows
        return [np.concatenate(columns) for columns in zip(*taken, strict=True)]
