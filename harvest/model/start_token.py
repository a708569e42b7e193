"""The token that a model expects at the start of a text."""

import difflib
from typing import Any

from harvest.errors import RequestError


def chosen_start_token_id(choice: str, tokenizer: Any, vocab_size: int | None) -> int | None:
    """The id of a start token that a user chose: by its id, by its text, or none. Raises RequestError."""
    if choice == "none":
        return None
    vocab = tokenizer.get_vocab()
    if choice in vocab:
        return int(vocab[choice])
    if choice.isascii() and choice.isdigit():
        if vocab_size is None or int(choice) < vocab_size:
            return int(choice)
        raise RequestError(f"start_token: {choice} was given, but the model has {vocab_size} token ids, 0 to {vocab_size - 1}")
    near = difflib.get_close_matches(choice, [token for token in vocab if token.startswith(choice[:1])], n=3)
    hint = f"; near to it are {', '.join(map(repr, near))}" if near else ""
    raise RequestError(f"start_token: {choice!r} is no token of this model{hint}; give a token's text, its id, none or auto")


def start_token_id(tokenizer: Any, config: Any) -> int | None:
    """The id of a model's start token, or None for a model that has none.

    The tokenizer's `bos_token` says it. A tokenizer that leaves it out on purpose has none, whatever its config's `bos_token_id`
    (Qwen's names the end-of-text token); only where the tokenizer says nothing at all does the config count.
    """
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    if "bos_token" in tokenizer.init_kwargs:
        return None
    config_id = getattr(config.get_text_config(decoder=True), "bos_token_id", None)
    return config_id if isinstance(config_id, int) else None
