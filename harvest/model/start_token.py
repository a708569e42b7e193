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

    The tokenizer's `bos_token` says it, also where it is the end-of-text token (GPT-2, Pythia) or where the tokenizer itself never puts it
    (Llama 3, Phi-3, Yi, DeepSeek V3). What its flags and its template say of that does not count.

    A tokenizer that leaves it out on purpose has none, whatever its config's `bos_token_id`: Qwen's names the end-of-text token. Only where
    its files say nothing at all (Falcon 7B) does the config count.
    """
    if tokenizer.bos_token_id is not None and _is_in_files(tokenizer):
        return int(tokenizer.bos_token_id)
    if tokenizer.bos_token is None and "bos_token" in tokenizer.init_kwargs:
        return None
    config_id = getattr(config.get_text_config(decoder=True), "bos_token_id", None)
    return config_id if isinstance(config_id, int) else None


def _is_in_files(tokenizer: Any) -> bool:
    """Whether the bos_token was in the files' vocabulary.

    A class of transformers has a bos_token of its own for files that name none (GPT-2's and GPT-NeoX's is <|endoftext|>, Llama's <s>), and
    adds it to a vocabulary without it, under a new id: one that no weight was trained for, or that has none.
    """
    # Mistral's own tokenizer has no is_fast, and one in Python no backend: their classes are written for their files.
    if not getattr(tokenizer, "is_fast", False):
        return True
    added_in_files = tokenizer.init_kwargs.get("added_tokens_decoder", {})
    return tokenizer.bos_token_id in added_in_files or tokenizer.bos_token in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)


def about_token(tokenizer: Any, token_id: int | None) -> dict[str, Any] | None:
    """A token as documents name it, by its id and its text; None for none."""
    return None if token_id is None else {"id": token_id, "text": tokenizer.convert_ids_to_tokens(token_id)}
