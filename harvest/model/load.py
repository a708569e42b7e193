"""A model's config and tokenizer, read first and cheaply; then its decoder's weights, on the device."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import transformers

from harvest.errors import ModelError
from harvest.model import tiny
from harvest.model.blocks import LoadedDecoder, cut_blocks, cut_class, decoder_of
from harvest.model.revision import folder_revision
from harvest.model.sources import Source
from harvest.settings import Dtype


@dataclass(frozen=True)
class Description:
    """What is known of a model before its weights are loaded.

    repository: the Hugging Face id, the folder, or "tiny".
    revision: the Hub's commit, or a digest of the folder's files.
    context_length: tokens, or None where the architecture has no limit.
    length_switches: lengths above which the model reads a whole batch otherwise, ascending; see `find_length_switches`.
    dtype: the type to compute in by default: that of the weights, or bfloat16 where they are in none of the three types.
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
    dtype: str


def describe(source: Source, check: Callable[[], None] = lambda: None) -> Description:
    """Read a model's config and tokenizer. Raises ModelError, with the reason, for one that harvest cannot read.

    check: called now and then while large files are read, and raises to stop.
    """
    if source.is_tiny:
        config, tokenizer, revision = tiny.tiny_config(), tiny.tiny_tokenizer(), tiny.REVISION
    else:
        config = _from_pretrained(transformers.AutoConfig, source)
        _check_architecture(source, config)
        tokenizer = _from_pretrained(transformers.AutoTokenizer, source)
        revision = getattr(config, "_commit_hash", None) or folder_revision(Path(source.location), source.gguf_file, check)
    text = config.get_text_config(decoder=True)
    for name in ("num_hidden_layers", "hidden_size"):
        value = getattr(text, name, None)
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
        n_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=getattr(text, "vocab_size", None),
        context_length=source.context_length or max_context(config),
        length_switches=find_length_switches(text),
        dtype=source.dtype or _dtype_name(text.dtype or config.dtype),
    )


def max_context(config: Any) -> int | None:
    """The longest input, in tokens, that a config allows; None where it names no limit, as state-space models do."""
    text = config.get_text_config(decoder=True)
    # Bloom's seq_length, MPT's max_seq_len and Whisper's max_target_positions are the same limit by other names.
    for name in ("max_position_embeddings", "max_seq_len", "seq_length", "max_target_positions"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


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


def load_decoder(
    description: Description,
    device: torch.device,
    dtype: torch.dtype,
    n_blocks: int,
    attention: str = "auto",
    allow_cut: bool = True,
) -> LoadedDecoder:
    """Load the first `n_blocks` blocks of a model's decoder, without its LM head, ready for inference. Raises ModelError.

    attention: the kind of transformers' attention, or auto for its own choice.
    Where a model cannot be made without the blocks above, or must not, as allow_cut says, they are loaded too; `drop_above` frees them.
    """
    source, n_layers = description.source, description.n_layers
    if source.is_tiny:
        model: Any = tiny.tiny_model()
        if attention != "auto":
            model.set_attn_implementation(attention)
        cut_blocks(model, n_layers, n_blocks)
        decoder = decoder_of(model.to(device=device, dtype=dtype), n_layers)
    elif allow_cut:
        try:
            decoder = _load(cut_class(_model_class(description), n_layers, n_blocks), description, device, dtype, attention)
        except Exception:
            # Whatever stands in the way of a cut model, the whole one shows whether the model itself is at fault.
            return load_decoder(description, device, dtype, n_blocks, attention, allow_cut=False)
    else:
        decoder = _load(_model_class(description), description, device, dtype, attention)
    decoder.module.eval()
    decoder.module.requires_grad_(False)
    return decoder


def _load(model_class: Any, description: Description, device: torch.device, dtype: torch.dtype, attention: str) -> LoadedDecoder:
    # An explicit device map makes the weights go to the device as they are read, and not through a second copy in host memory.
    kwargs: dict[str, Any] = {
        "dtype": dtype,
        "device_map": {"": device},
        "output_loading_info": True,
        "config": copy.deepcopy(description.config),
    }
    if attention != "auto":
        kwargs["attn_implementation"] = attention
    verbosity = transformers.logging.get_verbosity()
    # It lists the tensors of the blocks that were left out; those that are missing are an error below.
    transformers.logging.set_verbosity_error()
    try:
        model, info = _from_pretrained(model_class, description.source, **kwargs)
    finally:
        transformers.logging.set_verbosity(verbosity)
    decoder = decoder_of(model, description.n_layers)
    _check_weights(description.source, decoder.module, model, info)
    return decoder


def _model_class(description: Description) -> Any:
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(description.config)]


def _check_weights(source: Source, decoder: torch.nn.Module, model: Any, info: dict[str, Any]) -> None:
    """Refuse a decoder with weights that its files do not hold: transformers fills them with random numbers, and only warns."""
    own = {id(tensor) for tensor in decoder.state_dict(keep_vars=True).values()}
    tensors = model.state_dict(keep_vars=True)
    made_up = sorted(name for name in info["missing_keys"] if id(tensors.get(name)) in own)
    if made_up:
        shown = ", ".join(made_up[:3]) + (", …" if len(made_up) > 3 else "")
        raise ModelError(
            f"model: the files of {source.name} lack {len(made_up)} of the decoder's tensors ({shown}), which would be random numbers; "
            "complete the files, or name the model that they belong to"
        )


def _check_architecture(source: Source, config: Any) -> None:
    if config.is_encoder_decoder:
        raise ModelError(f"model: {source.name} ({config.model_type}) is an encoder-decoder; harvest reads decoder-only models")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model: transformers {transformers.__version__} knows no causal language model of the type {config.model_type!r} "
            f"that {source.name} has; harvest reads decoder-only language models"
        )


def _from_pretrained(auto_class: Any, source: Source, **kwargs: Any) -> Any:
    if source.gguf_file is not None:
        kwargs["gguf_file"] = source.gguf_file
    if source.revision is not None:
        kwargs["revision"] = source.revision
    try:
        return auto_class.from_pretrained(source.location, **kwargs)
    except Exception as error:
        # Files that are not what they should be make transformers stumble in any of many ways.
        what = {"AutoConfig": "config", "AutoTokenizer": "tokenizer"}.get(auto_class.__name__, "weights")
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        hint = (
            ""
            if source.is_local
            else "; check the id and the network, log in with `hf auth login` where it is gated, or name a local folder"
        )
        raise ModelError(f"model: the {what} of {source.name} cannot be loaded from {source.location}: {reason}{hint}") from error


def _dtype_name(dtype: Any) -> str:
    """A config's dtype by name. Configs of quantised weights name types that nothing computes in."""
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    return name if name in get_args(Dtype) else "bfloat16"
