"""The strongest tokens of each direction, against all tokens sorted; and the tokens around them."""

from pathlib import Path

import numpy as np
import pytest

import harvest
from harvest.reading.export import export_safetensors
from harvest.report.measures import measure
from harvest.report.strongest import RADIUS, Strongest, Token, read_contexts


def by_hand(values: list[tuple[float, int, int]], n: int, of_a_prompt: int) -> list[Token]:
    """The n largest of (value, prompt, position), so many of a prompt at the most."""
    chosen: list[Token] = []
    for value, prompt, position in sorted(values, key=lambda one: (-one[0], one[1], one[2])):
        if sum(token.prompt == prompt for token in chosen) < of_a_prompt and len(chosen) < n:
            chosen.append(Token(value, prompt, position))
    return chosen


@pytest.mark.parametrize(("n_prompts", "of_a_prompt"), [(20, 1), (8, 1), (3, 3), (1, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_the_strongest_are_found_however_the_rows_are_cut(seed: int, n_prompts: int, of_a_prompt: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, n_prompts)
    prompts, positions = np.repeat(np.arange(n_prompts), lengths), np.concatenate([np.arange(length) for length in lengths])
    rows = random.standard_normal((lengths.sum(), 4))
    strongest = Strongest(4, 8, n_prompts)
    cuts = np.sort(random.integers(0, len(rows), 15))
    for piece in np.split(np.arange(len(rows)), cuts):
        if len(piece):
            strongest.add(rows[piece], prompts[piece], positions[piece])
    for direction in range(4):
        places = list(zip(prompts.tolist(), positions.tolist(), strict=True))
        column = rows[:, direction].tolist()
        expected = by_hand([(value, *place) for value, place in zip(column, places, strict=True)], 8, of_a_prompt)
        assert strongest.positive[direction] == expected
        negated = by_hand([(-value, *place) for value, place in zip(column, places, strict=True)], 8, of_a_prompt)
        assert strongest.negative[direction] == [Token(-one.value, one.prompt, one.position) for one in negated]


@pytest.mark.parametrize("is_exported", [False, True])
def test_contexts_are_the_tokens_around(is_exported: bool, projected_run: Path, tmp_path: Path) -> None:
    run = harvest.open(projected_run)
    if is_exported:
        export_safetensors(run, tmp_path / "api")
        run = harvest.open(tmp_path / "api")
    found = measure(run, [1], 10**12, 8).layers[0]
    assert found.strongest is not None
    tokens = [(direction, found.strongest.positive[direction]) for direction in range(run.width)]
    contexts = read_contexts(run, 1, tokens)
    assert len(contexts) == sum(len(row) for _, row in tokens)
    for (direction, token), context in contexts.items():
        assert token.position > 0
        rows, ids = run.prompt(token.prompt)[1, :, direction], run.token_ids(token.prompt)
        first, stop = max(token.position - RADIUS, 0), token.position + RADIUS + 1
        assert context.first == first
        assert context.ids == ids[first:stop].tolist()
        assert context.values == rows[first:stop].tolist()
        assert context.values[token.position - first] == token.value
        assert token.value == rows[1:].max().item(), "of each prompt the strongest"
