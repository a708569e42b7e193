"""The token that a model expects at the start of a text."""

from typing import Any


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
