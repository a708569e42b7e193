"""The pure parts of a training pass: chunks dealt out to ranks and workers, and the buffers between chunks and batches."""

import itertools

import numpy as np
import pytest

from harvest.reading.buffer import OrderedBuffer, ShuffleBuffer
from harvest.reading.deal import deal

NONE = np.array([], dtype=np.int64)
ROWS = np.random.default_rng(0).integers(1, 1000, 57).tolist()


@pytest.mark.parametrize(("n_ranks", "n_workers"), [(1, 1), (1, 3), (3, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_chunk_goes_to_one_reader_and_none_has_much_more(n_ranks: int, n_workers: int, drop_last: bool) -> None:
    order = np.random.default_rng(1).permutation(len(ROWS)).tolist()
    shares = deal(ROWS, order, 50, drop_last, n_ranks, n_workers)
    assert [len(of_rank) for of_rank in shares] == [n_workers] * n_ranks
    readers = list(itertools.chain(*shares))
    assert sorted(itertools.chain(*(share.chunks for share in readers))) == list(range(len(ROWS)))
    for share in readers:
        assert share.chunks == sorted(share.chunks, key=order.index)
    loads = [[sum(ROWS[chunk] for chunk in share.chunks) for share in of_rank] for of_rank in shares]
    of_ranks = [sum(of_rank) for of_rank in loads]
    assert max(of_ranks) - min(of_ranks) <= max(ROWS)
    assert all(max(of_rank) - min(of_rank) <= max(ROWS) for of_rank in loads)
    for share, load in zip(readers, itertools.chain(*loads), strict=True):
        assert share.n_batches <= load // 50 if drop_last else share.n_batches == -(-load // 50)
    if drop_last:
        batches = [sum(share.n_batches for share in of_rank) for of_rank in shares]
        whole = [sum(load // 50 for load in of_rank) for of_rank in loads]
        assert batches == [min(whole)] * n_ranks


def test_more_readers_than_chunks_leave_some_with_nothing() -> None:
    shares = deal([10, 20], [1, 0], 4, False, 3, 1)
    assert [share.chunks for (share,) in shares] == [[1], [0], []]
    assert [share.n_batches for (share,) in shares] == [5, 3, 0]
    assert {share.n_batches for (share,) in deal([10, 20], [1, 0], 4, True, 3, 1)} == {0}


def test_a_shuffle_buffer_hands_out_every_row_once_with_its_other_columns() -> None:
    buffer = ShuffleBuffer(100, np.random.default_rng(0))
    out: list[int] = []
    first = 0
    for size, left_out in [(60, [0, 59]), (40, []), (0, []), (30, list(range(30))), (20, [5])]:
        rows = np.arange(first, first + size)
        while len(buffer) + size - len(left_out) > 100:
            (left, right) = buffer.draw(16)
            assert np.array_equal(left, 2 * right)
            out += right.tolist()
        buffer.add([2 * rows, rows], np.array(left_out, dtype=np.int64))
        first += size
    while len(buffer):
        left, right = buffer.draw(min(16, len(buffer)))
        assert np.array_equal(left, 2 * right)
        out += right.tolist()
    kept = sorted({*range(150)} - {0, 59, 135} - {*range(100, 130)})
    assert sorted(out) == kept != out


def test_a_shuffle_buffer_draws_each_row_with_the_same_chance() -> None:
    rng = np.random.default_rng(0)
    hits = np.zeros(40)
    for _ in range(2000):
        buffer = ShuffleBuffer(40, rng)
        buffer.add([np.arange(30)], NONE)
        buffer.draw(10)
        buffer.add([np.arange(30, 40)], NONE)
        hits[buffer.draw(10)[0]] += 1
    # The first 30 were there with a chance of 2/3 each; then 10 of 30 are drawn. Five standard deviations of a count of 2,000 throws.
    for expected, counted in ((2000 * 2 / 9, hits[:30]), (2000 / 3, hits[30:])):
        assert np.abs(counted - expected).max() < 5 * np.sqrt(expected)


def test_an_ordered_buffer_keeps_the_order() -> None:
    buffer = OrderedBuffer()
    buffer.add([np.arange(5)], np.array([0]))
    buffer.add([np.arange(5, 12)], np.array([6, 2]))
    assert [len(buffer)] + [buffer.draw(n)[0].tolist() for n in (3, 3, 3)] == [9, [1, 2, 3], [4, 5, 6], [8, 9, 10]]
    assert len(buffer) == 0
