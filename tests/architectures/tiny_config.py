"""A tiny configuration of any model type of transformers, made from its default one by the names of its fields.

Fields of the same meaning get the same size wherever they stand, so that the parts of a model still fit: hidden sizes
32, heads of 8, two layers, a vocabulary of 120. Where that breaks a relation between a model's sizes, "proportional"
divides them instead, and "layers" leaves them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from overrides import OVERRIDES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["RULES", "VOCABULARY", "tiny_config"]

VOCABULARY = 120
RULES = ("absolute", "proportional", "layers")

_SIZES = (
    (r"(.*_)?vocab_size(_per_layer_input)?|num_embeddings", VOCABULARY),
    (r"codebook_size", 64),
    (r"image_embedding_size", 4),
    (r"(.*_)?(hidden_size|embed_dim|hidden_dim|projection_dim|output_dim|input_dim|embedding_size|width|proj_dim)", 32),
    (r"(.*_)?d_model|n_embd|emb_dim|(en|de)coder_dim|dim|d_embed|embedding_dim|word_embed_proj_dim|text_dim", 32),
    (r"d_latents|lru_width|hidden_size_.*|adapter_out_dim|classifier_proj_size|(proj_)?codevector_dim", 32),
    (r"conv_dim|mask_dim|model_dim|channels|feature_size|dim_model|mel_dim|.*_channels_out|.*_proj_dim", 32),
    (r"bottleneck_features|output_channels", 32),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|feedforward|ffn_size|ffn_hidden_dim|intermediate_dim)", 64),
    (r"d_ff|d_inner|n_inner|mlp_dim|feed_forward_size|mlp_hidden_size|linear_units", 64),
    (r"num_(feat_extract|conv)_layers", 1 << 20),  # as long as the lists of their sizes
    (r"(.*_)?(layers|depth|num_hidden_layers|num_layers)|n_layers?(_.*)?|num_blocks", 2),
    (r"(.*_)?(key_value_heads|kv_heads)|multi_query_group_num|num_query_groups", 2),
    (r"(.*_)?(heads|num_attention_heads)|n_head|nhead", 4),
    (r"qk_head_dim", 16),  # qk_nope_head_dim + qk_rope_head_dim
    (r"(.*_)?(head_dim|headdim)|d_kv|d_k|d_head|attention_head_size|dim_head|kv_channels|query_pre_attn_scalar", 8),
    (r"rotary_dim", 4),
    (r"(mamba_)?n_?groups", 1),
    (r"(.*_)?(lora_rank|rank)|index_topk", 16),
    (r"(.*_)?num_experts|num_local_experts|n_routed_experts|zero_expert_num", 4),
    (r"(.*_)?experts_per_tok(en)?|moe_top_?k|top_k_experts|num_selected_experts|moe_k", 2),
    (r"(n|num)_shared_experts|n_group|topk_group|moe_num_shared_experts|first_k_dense_replace", 1),
    (r"(.*_)?max_position_embeddings|n_positions|max_(.*_)?positions|max_seq(uence)?_len(gth)?|context_length", 128),
    (r"max_length|max_2d_position_embeddings", 128),
    (r"num_mel_bins|n_mels|chunk_size|resampler_n_latents|num_image_tokens|mm_tokens_per_image|image_seq_length", 16),
    (r"(.*_)?state_size|(mamba_)?d_state|time_step_rank|dt_rank|num_denoising|mem_len|num_conv_pos_embeddings", 8),
    (r"sliding_window|local_attention|attention_window|attention_chunk_size|local_window", 8),
    (r"num_queries|num_query_tokens|num_latents", 10),
    (r"num_conv_pos_embedding_groups", 2),
    (r"num_nextn_predict_layers|num_kv_shared_layers", 0),
    (r"(.*_)?sinkhorn_(iters|iterations)|hc_sinkhorn.*", 3),  # unrolled, differentiated
)
_MOST = tuple((re.compile(pattern), most) for pattern, most in _SIZES)
_WIDTHS = re.compile(r"(hidden_sizes?|embed_dims?|embed_dim_per_stage|dims|channels|sizes|filters|channel.*|widths?)$")
_NOT_WIDTHS = re.compile(r"kernel|stride|window|patch|ratio|factor|pool|chunk|hop|crop|image")
_DEPTHS = re.compile(
    r"layers|num_blocks|num_layers|stage_num(b_of_layers|_blocks)|blocks_per_stage|num_encoder_blocks|n_attn_blocks"
    r"|stage_blocks|num_conv_layers|(.*_)?depths|layers_per_block"
)
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "depth", "num_decoder_layers")
_IMAGE = re.compile(r"image_size|img_size|input_size|pretrain_image_size")
_TOKEN = re.compile(r"_token_ids?$|_token_index$|_ids?$")
_INDICES = re.compile(r"(indices|indexes|index)$")
_THREE_AXES = re.compile(
    r"qwen2_vl|qwen2_5_vl|qwen\d_\d_omni|glm4v_|glm46v|glm_ocr|paddleocr|qwen3_(vl|omni|5)|ernie4_5_vl|glm_image|cosmos3_edge"
)
_DERIVED = ("architectures", "transformers_version", "id2label", "label2id", "out_features", "_name_or_path", "dtype")
_OFF = ("use_cache", "apply_spec_augment", "use_timm_backbone", "use_pretrained_backbone")
_NO_DROPPED_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")
_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}


def tiny_config(model_type: str, rule: str) -> Any:
    """The configuration of `model_type` by one of RULES.

    Raises:
        KeyError: no such model type. The configuration's own checks raise further errors where the sizes do not fit.
    """
    cls = CONFIG_MAPPING[model_type]
    fields = _merged(_Shrinker(rule).shrink(cls().to_dict()), OVERRIDES.get(model_type, {}))
    fields.pop("model_type", None)
    if fields.get("is_encoder_decoder"):
        for name, number in (("decoder_start_token_id", 1), ("pad_token_id", 0)):
            fields[name] = number if fields.get(name) is None else fields[name]
    config = cls(**fields)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _merged(fields: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    inner = {k: _merged(fields[k], v) for k, v in more.items() if isinstance(fields.get(k), dict) and v}
    return fields | dict(more) | inner


class _Shrinker:
    """Shrinks the fields of a configuration and of those inside it; token numbers are the same in all of them."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._tokens = {"pad": 0, "bos": 1, "decoder_start": 1, "eos": 2, "sep": 2, "cls": 1, "unk": 3, "mask": 4}
        self._next_token = VOCABULARY - 1

    def shrink(self, fields: dict[str, Any]) -> dict[str, Any]:
        before = next((fields[name] for name in _LAYERS if type(fields.get(name)) is int), 0)
        kept = _kept_layers(fields, before)
        shrunk: dict[str, Any] = {}
        for name, value in fields.items():
            if name in _DERIVED:
                continue
            if name in _LAYERS and type(value) is int:
                shrunk[name] = min(value, len(kept))
            elif _is_per_layer(name, value, before):
                shrunk[name] = [value[index] for index in kept]
            elif _is_indices(name, value) and before and max(value) >= len(kept):
                shrunk[name] = [i + (name == "out_indices") for i in range(min(len(value), len(kept)))]
            else:
                shrunk[name] = self._value(name, value)
        shrunk |= {name: False for name in _OFF if name in shrunk}
        heads, keys = "num_attention_heads", "num_key_value_heads"
        if heads in shrunk and fields.get(keys) == fields[heads]:
            shrunk[keys] = shrunk[heads]
        if str(fields.get("model_type")).endswith("swin"):  # its last stage must still hold a window
            shrunk |= {"image_size": 64, "window_size": 2}
        if heads in shrunk and "hidden_size" in shrunk and shrunk.get("head_dim", 0) is None:
            shrunk["head_dim"] = shrunk["hidden_size"] // shrunk[heads]
        for name, number in (("prediction_length", 4), ("context_length", 16)):
            if name in shrunk and shrunk[name] is None:
                shrunk[name] = number
        missing = [name for name in ("image_token_id", "image_token_index") if shrunk.get(name, 0) is None]
        shrunk |= {name: self._token(name) for name in missing}
        if _THREE_AXES.search(str(fields.get("model_type"))) and "vocab_size" in fields:
            rope = shrunk.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
            shrunk["rope_parameters"] = {**rope, "mrope_section": [1, 1, 2]}
        return shrunk

    def _value(self, name: str, value: Any) -> Any:
        match value:
            case dict() if any(type(key) is not str for key in value):
                return value
            case dict():
                if value.get("model_type") == "timm_backbone":
                    return dict(_BACKBONE)
                return value if "rope" in name else self.shrink(value)
            case bool():
                return value
            case int() if _TOKEN.search(name) and value >= VOCABULARY - 1:
                return self._token(name)
            case int():
                return self._number(name, value)
            case float():
                return 0.0 if name in _NO_DROPPED_LAYERS else value
            case list() | tuple():
                return self._list(name, list(value))
        return value

    def _token(self, name: str) -> int:
        stem = re.sub(r"_(token_)?(ids?|index)$", "", name).removeprefix("forced_")
        if stem not in self._tokens:
            self._tokens[stem] = self._next_token
            self._next_token -= 1
        return self._tokens[stem]

    def _number(self, name: str, value: int) -> int:
        absolute = self._rule == "absolute"
        if name.endswith("patch_size"):
            return 8 if value >= 8 and absolute else value
        if _IMAGE.fullmatch(name) and value >= 64:
            return 32 if absolute else 64
        most = next((most for pattern, most in _MOST if pattern.fullmatch(name)), None)
        if absolute:
            if most is None and value >= 64 and _WIDTHS.search(name) and not _NOT_WIDTHS.search(name):
                most = 32
            return value if most is None else min(value, most)
        if most in (2, VOCABULARY) and "head" not in name:
            return min(value, most)
        shrinks = self._rule == "proportional" and most is not None and most >= 8 and "position" not in name
        return value // 4 if shrinks and value >= 64 and value % 4 == 0 else value

    def _list(self, name: str, values: list[Any]) -> list[Any]:
        absolute = self._rule == "absolute"
        if values and isinstance(values[0], (dict, list, tuple)):
            return [self._value(name, value) for value in values]
        if not values or not all(type(value) is int for value in values):
            return values
        if name.endswith("heads") and absolute and all(value % 3 == 0 for value in values):
            return [value * 2 // 3 for value in values]
        if _DEPTHS.fullmatch(name):
            return [1] * (len(values) - 1) + [min(2, values[-1])]
        if _IMAGE.fullmatch(name) and min(values) >= 64:
            return [32 if absolute else 64] * len(values)
        if "patch_size" in name and len(values) < 4:
            return [8 if value >= 8 and absolute else value for value in values]
        if _TOKEN.search(name) and max(values) >= VOCABULARY - 1:
            return [self._token(name)]
        if self._rule != "layers" and _WIDTHS.search(name) and not _NOT_WIDTHS.search(name) and max(values) >= 64:
            for divisor in (4, 2):
                if all(value % divisor == 0 for value in values if value >= 16):
                    return [value // divisor if value >= 16 else value for value in values]
        return [32] * len(values) if name == "conv_dim" and self._rule != "layers" else values


def _kept_layers(fields: dict[str, Any], before: int) -> list[int]:
    """The layers to keep: the first two, one of each kind, and enough for the indices that name layers; at most 4."""
    chosen = {0, 1}
    for name, value in fields.items():
        if _is_per_layer(name, value, before):
            first = {repr(kind): index for index, kind in reversed(list(enumerate(value)))}
            chosen |= set(first.values()) if len(first) <= 4 else set()
    wanted = [min(len(v), 4) for name, v in fields.items() if before and _is_indices(name, v) and max(v) >= len(chosen)]
    rest = (index for index in range(before) if index not in chosen)
    while len(chosen) < max(wanted, default=0) and (more := next(rest, None)) is not None:
        chosen.add(more)
    return sorted(chosen)[:4]


def _is_per_layer(name: str, value: Any, layers: int) -> bool:
    listed = isinstance(value, (list, tuple)) and len(value) == layers > 2
    return listed and not (_WIDTHS.search(name) or _DEPTHS.fullmatch(name) or name.endswith(("strides", "heads")))


def _is_indices(name: str, value: Any) -> bool:
    return (
        bool(_INDICES.search(name))
        and isinstance(value, (list, tuple))
        and bool(value)
        and all(type(index) is int for index in value)
    )
