"""Every causal type that transformers knows, as a tiny random model: read right, or refused; never wrong."""

from collections import Counter

import pytest
from sweep import COVERED, REFUSED, UNBUILT, WRONG, main, sweep
from tiny_configs import causal_types

# By the release of transformers that constraints.txt names; another may have more types, and build others.
LEAST_COVERED = 135
LEAST_CUT = 130


@pytest.mark.timeout(900)
def test_every_causal_type_is_read_right_or_refused() -> None:
    rows = [sweep(model_type) for model_type in sorted(causal_types())]
    states = Counter(row.state for row in rows)
    table = "\n".join(map(str, rows))
    assert states[WRONG] == 0, table
    assert states[COVERED] >= LEAST_COVERED, table
    assert sum(row.is_cut for row in rows) >= LEAST_CUT, table
    assert states[COVERED] + states[REFUSED] + states[UNBUILT] == len(rows)


@pytest.mark.parametrize(
    ("model_type", "state", "words"),
    [
        ("llama", COVERED, "same bits; final norm norm"),
        ("opt", COVERED, "same bits"),
        ("mamba", COVERED, "same bits"),
        ("bert-generation", REFUSED, "when the tokens to its right are other"),
        ("dory", REFUSED, "calls its 4 decoder blocks as 0, 1, 2, 3, 0"),
        ("deepseek_v4", REFUSED, "where one stream of shape"),
        ("doge", REFUSED, "when more tokens stand to its right"),
        ("prophetnet", REFUSED, "an encoder-decoder"),
    ],
)
def test_what_is_said_of_a_type(model_type: str, state: str, words: str) -> None:
    row = sweep(model_type)
    assert (row.state, words in row.words) == (state, True), row


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama"]) == 0
    assert "llama                        covered" in capsys.readouterr().out
