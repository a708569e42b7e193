"""The tokens that lie furthest along a direction, either way, each with the tokens around it.

Shapes: T tokens, W directions.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harvest.reading.run import Run

RADIUS = 12


@dataclass(frozen=True)
class Token:
    """A token by its place in the run, and its value along a direction."""

    value: float
    prompt: int
    position: int


@dataclass(frozen=True)
class Context:
    """A token and those around it. first: the position of the first of them; ids, values: of each."""

    token: Token
    first: int
    ids: list[int]
    values: list[float]


class Strongest:
    """The n most positive and the n most negative tokens of each direction.

    Of one prompt the strongest token alone, so that one text does not fill the list; where there are fewer than n prompts, as many of each
    as it takes.
    """

    def __init__(self, width: int, n: int, n_prompts: int) -> None:
        self._n = n
        self._of_a_prompt = -(-n // n_prompts)
        # By size, whatever the sign, the largest first.
        self.positive: list[list[Token]] = [[] for _ in range(width)]
        self.negative: list[list[Token]] = [[] for _ in range(width)]

    def add(self, rows_TW: npt.NDArray[np.float64], prompt_T: npt.NDArray[np.int64], position_T: npt.NDArray[np.int64]) -> None:
        """Look at rows, all of them finite, with the prompt and the position of each."""
        starts = [0, *(np.flatnonzero(np.diff(prompt_T)) + 1).tolist(), len(prompt_T)]
        for start, stop in itertools.pairwise(starts):
            for sign, found in ((1, self.positive), (-1, self.negative)):
                self._add_prompt(sign, found, rows_TW[start:stop], int(prompt_T[start]), position_T[start:stop])

    def _add_prompt(
        self, sign: int, found: list[list[Token]], rows_TW: npt.NDArray[np.float64], prompt: int, position_T: npt.NDArray[np.int64]
    ) -> None:
        n = min(self._of_a_prompt, len(rows_TW))
        best_nW = np.argpartition(-sign * rows_TW, n - 1, axis=0)[:n]
        value_nW = np.take_along_axis(rows_TW, best_nW, axis=0)
        least_W = [sign * tokens[-1].value if len(tokens) == self._n else -np.inf for tokens in found]
        for place, direction in np.argwhere(sign * value_nW > least_W):
            token = Token(float(value_nW[place, direction]), prompt, int(position_T[best_nW[place, direction]]))
            self._insert(sign, found[direction], token)

    def _insert(self, sign: int, tokens: list[Token], token: Token) -> None:
        bisect.insort(tokens, token, key=lambda one: (-sign * one.value, one.prompt, one.position))
        # The rest of a prompt that was cut between two blocks may come with stronger tokens than its beginning.
        same = [one for one in tokens if one.prompt == token.prompt]
        for weaker in same[self._of_a_prompt :]:
            tokens.remove(weaker)
        del tokens[self._n :]


def read_contexts(run: Run, layer: int, directions: Iterable[tuple[int, Sequence[Token]]]) -> dict[tuple[int, Token], Context]:
    """The tokens around each of those given for a direction, read from the run: RADIUS on either side, within the prompt.

    Answers them by direction and token. A prompt's rows are read once.
    """
    wanted: dict[int, list[tuple[int, Token]]] = {}
    for direction, tokens in directions:
        for token in tokens:
            wanted.setdefault(token.prompt, []).append((direction, token))
    position = run.layer_position(layer)
    firsts = [entry.prompt_indices[0] for entry in run.manifest.shards]
    contexts: dict[tuple[int, Token], Context] = {}
    by_shard: dict[int, list[int]] = {}
    for prompt in sorted(wanted):
        by_shard.setdefault(bisect.bisect_right(firsts, prompt) - 1, []).append(prompt)
    for index, prompts in by_shard.items():
        with run.shard(index) as shard:
            for prompt in prompts:
                start = shard.token_offsets[shard.prompts.index(prompt)]
                ids = shard[f"tokens_{prompt}"]
                low = max(min(token.position for _, token in wanted[prompt]) - RADIUS, 0)
                high = min(max(token.position for _, token in wanted[prompt]) + RADIUS + 1, len(ids))
                rows_TW = shard.layer(position, start + low, start + high).double()
                for direction, token in wanted[prompt]:
                    first, stop = max(token.position - RADIUS, 0), min(token.position + RADIUS + 1, len(ids))
                    values = rows_TW[first - low : stop - low, direction].tolist()
                    contexts[direction, token] = Context(token, first, ids[first:stop].tolist(), values)
    return contexts
