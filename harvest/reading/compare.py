"""Two runs of the same prompts compared: token ids first, then each layer that both hold.

A doubled or missing start token shifts every position, and then no value tells anything: so the ids come first, and only prompts whose
ids are the same are compared further.

Shapes: L layers that both runs hold, T tokens, W values a token.
"""

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import CompareError, NotARunError
from harvest.progress import Reporter, Silent
from harvest.reading.blocks import read_blocks, widened
from harvest.reading.run import Run, open_run
from harvest.reading.token_ids import IdDifference, compare_ids

# What the service's makers measured between two batch shapes of one engine.
MIN_COSINE = 0.9997

_Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerComparison:
    """One layer of B against A's, over the tokens of all prompts whose ids are the same.

    mean_cosine, worst_cosine: of a token's values in A and in B; 1 where both are all zero, NaN where a value is not finite.
    prompt, position: of the token with the worst cosine.
    relative_error: the Frobenius norm of B - A over that of A, the first token of each prompt left out: its norm would swamp the others.
    differing_tokens: those whose values are not all equal.
    """

    layer: int
    mean_cosine: float
    worst_cosine: float
    prompt: int
    position: int
    relative_error: float
    differing_tokens: int


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common. n_prompts, n_tokens: compared in each layer, which are those whose ids are the same."""

    a: str
    b: str
    min_cosine: float
    n_prompts: int
    n_tokens: int
    id_differences: list[IdDifference]
    layers: list[LayerComparison]
    layers_only_in_a: list[int]
    layers_only_in_b: list[int]

    @property
    def low_layers(self) -> list[int]:
        """Layers whose mean cosine is below the bound, or is no number."""
        return [layer.layer for layer in self.layers if not layer.mean_cosine >= self.min_cosine]

    @property
    def agrees(self) -> bool:
        """Whether all token ids are the same and every layer's mean cosine reaches the bound."""
        return not self.id_differences and not self.low_layers

    def to_json(self) -> str:
        """The comparison as JSON; a figure that is no finite number is null."""
        fields = {"agrees": self.agrees, **asdict(self)}
        for layer in fields["layers"]:
            layer.update({name: None for name, value in layer.items() if not math.isfinite(value)})
        return json.dumps(fields, indent=2)

    def to_text(self) -> str:
        """The comparison as a table to read."""
        lines = [f"A  {self.a}", f"B  {self.b}"]
        for difference in self.id_differences:
            others = f" ({difference.n_prompts} prompts in all)" if difference.n_prompts > 1 else ""
            lines.append(f"token ids: prompt {difference.prompt}, position {difference.position}: {difference.what}{others}")
        if not self.id_differences:
            lines.append("token ids: the same")
        lines.append(f"compared: {self.n_prompts} prompts, {self.n_tokens} tokens")
        if self.layers:
            lines.append("layer  mean cosine  worst cosine  at prompt  position  relative error  differing tokens")
        lines += [
            f"{row.layer:5}  {row.mean_cosine:11.7f}  {row.worst_cosine:12.7f}  {row.prompt:9}  {row.position:8}  "
            f"{row.relative_error:14.2e}  {row.differing_tokens:16}"
            for row in self.layers
        ]
        for name, only in (("A", self.layers_only_in_a), ("B", self.layers_only_in_b)):
            if only:
                lines.append(f"layers only in {name}: {', '.join(map(str, only))}")
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        if self.agrees:
            return f"A and B agree: the same token ids, and each layer's mean cosine is at least {self.min_cosine}"
        differences = ["token ids"] if self.id_differences else []
        if self.low_layers:
            differences.append(f"the mean cosine is below {self.min_cosine} in layers {', '.join(map(str, self.low_layers))}")
        if not self.layers:
            differences.append("no prompt has the same ids in both, so no values were compared")
        return f"A and B differ: {'; '.join(differences)}"


def compare(path_a: str | Path, path_b: str | Path, min_cosine: float = MIN_COSINE, reporter: Reporter | None = None) -> Comparison:
    """Compare run B with run A, folders of either kind. Reads a block of each at a time, and each stored value once.

    Raises CompareError where they cannot be compared: one is no run, or damaged, or they are of other prompts, contents or layers.
    """
    try:
        a, b = open_run(path_a), open_run(path_b)
        _check_comparable(a, b)
        lengths, differences = compare_ids(a, b)
        layers = [layer for layer in a.layers if layer in b.layers]
        compared = _compare_layers(a, b, layers, lengths, reporter or Silent()) if any(lengths) else []
    except NotARunError as error:
        raise CompareError(f"{error}; harvest verify says what is wrong with a run") from error
    return Comparison(
        a=str(path_a),
        b=str(path_b),
        min_cosine=min_cosine,
        n_prompts=sum(map(bool, lengths)),
        n_tokens=sum(lengths),
        id_differences=differences,
        layers=compared,
        layers_only_in_a=[layer for layer in a.layers if layer not in b.layers],
        layers_only_in_b=[layer for layer in b.layers if layer not in a.layers],
    )


def _check_comparable(a: Run, b: Run) -> None:
    texts_a, texts_b = a.manifest.prompts, b.manifest.prompts
    if len(texts_a) != len(texts_b):
        raise CompareError(f"A holds {len(texts_a)} prompts and B {len(texts_b)}; only runs of the same prompts can be compared")
    for number, (text_a, text_b) in enumerate(zip(texts_a, texts_b, strict=True)):
        if text_a != text_b:
            raise CompareError(
                f"prompt {number} is {text_a[:40]!r} in A and {text_b[:40]!r} in B; only runs of the same prompts can be compared"
            )
    for name, of_a, of_b in (("contents", a.manifest.contents, b.manifest.contents), ("values a token", a.width, b.width)):
        if of_a != of_b:
            raise CompareError(f"{name}: {of_a} in A and {of_b} in B, which cannot be compared")
    if not set(a.layers) & set(b.layers):
        raise CompareError(f"layers: A holds {a.layers} and B {b.layers}; there is none that both hold")


class _Totals:
    """The figures of one layer, added up block by block."""

    def __init__(self) -> None:
        self._cosine_sum = 0.0
        self._worst = (math.inf, 0)
        self._error_sq, self._reference_sq = 0.0, 0.0
        self._n_differing = 0

    def add(self, a_TW: torch.Tensor, b_TW: torch.Tensor, first: int, is_start_T: npt.NDArray[np.bool_]) -> None:
        """Rows of A and B, the number of the first of them, and which of them are a prompt's first."""
        for (start, piece_a_TW), (_, piece_b_TW) in zip(widened(a_TW), widened(b_TW), strict=True):
            self._add_piece(piece_a_TW, piece_b_TW, first + start, is_start_T[start : start + len(piece_a_TW)])

    def _add_piece(self, a_TW: _Rows, b_TW: _Rows, first: int, is_start_T: npt.NDArray[np.bool_]) -> None:
        # What is not finite makes a NaN, and that is said of it.
        with np.errstate(invalid="ignore", divide="ignore"):
            sq_a_T, sq_b_T, dot_T = (np.einsum("tw,tw->t", left, right) for left, right in ((a_TW, a_TW), (b_TW, b_TW), (a_TW, b_TW)))
            # The root of the product, and not the product of the roots: equal rows then have a cosine of exactly 1.
            cosine_T = dot_T / np.sqrt(sq_a_T * sq_b_T)
            difference_TW = b_TW - a_TW
            error_sq_T = np.einsum("tw,tw->t", difference_TW, difference_TW)
        is_zero_T = (sq_a_T == 0) | (sq_b_T == 0)
        cosine_T[is_zero_T] = (sq_a_T == sq_b_T)[is_zero_T]
        self._cosine_sum += float(cosine_T.sum())
        # The lowest; for numpy a NaN is lower than any number, and here too.
        worst = int(cosine_T.argmin())
        if not math.isnan(self._worst[0]) and not cosine_T[worst] >= self._worst[0]:
            self._worst = (float(cosine_T[worst]), first + worst)
        self._n_differing += int(np.count_nonzero(error_sq_T))
        self._error_sq += float(error_sq_T[~is_start_T].sum())
        self._reference_sq += float(sq_a_T[~is_start_T].sum())

    def figures(self, layer: int, offsets: Sequence[int], prompts: Sequence[int]) -> LayerComparison:
        """The layer's figures. offsets: of the prompts that were compared, over their tokens end to end; prompts: their numbers."""
        error = self._error_sq / self._reference_sq if self._reference_sq else math.inf if self._error_sq else 0.0
        worst_cosine, row = self._worst
        place = bisect.bisect_right(offsets, row) - 1
        mean_cosine = self._cosine_sum / offsets[-1]
        return LayerComparison(layer, mean_cosine, worst_cosine, prompts[place], row - offsets[place], math.sqrt(error), self._n_differing)


def _compare_layers(a: Run, b: Run, layers: list[int], lengths: list[int], reporter: Reporter) -> list[LayerComparison]:
    """Compare the prompts that have a length, the others being left out of both."""
    kept = np.array(lengths) > 0
    offsets = [0, *itertools.accumulate(filter(None, lengths))]
    is_start_T = np.zeros(offsets[-1], dtype=bool)
    is_start_T[offsets[:-1]] = True
    totals = [_Totals() for _ in layers]
    first = 0
    reporter.begin(offsets[-1], 0)
    try:
        for a_LTW, b_LTW in _side_by_side(_kept_rows(a, layers, kept), _kept_rows(b, layers, kept)):
            n_tokens = a_LTW.shape[1]
            for position, total in enumerate(totals):
                total.add(a_LTW[position], b_LTW[position], first, is_start_T[first : first + n_tokens])
            first += n_tokens
            reporter.advance(n_tokens)
    finally:
        reporter.end()
    if first != offsets[-1]:
        raise NotARunError(f"A and B hold {first} rows of {offsets[-1]} tokens; one of them is not whole")
    prompts = np.flatnonzero(kept).tolist()
    return [total.figures(layer, offsets, prompts) for layer, total in zip(layers, totals, strict=True)]


def _kept_rows(run: Run, layers: list[int], kept: Any) -> Iterator[torch.Tensor]:
    """The rows of the prompts that are kept, [L, T, W], a block at a time."""
    positions = [run.layer_position(layer) for layer in layers]
    for index in range(run.n_shards):
        with run.shard(index) as shard:
            is_kept_T = torch.from_numpy(np.repeat(kept[shard.prompts], np.diff(shard.token_offsets)))
            for start, rows_LTW in read_blocks(shard, positions):
                of_block = is_kept_T[start : start + rows_LTW.shape[1]]
                if of_block.any():
                    yield rows_LTW if of_block.all() else rows_LTW[:, of_block]


def _side_by_side(blocks_a: Iterator[torch.Tensor], blocks_b: Iterator[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of two runs in pairs of blocks of equal length, however each run is cut into shards and chunks."""
    a_LTW = b_LTW = None
    while True:
        a_LTW = next(blocks_a, None) if a_LTW is None or not a_LTW.shape[1] else a_LTW
        b_LTW = next(blocks_b, None) if b_LTW is None or not b_LTW.shape[1] else b_LTW
        if a_LTW is None or b_LTW is None:
            return
        n_tokens = min(a_LTW.shape[1], b_LTW.shape[1])
        yield a_LTW[:, :n_tokens], b_LTW[:, :n_tokens]
        a_LTW, b_LTW = a_LTW[:, n_tokens:], b_LTW[:, n_tokens:]
