"""A tiny config of every type that transformers has a model of text for, by the names that configs give to sizes."""

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

# Rotary positions in three parts, for time and the two sides of a picture: half of a head's values in all.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE = ["dense"] + ["sparse"] * 3
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}

# What an architecture's own checks ask for, or what makes it small.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1}
_LATENT = {"num_key_value_heads": 4}
_PADDED = {"pad_token_id": 1}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minicpm3", "sarvam_mla"), _LATENT),
    **dict.fromkeys(("youtu", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), _PADDED),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text", "glm4v_text", "glm_ocr_text"), _MROPE),
    "glm4v_moe_text": {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    **dict.fromkeys(("longcat_flash", "mistral4", "mistral_large4_text"), _LATENT),
    "dots3_note_text": {
        **_LATENT,
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 8, "swa_head_dim": 16},
        **{"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    },
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 164},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "codebook_size": 64, "num_res_blocks": 1},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    **{key: {"vocabulary_map": {}} for key in ("chameleon", "emu3")},
    "chameleon_vqgan": {"base_channels": 32, "num_embeddings": 64, "num_res_blocks": 1},
    "janus_vqgan": {"base_channels": 32, "num_embeddings": 64, "num_res_blocks": 1},
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 64},
    "mimi": {"codebook_dim": 32, "upsample_groups": 32, "codebook_size": 64, "num_filters": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": _ROPE}},
    "radio": {"video_temporal_patch_size": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2_text": {"num_key_value_heads": 4, "mlp_layer_types": _SPARSE, "n_shared_experts": 1},
    "dots3_note_vision_encoder": {"num_hidden_layers": 42},
    "dots3_note_audio_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1], "text_hidden_size": 32}},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 32}},
    "qwen2_5_omni_talker": {"embedding_size": 32, "vocab_size": 257, "num_key_value_heads": 2},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "molmo2_vision": {"image_size": [14, 14]},
    **{key: {"text_hidden_size": 32} for key in ("inkling2_vision", "inkling2_loop_vision")},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "moe_k": 2,
        "mlp_layer_types": _SPARSE,
        "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 2, "linear_num_heads": 4, "linear_head_dim": 8},
    "gemma4_assistant_text": {"hidden_size_per_layer_input": 0},
    "granite4_vision": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "hunyuan_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}},
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    "kyutai_speech_to_text": {"audio_pad_token_id": 256, "codebook_vocab_size": 64, "num_codebooks": 2},
    "muse_spark_audio": {"hidden_sizes": [8] * 2, "depths": [1] * 2, "patch_sizes": [4] * 2, "num_hidden_layers": 2, "out_hidden_size": 32},
    "muse_spark": {"projector_hidden_size": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "hc_lowrank": 8,
    },
    "xlm": {"emb_dim": 32, "causal": True},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma4_text": {"vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 257},
    "inkling2_loop_text": {"unpadded_vocab_size": 257},
    "inkling2_text": {"unpadded_vocab_size": 257},
    "xmod": _PADDED | {"default_language": "en_XX", "languages": ["en_XX"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "feed_forward_size": 64,
        "attn_layers": ["local"] * 4,
        "attention_head_size": 8,
    },
    # A decoder has a count of its own, which the encoder's says nothing of.
    **{key: {"encoder_layers": 3} for key in ("bart", "whisper")},
}

# Fields that some class does not take with the others.
_DROPPED: tuple[tuple[str, ...], ...] = ((), ("head_dim",), ("num_key_value_heads",), ("sliding_window",), ("pad_token_id",))


def decoder_types() -> dict[str, Any]:
    """The config class of each type that transformers has a model of text for, alone or with pictures or sound, by its model type."""
    mappings = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )
    return {config.model_type: config for mapping in mappings for config in mapping}


def tiny_config(config_class: Any, sizes: dict[str, Any] | None = None) -> Any:
    """A config of a class with the sizes above, and so for the configs that it holds. Raises what the class raises."""
    sizes = (_SIZES if sizes is None else sizes) | _OWN.get(config_class.model_type, {})
    fields = _fields(config_class)
    own = _OWN.get(config_class.model_type, {})
    given = {
        name: value for name, value in sizes.items() if (name in fields and value is not None) or name in own or name == "eos_token_id"
    }
    # Where a class wants a number for each layer or side, its own default stays, or what stands above for it.
    listed = {name for name in given if isinstance(getattr(config_class, name, None), (list, tuple)) and name not in own}
    given = {name: value for name, value in given.items() if name not in listed}
    for name, part in _parts(config_class).items():
        is_text = any(word in name for word in ("text", "decoder", "language", "llm", "thinker"))
        given[name] = tiny_config(part, _SIZES if is_text else _OTHER_PARTS).to_dict() | own.get(name, {})
    error: Exception | None = None
    for dropped in _DROPPED:
        try:
            return config_class(**{name: value for name, value in given.items() if name not in dropped})
        except Exception as refusal:
            error = error or refusal
    assert error is not None
    raise error


def _parts(config_class: Any) -> dict[str, Any]:
    """The classes of the configs that a config holds; where any class may stand, that of its default."""
    parts = dict(getattr(config_class, "sub_configs", None) or {})
    if transformers.AutoConfig in parts.values():
        default = config_class()
        parts = {name: type(getattr(default, name, None)) if part is transformers.AutoConfig else part for name, part in parts.items()}
    return {name: part for name, part in parts.items() if isinstance(part, type) and hasattr(part, "model_type")}


def _fields(config_class: Any) -> set[str]:
    fields: set[str] = set()
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
        if "__init__" in vars(base):
            fields |= set(inspect.signature(base.__init__).parameters)
    return fields
