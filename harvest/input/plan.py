"""The plan of a run: which prompts make a shard, which a window, and which are read in one batch.

    run      all prompts, in order
    shard    shard_size consecutive prompts; one file
    window   consecutive prompts whose captured rows fit the byte budget: whole shards, or a piece of one large shard
    batch    prompts of one window, neighbours in length, padded to the longest and read in one forward pass

A plan is a pure function of the token lengths and the settings. It depends neither on the machine nor on what is already done, so a
resumed run, and a run split over several processes, form the very same batches and write the very same bytes.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A window also ends after so many full batches, however few bytes they make. Narrow captures (one layer, or a few directions) would else
# put a whole run into one window, and a window's shards are published only at its end: what is read in it is lost where the run is stopped.
_WINDOW_BATCHES = 32

# On a CPU a window also ends after this many tokens, so that a run of a few million has a window for each of eight processes.
_WINDOW_TOKENS = 1 << 18

# On a CPU one more forward pass costs about as much as this many padded tokens (36 measured at 2,048 tokens a batch), and as this share
# of a full one: large batches are there because small ones leave a device idle. A card's cost comes from `model.budget`.
_PASS_TOKENS = 32
_PASS_SHARE = 1 / 512
# On a card a pass costs at least what launching its kernels takes, and no more while it computes longer than that: the host launches one
# batch while another computes.
# In addition a small product leaves part of a large card idle. This is an estimate in tokens that was not measured.
_CARD_PASS_TOKENS = 256


@dataclass(frozen=True)
class CardCosts:
    """What passes cost on a card, by a model's shape; see `model.budget`.

    pass_tokens: tokens that keep a card busy while the kernels of the next pass are launched.
    minute_tokens: tokens that it computes in about a minute. A window holds no more.
    mask_above, mask_length: prompts longer than mask_above have an attention mask in memory. At mask_length tokens the mask takes as much
        as everything else does, so a batch of that length counts twice. None without a mask.
    """

    pass_tokens: int
    minute_tokens: int
    mask_above: int | None = None
    mask_length: int | None = None


@dataclass(frozen=True)
class Shard:
    """One shard file: prompts first to end - 1 of the run."""

    index: int
    first: int
    end: int
    n_tokens: int


@dataclass(frozen=True)
class Piece:
    """What one window adds to one shard: prompts first to end - 1 of the run, n_tokens rows, from row `row` of the window's buffer."""

    shard: Shard
    first: int
    end: int
    row: int
    n_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the shard is whole with this piece."""
        return self.end == self.shard.end


@dataclass(frozen=True)
class Window:
    """Prompts first to end - 1, n_tokens in all, whose captured rows stand in memory together."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def first(self) -> int:
        return self.pieces[0].first

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def n_tokens(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)

    def is_left(self, done: Container[int]) -> bool:
        """Whether it adds to a shard whose number is not among those that are done."""
        return any(piece.shard.index not in done for piece in self.pieces)


@dataclass(frozen=True)
class Plan:
    """Shards and windows of a run, in order, and the token budget of a batch. card: None without a card."""

    lengths: npt.NDArray[np.int64]
    shards: tuple[Shard, ...]
    windows: tuple[Window, ...]
    batch_tokens: int
    length_switches: tuple[int, ...]
    card: CardCosts | None = None

    def footprint(self, n_prompts: int, longest: int) -> int:
        """Return what a batch counts against the batch budget: its padded tokens, plus its attention masks in tokens."""
        card = self.card
        if card is None or card.mask_length is None or card.mask_above is None or longest <= card.mask_above:
            return n_prompts * longest
        return n_prompts * (longest + longest * longest // card.mask_length)

    def units(self) -> list[tuple[Window, ...]]:
        """The windows in order, those that fill one shard together: what one process takes, so that no two write one file."""
        units: list[list[Window]] = []
        for window in self.windows:
            if units and units[-1][-1].pieces[-1].shard == window.pieces[0].shard:
                units[-1].append(window)
            else:
                units.append([window])
        return [tuple(unit) for unit in units]

    def batches(self, window: Window, batch_tokens: int | None = None) -> list[list[int]]:
        """Return the prompts of each batch of a window, longest first; rows * longest stays within the budget, save for a single prompt.

        batch_tokens: the budget; by default the plan's own.
        """
        return self.cut(range(window.first, window.end), batch_tokens or self.batch_tokens)

    def cut(self, prompts: Sequence[int], batch_tokens: int) -> list[list[int]]:
        """The same for any prompts, ascending, and any budget."""
        chosen = np.asarray(prompts, dtype=np.int64)
        order = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        # Prompts on both sides of a switch never share a batch.
        edges = [int((self.lengths[order] > switch).sum()) for switch in reversed(self.length_switches)]
        groups = [group for group in np.split(order, edges) if len(group)]
        overhead, least = _PASS_TOKENS + batch_tokens * _PASS_SHARE, 0
        if self.card is not None:
            overhead, least = _CARD_PASS_TOKENS, self.card.pass_tokens
        found = []
        for group in groups:
            most = [max(batch_tokens // self.footprint(1, longest), 1) for longest in self.lengths[group].tolist()]
            cuts = _cheapest_cuts(self.lengths[group], most, overhead, least)
            found += [group[first:end].tolist() for first, end in cuts]
        return found


def make_plan(
    lengths: npt.NDArray[np.int64],
    shard_size: int,
    token_bytes: int,
    window_bytes: int,
    batch_tokens: int,
    length_switches: tuple[int, ...] = (),
    equal_above: int | None = None,
    window_tokens: int | None = None,
    card: CardCosts | None = None,
) -> Plan:
    """Plan a run.

    lengths: int64 [prompt], tokens of each prompt.
    token_bytes: bytes captured for one token, over all layers.
    window_bytes: host memory for captured rows. A window takes at most half, so that one fills while the one before is written;
        a single prompt that is larger makes a window of its own.
    batch_tokens: padded tokens of one forward pass.
    length_switches: lengths above which the model reads a whole batch otherwise, ascending.
    equal_above: above this length only prompts of the same length share a batch.
    window_tokens: the most tokens of a window, instead of what follows from window_bytes and batch_tokens.
    card: what passes cost on a card, if the device is one.
    """
    if equal_above is not None:
        own = lengths[lengths > equal_above].tolist()
        length_switches = tuple(sorted({*length_switches, equal_above, *own}))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    by_bytes = max(1, window_bytes // 2 // token_bytes)
    by_time = _WINDOW_TOKENS if card is None else card.minute_tokens
    max_tokens = window_tokens or min(by_bytes, _WINDOW_BATCHES * batch_tokens, max(by_time, batch_tokens))
    shards = tuple(
        Shard(index, first, end := min(first + shard_size, len(lengths)), int(offsets[end] - offsets[first]))
        for index, first in enumerate(range(0, len(lengths), shard_size))
    )
    windows = tuple(_windows(shards, offsets, max_tokens))
    return Plan(lengths, shards, windows, batch_tokens, length_switches, card)


def _windows(shards: tuple[Shard, ...], offsets: npt.NDArray[np.int64], max_tokens: int) -> Iterator[Window]:
    index = 0
    pieces: list[Piece] = []
    rows = 0
    for shard in shards:
        if pieces and rows + shard.n_tokens > max_tokens:
            yield Window(index, tuple(pieces))
            index, pieces, rows = index + 1, [], 0
        if shard.n_tokens <= max_tokens:
            pieces.append(Piece(shard, shard.first, shard.end, rows, shard.n_tokens))
            rows += shard.n_tokens
            continue
        for piece in _split(shard, offsets, max_tokens):
            yield Window(index, (piece,))
            index += 1
    if pieces:
        yield Window(index, tuple(pieces))


def _split(shard: Shard, offsets: npt.NDArray[np.int64], max_tokens: int) -> Iterator[Piece]:
    """A shard that is larger than a window, in pieces of at most max_tokens, or of one prompt where that is longer."""
    first = shard.first
    while first < shard.end:
        fitting = int(np.searchsorted(offsets, offsets[first] + max_tokens, side="right")) - 1
        end = min(max(fitting, first + 1), shard.end)
        yield Piece(shard, first, end, 0, int(offsets[end] - offsets[first]))
        first = end


def _cheapest_cuts(descending: npt.NDArray[np.int64], most: Sequence[int], overhead: float, least: int) -> list[tuple[int, int]]:
    """Cut lengths in descending order into batches such that padding and the number of passes together cost the least.

    most: how many prompts fit a batch whose longest is that one. overhead: what a pass costs in addition to its padded tokens.
    least: the least that its padded tokens cost.

    Dynamic programming over the cuts: best[j] is the lowest cost of the first j prompts, where a batch of prompts i to j - 1 costs its
    padded tokens, (j - i) * descending[i], but not less than `least`, and the overhead of one pass.
    """
    n = len(descending)
    best = np.full(n + 1, np.inf)
    best[0] = 0
    begin = np.zeros(n + 1, dtype=np.int64)
    counts = np.arange(1, n + 1)
    for i, longest in enumerate(descending.tolist()):
        n_ends = min(most[i], n - i)
        costs = best[i] + overhead + np.maximum(longest * counts[:n_ends], least)
        better = costs < best[i + 1 : i + 1 + n_ends]
        best[i + 1 : i + 1 + n_ends][better] = costs[better]
        begin[i + 1 : i + 1 + n_ends][better] = i
    cuts = [(int(begin[n]), n)]
    while cuts[-1][0]:
        cuts.append((int(begin[cuts[-1][0]]), cuts[-1][0]))
    return cuts[::-1]
