"""Prompts for the benches: the 96 texts of the tests, and as many more as are asked for, cut out of them to log-normal lengths."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measuring import ROOT

_PROMPTS_96 = ROOT / "tests" / "data" / "prompts-96.jsonl"
_SEED = 20261201
_MEDIAN_TOKENS = 60
_MAX_TOKENS = 511
_SIGMA = 1.0


def read_96() -> list[str]:
    """The 96 English prompts."""
    return [json.loads(line)["prompt"] for line in _PROMPTS_96.read_text().splitlines()]


def corpus() -> str:
    """All 96 texts end to end."""
    return "\n\n".join(read_96())


def cut_texts(text: str, starts: Sequence[int], count: int) -> list[str]:
    """So many pieces of a text, the same ones each time: log-normal lengths, a median of 60 tokens, at most 511.

    starts: the character at which each token of the text begins, ascending.
    """
    edges = np.unique(np.asarray([*starts, len(text)]))
    draw = np.random.default_rng(_SEED)
    longest = min(_MAX_TOKENS, len(edges) - 1)
    lengths = draw.lognormal(np.log(_MEDIAN_TOKENS), _SIGMA, count).clip(1, longest).astype(np.int64)
    firsts = draw.integers(0, len(edges) - lengths)
    return [text[edges[first] : edges[first + length]] for first, length in zip(firsts, lengths, strict=True)]


def write_prompts(path: Path, texts: Sequence[str]) -> None:
    """Write texts as a prompts file."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
