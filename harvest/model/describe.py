"""What a model's config and tokenizer say of it, read before its weights, and cheaply."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import transformers

from harvest.errors import ModelError
from harvest.model import tiny
from harvest.model.adapter import Adapter, find_adapter
from harvest.model.classes import check_architecture, n_decoder_layers
from harvest.model.pretrained import check_weight_files, from_pretrained, own_class, see_whether_reachable
from harvest.model.revision import cached_commit, folder_revision
from harvest.model.sources import Source
from harvest.settings import Dtype

# The fields of configs that say how many: of DeepSeek V3.2's and GLM's indexer, and of Doge's mask.
_CHOSEN_KEYS = ("index_topk", "keep_window_size")


@dataclass(frozen=True)
class Description:
    """What is known of a model before its weights are loaded.

    repository: the Hugging Face id, the folder, or "tiny".
    revision: the Hub's commit, or a digest of the folder's files.
    context_length: tokens, or None where the architecture has no limit.
    length_switches: lengths above which the model reads a whole batch otherwise, ascending; see `find_length_switches`.
    n_chosen_keys: of how many keys its attention makes a choice at most, so that prompts above that length are never padded; or None.
    dtype: the type to compute in by default: that of the weights, or bfloat16 where they are in none of the three types.
    adapter: a PEFT adapter that is put on the model, or None.
    """

    source: Source
    config: Any
    tokenizer: Any
    repository: str
    revision: str
    n_layers: int
    hidden_size: int
    vocab_size: int | None
    context_length: int | None
    length_switches: tuple[int, ...]
    n_chosen_keys: int | None
    dtype: str
    adapter: Adapter | None = None


def describe(source: Source, check: Callable[[], None] = lambda: None, note: Callable[[str], None] = lambda _: None) -> Description:
    """Read a model's config and tokenizer. Raises ModelError, with the reason, for one that harvest cannot read.

    check: called now and then while large files are read, and raises to stop. note: told what a user should know.
    """
    if not source.is_tiny and not source.is_local:
        see_whether_reachable(note)
    if source.is_tiny:
        config, tokenizer, revision = tiny.tiny_config(), tiny.tiny_tokenizer(), tiny.REVISION
    else:
        config = from_pretrained(transformers.AutoConfig, source)
        if own_class(source, config) is None:
            check_architecture(source.name, config)
        source, revision = _pin(source, check)
        check_weight_files(source)
        tokenizer = from_pretrained(transformers.AutoTokenizer, source)
    text = config.get_text_config(decoder=True)
    sizes = {"num_hidden_layers": n_decoder_layers(config), "hidden_size": getattr(text, "hidden_size", None)}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"model: the config of {source.name} has {name} {value!r}, where a number from 1 was expected; mend config.json"
            )
    return Description(
        source=source,
        config=config,
        tokenizer=tokenizer,
        repository=source.location,
        revision=revision,
        n_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=getattr(text, "vocab_size", None),
        context_length=source.context_length or max_context(config),
        length_switches=find_length_switches(text),
        n_chosen_keys=find_chosen_keys(text),
        dtype=source.dtype or _dtype_name(text.dtype or config.dtype),
        adapter=find_adapter(source, check),
    )


def load_tokenizer(source: Source) -> Any:
    """A model's tokenizer alone, from this machine's files: nothing is downloaded. Raises ModelError where it is not there."""
    return tiny.tiny_tokenizer() if source.is_tiny else from_pretrained(transformers.AutoTokenizer, source, local_files_only=True)


def _pin(source: Source, check: Callable[[], None]) -> tuple[Source, str]:
    """The revision of a model whose config was just read, and its source for the rest of the files: a branch may move between two."""
    if source.is_local:
        return source, folder_revision(Path(source.location), source.gguf_file, check)
    commit = cached_commit(source.location, source.revision)
    return replace(source, revision=commit), commit


def max_context(config: Any) -> int | None:
    """The longest input, in tokens, that a config allows; None where it names no limit, as state-space models do."""
    text = config.get_text_config(decoder=True)
    # Bloom's seq_length, MPT's max_seq_len and Whisper's max_target_positions are the same limit by other names.
    for name in ("max_position_embeddings", "max_seq_len", "seq_length", "max_target_positions"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def find_chosen_keys(text_config: Any) -> int | None:
    """How many keys sparse attention chooses for a token, or None where it takes all that it may see.

    transformers makes the choice among all keys of a batch, so what a token sees hangs on how many tokens stand to its right.
    """
    chosen = (getattr(text_config, name, None) for name in _CHOSEN_KEYS)
    return next((value for value in chosen if isinstance(value, int)), None)


def find_length_switches(text_config: Any) -> tuple[int, ...]:
    """The lengths, in tokens, above which LongRoPE takes its long factors, ascending; none for other models.

    transformers looks at the longest position of a batch, padding included (`longrope_frequency_update` in modeling_rope_utils.py), so a
    short prompt in a long batch would be read with the wrong rotary frequencies.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    # One set for all layers, or one by the kind of layer.
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    switches = {entry.get("original_max_position_embeddings") for entry in sets if entry.get("rope_type") == "longrope"}
    return tuple(sorted(length for length in switches if isinstance(length, int)))


def _dtype_name(dtype: Any) -> str:
    """A config's dtype by name. Configs of quantised weights name types that nothing computes in."""
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    return name if name in get_args(Dtype) else "bfloat16"
