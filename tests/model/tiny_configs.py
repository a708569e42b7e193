"""A tiny config of every causal language model that transformers knows, by the names that configs give to sizes."""

import inspect
from typing import Any

import transformers

# Sizes by every name that some config has for them: 4 blocks of 32 values, the byte tokenizer's 257 tokens.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_window_size", "window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads", "index_n_heads", "encoder_layers"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("keep_window_size", "index_topk"), 6),
    "encoder_attention_heads": 4,
    "q_lora_rank": 16,
    "rotary_dim": 4,
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# The parts of a model for pictures and sound, which text alone never meets.
_OTHER_PARTS: dict[str, Any] = {
    **{name: _SIZES[name] for name in ("hidden_size", "embed_dim", "d_model", "intermediate_size", "encoder_ffn_dim")},
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("image_size", "patch_size"), 14),
    "out_hidden_size": 32,
}

# What an architecture's own checks ask for, or what makes it small.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1}
_LATENT = {"num_key_value_heads": 4}
_PADDED = {"pad_token_id": 1}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minicpm3", "sarvam_mla"), _LATENT),
    **dict.fromkeys(("youtu", "glm4_moe_lite", "dots3_note_text"), _LATENT),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), _PADDED),
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "layer_types": None,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
    "gemma4_text": {"vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 257},
    "inkling2_loop_text": {"unpadded_vocab_size": 257},
    "inkling2_text": {"unpadded_vocab_size": 257},
    "xmod": _PADDED | {"default_language": "en_XX", "languages": ["en_XX"]},
    "bert": {"is_decoder": True},
    "reformer": {"is_decoder": True},
    **{key: {"encoder_layers": 4} for key in ("whisper", "bart", "mbart")},
}

# Fields that some class does not take with the others.
_DROPPED: tuple[tuple[str, ...], ...] = ((), ("head_dim",), ("num_key_value_heads",), ("sliding_window",), ("pad_token_id",))


def causal_types() -> dict[str, Any]:
    """The config class of each causal language model of transformers, by its model type."""
    return {config.model_type: config for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny_config(config_class: Any, sizes: dict[str, Any] | None = None) -> Any:
    """A config of a class with the sizes above, and so for the configs that it holds. Raises what the class raises."""
    sizes = (_SIZES if sizes is None else sizes) | _OWN.get(config_class.model_type, {})
    fields = _fields(config_class)
    given = {name: value for name, value in sizes.items() if (name in fields and value is not None) or name in ("eos_token_id",)}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if isinstance(part, type) and hasattr(part, "model_type"):
            is_text = "text" in name or "decoder" in name or "language" in name
            given[name] = tiny_config(part, _SIZES if is_text else _OTHER_PARTS).to_dict()
    error: Exception | None = None
    for dropped in _DROPPED:
        try:
            return config_class(**{name: value for name, value in given.items() if name not in dropped})
        except Exception as refusal:
            error = error or refusal
    assert error is not None
    raise error


def _fields(config_class: Any) -> set[str]:
    fields: set[str] = set()
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
        if "__init__" in vars(base):
            fields |= set(inspect.signature(base.__init__).parameters)
    return fields
