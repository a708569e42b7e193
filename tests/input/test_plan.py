"""The plan of a run: what must hold for any lengths and settings, and that its batches cost the least there is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from harvest.input.plan import CardCosts, Piece, Plan, Shard, Window, make_plan


class Case(NamedTuple):
    """Token lengths, and settings of make_plan."""

    lengths: list[int]
    shard_size: int
    token_bytes: int
    window_bytes: int
    batch_tokens: int

    def plan(self) -> Plan:
        return make_plan(np.array(self.lengths, dtype=np.int64), *self[1:])

    @property
    def window_tokens(self) -> int:
        """The most tokens of a window of several prompts: half of window_bytes, and 32 full batches."""
        return min(self.window_bytes // 2 // self.token_bytes, 32 * self.batch_tokens)


def random_case(seed: int) -> Case:
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 200))
    lengths = {
        0: draw.lognormal(np.log(30), 1, n).astype(np.int64) + 1,
        1: draw.integers(1, draw.integers(2, 300), n),
        2: np.full(n, draw.integers(1, 50)),
    }[int(draw.integers(3))]
    token_bytes = int(draw.integers(1, 5000))
    # From a window of about one token to one of the whole run.
    window_bytes = int(token_bytes * 2 * np.exp(draw.uniform(0, np.log(2.0 * lengths.sum() + 2))))
    shard_size, batch_tokens = np.exp(draw.uniform([0, 0], [np.log(1.5 * n + 1), 8])).astype(int).tolist()
    return Case(lengths.tolist(), shard_size, token_bytes, window_bytes, batch_tokens)


@cache
def plans() -> list[tuple[Case, Plan]]:
    cases = [random_case(seed) for seed in range(300)]
    return [(case, case.plan()) for case in cases]


def windows() -> Iterator[tuple[Case, Plan, Window]]:
    return ((case, plan, window) for case, plan in plans() for window in plan.windows)


def n_prompts(part: Shard | Piece | Window) -> int:
    return part.end - part.first


def tokens_of(case: Case, part: Shard | Piece | Window) -> int:
    return sum(case.lengths[part.first : part.end])


def is_part(piece: Piece) -> bool:
    """Whether it is not its whole shard."""
    return n_prompts(piece) < n_prompts(piece.shard)


def test_the_random_cases_hold_all_kinds_of_windows_and_batches() -> None:
    found = {
        "several shards in a window": sum(len(window.pieces) > 1 for _, _, window in windows()),
        "several windows for a shard": sum(is_part(window.pieces[0]) for _, _, window in windows()),
        "one prompt over a window": sum(window.n_tokens > case.window_tokens for case, _, window in windows()),
        "windows ended by 32 full batches": sum(32 * case.batch_tokens < case.window_bytes // 2 // case.token_bytes for case, _ in plans()),
        "a prompt over a batch": sum(max(case.lengths) > case.batch_tokens for case, _ in plans()),
        "several batches in a window": sum(len(list(plan.batches(window))) > 1 for _, plan, window in windows()),
        "a last shard that is not full": sum(n_prompts(plan.shards[-1]) < case.shard_size < len(case.lengths) for case, plan in plans()),
    }
    assert min(found.values()) >= 20, found


def test_shards_are_shard_size_prompts_each_in_order() -> None:
    for case, plan in plans():
        n = len(case.lengths)
        edges = [(first, min(first + case.shard_size, n)) for first in range(0, n, case.shard_size)]
        assert [(shard.first, shard.end) for shard in plan.shards] == edges, case
        assert [shard.index for shard in plan.shards] == list(range(len(edges))), case
        assert [shard.n_tokens for shard in plan.shards] == [tokens_of(case, shard) for shard in plan.shards], case


def test_windows_follow_each_other_over_all_prompts() -> None:
    for case, plan in plans():
        assert [window.index for window in plan.windows] == list(range(len(plan.windows))), case
        edges = [0, *(window.end for window in plan.windows)]
        assert [window.first for window in plan.windows] == edges[:-1], case
        assert edges[-1] == len(case.lengths), case
        assert [window.n_tokens for window in plan.windows] == [tokens_of(case, window) for window in plan.windows], case


def test_the_pieces_of_a_shard_follow_each_other_over_all_its_prompts() -> None:
    for case, plan in plans():
        pieces = [piece for window in plan.windows for piece in window.pieces]
        for shard in plan.shards:
            own = [piece for piece in pieces if piece.shard == shard]
            edges = [shard.first, *(piece.end for piece in own)]
            assert [piece.first for piece in own] == edges[:-1], case
            assert edges[-1] == shard.end, case
            assert [piece.is_last for piece in own] == [False] * (len(own) - 1) + [True], case
            assert all(n_prompts(piece) > 0 and piece.n_tokens == tokens_of(case, piece) for piece in own), case


def test_a_window_is_whole_shards_or_one_piece_of_a_large_one() -> None:
    for case, _, window in windows():
        assert len(window.pieces) == 1 or not any(is_part(piece) for piece in window.pieces), case
        if is_part(window.pieces[0]):
            assert window.pieces[0].shard.n_tokens > case.window_tokens, case


def test_the_rows_of_a_window_follow_each_other() -> None:
    for case, _, window in windows():
        assert [piece.row for piece in window.pieces] == [sum(case.lengths[window.first : piece.first]) for piece in window.pieces], case


def test_a_window_keeps_to_half_the_bytes_and_64_full_batches_unless_it_is_one_prompt() -> None:
    for case, _, window in windows():
        if n_prompts(window) > 1:
            assert 2 * window.n_tokens * case.token_bytes <= case.window_bytes, case
            assert window.n_tokens <= 32 * case.batch_tokens, case


def test_a_window_takes_all_that_fits() -> None:
    for case, plan in plans():
        for window, after in zip(plan.windows, plan.windows[1:], strict=False):
            piece = window.pieces[-1]
            if not piece.is_last:
                assert window.n_tokens + case.lengths[window.end] > case.window_tokens, case
            elif not is_part(piece):
                assert window.n_tokens + after.pieces[0].shard.n_tokens > case.window_tokens, case


def test_each_prompt_of_a_window_is_in_one_of_its_batches() -> None:
    for case, plan, window in windows():
        prompts = [prompt for batch in plan.batches(window) for prompt in batch]
        assert sorted(prompts) == list(range(window.first, window.end)), case


def test_the_padded_tokens_of_a_batch_keep_to_batch_tokens_unless_it_is_one_prompt() -> None:
    for case, plan, window in windows():
        for batch in plan.batches(window):
            assert len(batch) * max(case.lengths[prompt] for prompt in batch) <= case.batch_tokens or len(batch) == 1, case


def test_the_longest_come_first_and_equals_in_order() -> None:
    for case, plan, window in windows():
        prompts = [prompt for batch in plan.batches(window) for prompt in batch]
        assert prompts == sorted(prompts, key=lambda prompt: (-case.lengths[prompt], prompt)), case


def test_a_plan_depends_on_nothing_but_what_it_is_made_from() -> None:
    for case, plan in plans()[:100]:
        again = case.plan()
        assert (again.shards, again.windows) == (plan.shards, plan.windows), case
        # As a resumed run asks: the last window first, and without those before it.
        backwards = [list(again.batches(window)) for window in reversed(again.windows)]
        assert backwards[::-1] == [list(plan.batches(window)) for window in plan.windows], case
        assert plan.lengths.tolist() == case.lengths


@pytest.mark.parametrize(
    ("case", "edges"),
    [
        pytest.param(Case([2] * 6, 2, 1, 16, 99), [(0, 4), (4, 6)], id="two shards fill a window exactly"),
        pytest.param(Case([2] * 6, 2, 1, 15, 99), [(0, 2), (2, 4), (4, 6)], id="a byte less"),
        pytest.param(Case([2] * 6, 2, 8, 128, 99), [(0, 4), (4, 6)], id="eight bytes a token"),
        pytest.param(Case([3] * 4, 4, 1, 12, 99), [(0, 2), (2, 4)], id="a shard in two pieces"),
        pytest.param(Case([1, 20, 1, 1], 4, 1, 8, 99), [(0, 1), (1, 2), (2, 4)], id="one prompt over a window"),
        pytest.param(Case([1, 1, 5, 5, 1, 1, 1], 2, 1, 14, 99), [(0, 2), (2, 3), (3, 4), (4, 7)], id="a large shard between small ones"),
        pytest.param(Case([2, 1], 2, 100, 1, 99), [(0, 1), (1, 2)], id="less than one token"),
        pytest.param(Case([10] * 100, 1, 1, 1 << 40, 10), [(0, 32), (32, 64), (64, 96), (96, 100)], id="32 full batches"),
        pytest.param(Case([10] * 100, 100, 1, 1 << 40, 10), [(0, 32), (32, 64), (64, 96), (96, 100)], id="32 full batches of one shard"),
    ],
)
def test_windows_by_hand(case: Case, edges: list[tuple[int, int]]) -> None:
    assert [(window.first, window.end) for window in case.plan().windows] == edges


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        pytest.param([100, 40, 101, 28, 2000], [[4], [2, 0], [1, 3]], id="12 tokens of padding are less than a pass, 61 are more"),
        pytest.param([6, 40], [[1, 0]], id="where both cost the same, one pass"),
        pytest.param([5, 40], [[1], [0]], id="35 tokens of padding are more than a pass"),
    ],
)
def test_batches_by_hand(lengths: list[int], batches: list[list[int]]) -> None:
    """One more pass of 1,024 tokens costs as much as 34 tokens of padding."""
    plan = Case(lengths, 5, 1, 1 << 30, 1024).plan()
    assert list(plan.batches(plan.windows[0])) == batches


def groupings(prompts: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put prompts into batches, neighbours in length or not."""
    if not prompts:
        yield []
        return
    for rest in groupings(prompts[1:]):
        yield [[prompts[0]], *rest]
        for place, batch in enumerate(rest):
            yield [*rest[:place], [prompts[0], *batch], *rest[place + 1 :]]


def cost(batches: list[list[int]], lengths: list[int], batch_tokens: int) -> float:
    """Padded tokens, and for each pass 32 and 1/512 of a full batch; infinite where a batch is too large."""
    footprints = [(len(batch), max(lengths[prompt] for prompt in batch)) for batch in batches]
    if any(rows > 1 and rows * longest > batch_tokens for rows, longest in footprints):
        return float("inf")
    return sum(rows * longest for rows, longest in footprints) + len(batches) * (32 + batch_tokens / 512)


@pytest.mark.parametrize("batch_tokens", [1, 20, 64, 300, 3000])
def test_no_other_batches_cost_less(batch_tokens: int) -> None:
    draw = np.random.default_rng(batch_tokens)
    for _ in range(25):
        lengths = draw.integers(1, draw.integers(2, 60), size=draw.integers(1, 8)).tolist()
        plan = Case(lengths, 8, 1, 1 << 30, batch_tokens).plan()
        assert len(plan.windows) == 1 or batch_tokens == 1
        for window in plan.windows:
            batches = list(plan.batches(window))
            least = min(cost(other, lengths, batch_tokens) for other in groupings(list(range(window.first, window.end))))
            assert cost(batches, lengths, batch_tokens) == least, lengths


def lognormal_lengths() -> npt.NDArray[np.int64]:
    """4,096 lengths of median 60, at most 2,000: a web text's."""
    return np.random.default_rng(0).lognormal(np.log(60), 1, 4096).clip(1, 2000).astype(np.int64)


@pytest.mark.parametrize("batch_tokens", [2048, 16384, 65536])
@pytest.mark.parametrize("shard_size", [32, 4096])
def test_batches_of_varied_lengths_are_padded_by_under_a_twentieth(shard_size: int, batch_tokens: int) -> None:
    plan = make_plan(lognormal_lengths(), shard_size, token_bytes=3456, window_bytes=2 << 30, batch_tokens=batch_tokens)
    batches = [batch for window in plan.windows for batch in plan.batches(window)]
    padded = sum(len(batch) * int(plan.lengths[batch].max()) for batch in batches)
    assert padded < 1.05 * plan.lengths.sum()
    # No padding is no art in many small batches: these hold a thousand tokens and more.
    assert padded > 2048 / 2 * len(batches)


def test_prompts_on_both_sides_of_a_switch_never_share_a_batch() -> None:
    lengths = np.array([10, 41, 40, 39, 100, 101, 99, 5, 70])
    plan = make_plan(lengths, 4, 1, 1 << 30, 100_000, length_switches=(40, 99))
    batches = [batch for window in plan.windows for batch in plan.batches(window)]
    assert [sorted(lengths[batch].tolist()) for batch in batches] == [[100, 101], [41, 70, 99], [5, 10, 39, 40]]
    one = make_plan(lengths, 4, 1, 1 << 30, 100_000)
    assert len(list(one.batches(one.windows[0]))) < 3


def test_prompts_above_a_length_share_a_batch_with_their_equals_alone() -> None:
    lengths = np.array([10, 41, 40, 41, 100, 101, 100, 5, 70])
    plan = make_plan(lengths, 4, 1, 1 << 30, 100_000, length_switches=(99,), equal_above=40)
    batches = [batch for window in plan.windows for batch in plan.batches(window)]
    assert [sorted(lengths[batch].tolist()) for batch in batches] == [[101], [100, 100], [70], [41, 41], [5, 10, 40]]


CARD = CardCosts(pass_tokens=300, minute_tokens=5000, mask_above=99, mask_length=200)


def card_plan(lengths: Sequence[int], card: CardCosts | None, batch_tokens: int = 1000) -> Plan:
    return make_plan(np.array(lengths), 4, 1, 1 << 40, batch_tokens, card=card)


def test_attention_masks_count_against_the_budget() -> None:
    plan = card_plan([100] * 20 + [99] * 20, CARD)
    # Above 99 tokens a mask counts as 100 * 100 / 200 = 50 tokens more.
    assert plan.footprint(1, 100) == 150
    assert plan.footprint(3, 99) == 3 * 99
    batches = [batch for window in plan.windows for batch in plan.batches(window)]
    for batch in batches:
        longest = int(plan.lengths[batch].max())
        assert plan.footprint(len(batch), longest) <= 1000
    assert max(len(batch) for batch in batches if plan.lengths[batch].max() == 100) == 6
    assert max(len(batch) for batch in batches if plan.lengths[batch].max() == 99) == 10
    without = card_plan([100] * 20, replace(CARD, mask_above=None, mask_length=None))
    assert max(len(batch) for window in without.windows for batch in without.batches(window)) == 10


def test_a_pass_on_a_card_costs_no_less_than_its_launches() -> None:
    lengths = list(range(10, 1000, 10))
    few, many = (
        sum(len(plan.batches(window)) for window in plan.windows)
        for plan in (
            card_plan(lengths, replace(CARD, pass_tokens=tokens, minute_tokens=1 << 20, mask_length=None), 20_000) for tokens in (15_000, 1)
        )
    )
    assert few < many


def test_a_window_on_a_card_ends_after_a_minute() -> None:
    plan = card_plan([100] * 200, CARD)
    # 20,000 tokens, and whole shards of 400.
    assert [window.n_tokens for window in plan.windows] == [4800] * 4 + [800]
    assert len(card_plan([100] * 200, None).windows) == 1
