"""Texts to token ids: the start token first, put there by harvest itself, and no more ids than the model's context allows."""

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harvest.errors import PromptsError

# Texts handed to the tokenizer at once: enough to keep its threads busy, few enough to bound its memory.
_TEXTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Tokens:
    """The token ids of all prompts, end to end.

    ids: int32 [token]; prompt j has ids[offsets[j]:offsets[j + 1]].
    offsets: int64 [prompt + 1].
    start_token_id: put before each prompt, or None where none was.
    cut: numbers of the prompts that were longer than the context.
    doubled: numbers of the prompts whose own text begins with the start token that was put before it.
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    start_token_id: int | None
    cut: list[int]
    doubled: list[int]

    @functools.cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt, the start token counted: int64 [prompt]."""
        return np.diff(self.offsets)

    def of(self, prompt: int) -> npt.NDArray[np.int32]:
        """The ids of one prompt: int32 [token]."""
        return self.ids[self.offsets[prompt] : self.offsets[prompt + 1]]


def tokenize(texts: Sequence[str], tokenizer: Any, start_token_id: int | None, max_tokens: int | None, vocab_size: int | None) -> Tokens:
    """Token ids of each text, after the start token where there is one, cut to the first `max_tokens` ids.

    The tokenizer's own special tokens are switched off: whether it adds a start token by itself depends on flags that get lost
    (transformers 5 drops `add_bos_token` where a tokenizer.json exists), and its `model_max_length` is 1e30 for some models.

    Raises PromptsError for a prompt without any token, and for a token id that the model's embedding does not have.
    """
    start = [] if start_token_id is None else [start_token_id]
    ids: list[npt.NDArray[np.int32]] = []
    cut: list[int] = []
    doubled: list[int] = []
    for number, own in enumerate(_own_ids(texts, tokenizer)):
        if start and own[:1] == start:
            doubled.append(number)
        row = np.array([*start, *own], dtype=np.int32)
        if max_tokens is not None and len(row) > max_tokens:
            cut.append(number)
            row = row[:max_tokens]
        if not len(row):
            raise PromptsError(f"prompt {number}: {texts[number][:40]!r} has no tokens, and no start token is added; leave it out")
        if vocab_size is not None and row.max() >= vocab_size:
            raise PromptsError(
                f"prompt {number}: token id {row.max()} is beyond the model's {vocab_size} embeddings; "
                "its tokenizer does not belong to this model, or the text holds a special token that the model lacks"
            )
        ids.append(row)
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in ids], out=offsets[1:])
    return Tokens(np.concatenate(ids), offsets, start_token_id, cut, doubled)


def _own_ids(texts: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    with _without_length_warning():
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            batch = list(texts[first : first + _TEXTS_AT_ONCE])
            yield from tokenizer(batch, add_special_tokens=False, truncation=False, padding=False)["input_ids"]


@contextmanager
def _without_length_warning() -> Iterator[None]:
    """Silence "sequence length is longer than the specified maximum": the ids are cut after it is said."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
