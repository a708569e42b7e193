"""Which class of transformers a model's decoder is read with, from which config, and how many blocks that decoder has.

A model for pictures or sound holds a decoder of text too, and is read by its text alone: no picture is ever given.
"""

from typing import Any

import transformers

from harvest.errors import ModelError

# From the most to the least specific: a type that has a class for text alone is read with it.
_MAPPINGS = (
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

# The field that counts a type's blocks, where num_hidden_layers counts something else. A decoder that was taken from an encoder-decoder,
# such as BART's, needs no row: its num_hidden_layers may count the encoder's blocks, and decoder_layers is looked at first.
_BLOCK_COUNTS = {
    # A block has two attentions, and num_hidden_layers counts these, for their caches.
    "longcat_flash": "num_layers",
}


def check_architecture(name: str, config: Any) -> None:
    """Raise ModelError where harvest has no way to read models of a config's type. name: the model's, for the error."""
    if config.is_encoder_decoder or config.get_text_config(decoder=True).is_encoder_decoder:
        raise ModelError(f"model: {name} ({config.model_type}) is an encoder-decoder; harvest reads decoder-only models")
    if not any(type(config) in mapping for mapping in _MAPPINGS):
        raise ModelError(
            f"model: transformers {transformers.__version__} knows no language model of the type {config.model_type!r} that {name} has, "
            "neither for text alone nor for text with pictures or sound; harvest reads decoder-only language models"
        )


def model_class(config: Any) -> Any:
    """The class that reads a model of this config, which `check_architecture` has seen; make it from `config_for_class`."""
    return next(mapping[type(config)] for mapping in _MAPPINGS if type(config) in mapping)


def config_for_class(config: Any) -> Any:
    """The config that `model_class` takes: that of the text, where a model for pictures has a class for its text alone."""
    text_class = (config.sub_configs or {}).get("text_config")
    if text_class is None or model_class(config).config_class is not text_class:
        return config
    text = config.get_text_config()
    # How the weights are quantised stands beside the text's config, not in it.
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        text.quantization_config = quantisation
    return text


def n_decoder_layers(config: Any) -> Any:
    """The number of a decoder's blocks as its config gives it, or None."""
    text = config.get_text_config(decoder=True)
    names = (_BLOCK_COUNTS.get(text.model_type), "decoder_layers", "num_hidden_layers")
    values = (getattr(text, name, None) for name in names if name is not None)
    return next((value for value in values if value is not None), None)
