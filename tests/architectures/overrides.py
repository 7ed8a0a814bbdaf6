"""Sizes of model types whose parts fit together in a way that the names of the fields do not tell."""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES"]

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}
_BLT_PART = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 260}
_DIGITS = "ABCDEFGHIJ"
_EFFICIENT_NET = {
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "kernel_sizes": [3, 3, 5],
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 32],
    "strides": [1, 2, 2],
    "num_block_repeats": [1, 2, 1],
    "expand_ratios": [1, 6, 6],
    "hidden_dim": 32,
}
_SAM = {"vision_config": {"num_pos_feats": 16}}
_IMAGE_TOKENS = 64
"""The number of entries of a code book; their tokens come last in the vocabulary."""


def _letters(number: int) -> str:
    return "".join(_DIGITS[int(digit)] for digit in str(number))


OVERRIDES: dict[str, dict[str, Any]] = {
    "align": {"vision_config": _EFFICIENT_NET},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        "encoder_hash_byte_group_size": [3, 4],
        "vocab_size": 260,
        "patcher_config": _BLT_PART,
        "encoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "decoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "global_config": {**_BLT_PART, "hidden_size": 64, "head_dim": 16},
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 119} | {f"IMGIMG{_letters(i)}Z": 40 + i for i in range(_IMAGE_TOKENS)},
        "vq_config": {"num_embeddings": _IMAGE_TOKENS},
    },
    "clap": {
        "audio_config": {
            "spec_size": 64,
            "window_size": 2,
            "patch_embeds_hidden_size": 16,
            "hidden_size": 128,
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [2, 2, 4, 4],
        }
    },
    "efficientnet": {**_EFFICIENT_NET, "hidden_dim": 1280},
    "emu3": {
        "pad_token_id": 0,
        "vocabulary_map": {"<image>": 119, "<|extra_200|>": 39}
        | {f"<|visual token {i:06d}|>": 40 + i for i in range(_IMAGE_TOKENS)},
        "vq_config": {"codebook_size": _IMAGE_TOKENS},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}, "ffn_config": {"hidden_size": 32}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "depth_pro": {"image_size": 128, "patch_size": 32, "scaled_images_feature_dims": [32, 32, 16]},
    "esm": {"vocab_size": 120, "pad_token_id": 0, "mask_token_id": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    },
    "gemma4": {"text_config": {"per_layer_config": {}}},
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified": {"text_config": {"per_layer_config": {}}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "per_layer_config": {}}},
    "gemma4_unified_assistant": {"text_config": {"per_layer_config": {}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"partial_rotary_factor": 1.0}}},
    "glm4v_moe_text": {"rope_parameters": {"partial_rotary_factor": 1.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "mimi": {
        "upsample_groups": 32,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "num_filters": 8,
        "num_quantizers": 4,
    },
    "mistral4": {"head_dim": 16},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemotron": {"num_key_value_heads": 2},
    "oneformer": {"task_seq_len": 7},
    "perceiver": {"num_self_attention_heads": 2, "num_cross_attention_heads": 1},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 3],
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "sam": _SAM,
    "sam_hq": {**_SAM, "mask_decoder_config": {"vit_dim": 32}},
    "sam2": {
        "vision_config": {
            "backbone_config": {"hidden_size": 24, "image_size": [64, 64]},
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        "prompt_encoder_config": {"image_size": 64},
    },
    "seggpt": {"num_hidden_layers": 5, "merge_index": 0, "intermediate_hidden_state_indices": [1, 2, 3, 4]},
    "timesfm": {"patch_length": 8, "context_length": 32, "horizon_length": 8},
    "vitmatte": {"backbone_config": {"patch_size": 16, "image_size": 64}},
    "wav2vec2-bert": {"vocab_size": 120},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [2],
    },
}
