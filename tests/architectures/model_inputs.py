"""Inputs for any model of transformers, made from the parameters of its forward and the sizes in its configuration."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["InputMaker", "Variant"]

_VISION = ("pixel_values", "pixel_values_videos", "images", "flattened_patches")
_FEATURES = ("input_features",)
_WAVES = ("input_values", "waveform", "audio", "audio_values")
_TEXTUAL = re.compile(
    r"ImageText|Generation|CausalLM|CLIP|Clip|MaskedLM|QuestionAnswering|Model$|Retrieval|PreTraining|ZeroShot"
)


class Variant(NamedTuple):
    """The form of one call's inputs, as far as parameter names do not decide it.

    Attributes:
        image: "nchw", "frames" (N, T, C, H, W), "channels first" (N, C, T, H, W), "packed" (patches of all images, with
            their grid), "patches" (N, patches, features), or "none".
        sound: "mel first", "mel last", "spectrogram" (N, 1, T, mel) or "none".
        labelled: with labels, so that the model makes the loss.
        masked: with an attention mask that hides the second text's end.
    """

    image: str
    sound: str
    labelled: bool
    masked: bool

    def __str__(self) -> str:
        parts = [self.image, self.sound, "labels" if self.labelled else "sum", "" if self.masked else "unmasked"]
        return ", ".join(part for part in parts if part not in ("none", ""))


class InputMaker:
    """Makes the inputs of one model.

    Attributes:
        tokens: kind of token ("image", "audio", "video") -> how many of it open each text. Set it where the model says
            how many features it wants to put in their places.
    """

    def __init__(self, config: Any, model: torch.nn.Module, length: int, batch: int) -> None:
        self._config, self._head, self._length, self._batch = config, type(model).__name__, length, batch
        self._names: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
        self._required = {
            name
            for name, p in self._names.items()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        vocabulary = _find(config, "vocab_size")
        self._vocabulary = min(vocabulary, 100) if isinstance(vocabulary, int) else 100
        self._size = _pair(_find(config, "image_size", "img_size") or 64)
        channels = _find(config, "num_channels", "in_channels", "in_chans", "image_channels")
        self._channels = channels if isinstance(channels, int) and channels <= 12 else 3
        self._mel = (
            _find(config, "num_chroma", "num_mel_bins", "input_feat_per_channel", "input_feat_size")
            or _find(config, "feature_size", "feature_projection_input_dim")
            or 16
        )
        self._patch = _pair(_find(config, "patch_size") or 8)
        self._frames = _find(config, "num_frames", "frames_per_clip") or 2
        self.tokens = {"image": 0, "audio": 0, "video": 0}

    def variants(self) -> Iterator[Variant]:
        """The layouts to try, the likeliest first."""
        images, sounds = ["none"], ["none"]
        if self._picture_names():
            images = ["nchw", "frames", "packed", "patches", "channels first"]
        if any(name in self._names for name in (*_FEATURES, *_WAVES)):
            sounds = ["mel first", "mel last", "spectrogram"]
        if len(images) > 1 and len(sounds) > 1:
            pairs = [(image, "none") for image in images] + [("none", sound) for sound in sounds]
        else:
            pairs = list(itertools.product(images, sounds))
        if "input_ids" in self._names and ("none", "none") not in pairs:
            pairs.append(("none", "none"))
        for image, sound in pairs:
            for labelled, masked in itertools.product((True, False), (True, False)):
                yield Variant(image, sound, labelled, masked)

    def make(self, variant: Variant) -> dict[str, Any]:
        """Inputs in this layout, random; those of the same generator's state are equal."""
        made = self._pictures(variant.image) | self._sounds(variant.sound)
        if "input_ids" in self._names and ("input_ids" in self._required or not made or _TEXTUAL.search(self._head)):
            made |= self._texts(variant.masked)
        made |= self._series() if "past_values" in self._names else {}
        made |= self._required_rest(made, variant)
        if variant.labelled:
            made |= self._labels(made)
        return made

    # -- kinds of inputs ---------------------------------------------------------------------------------------------

    def _picture_names(self) -> list[str]:
        patches = ("hidden_states",) if "grid_thw" in self._required else ()  # a part that takes packed patches
        return [name for name in (*_VISION, *patches) if name in self._names]

    def _ids(self, length: int) -> torch.Tensor:
        return torch.randint(5, max(self._vocabulary, 7), (self._batch, length))

    def _pictures(self, layout: str) -> dict[str, Any]:
        name = next(iter(self._picture_names()), None)
        if name is None or layout == "none":
            return {}
        height, width = self._size
        rows, columns = height // self._patch[0], width // self._patch[1]
        grid = torch.tensor([[1, rows, columns]] * self._batch)
        features = self._channels * self._patch[0] * self._patch[1]
        made: dict[str, Any] = {}
        if layout == "packed":
            times = _find(self._config, "temporal_patch_size") or 1
            made[name] = torch.randn(self._batch * rows * columns, features * times)
            made |= {one: grid for one in ("image_grid_thw", "grid_thw") if one in self._names}
        elif layout == "patches":
            made[name] = torch.randn(self._batch, rows * columns, features)
            if name == "flattened_patches":  # its row and its column, then the patch
                places = torch.cartesian_prod(torch.arange(1, rows + 1), torch.arange(1, columns + 1))
                patches = torch.randn(self._batch, rows * columns, _find(self._config, "patch_embed_hidden_size"))
                made[name] = torch.cat([places.expand(self._batch, -1, -1).float(), patches], -1)
            if "spatial_shapes" in self._names:
                made["spatial_shapes"] = grid[:, 1:]
            if "pixel_attention_mask" in self._names:
                made["pixel_attention_mask"] = torch.ones(self._batch, rows * columns, dtype=torch.long)
        else:
            made[name] = torch.randn(self._batch, self._channels, height, width)
            if layout == "frames":
                made[name] = made[name][:, None].repeat(1, self._frames, 1, 1, 1)
            if layout == "channels first":
                made[name] = made[name][:, :, None].repeat(1, 1, self._frames, 1, 1)
        if "image_sizes" in self._names:
            made["image_sizes"] = torch.tensor([[height, width]] * self._batch)
        if "pixel_mask" in self._required:
            made["pixel_mask"] = torch.ones(self._batch, height, width, dtype=torch.long)
        if "bool_masked_pos" in self._required:
            made["bool_masked_pos"] = torch.rand(self._batch, rows * columns) > 0.5
        if "noise" in self._names:
            made["noise"] = torch.rand(self._batch, rows * columns)
        return made

    def _sounds(self, layout: str) -> dict[str, Any]:
        if layout == "none":
            return {}
        made: dict[str, Any] = {}
        times, samples = 64 + 8 * (self._length - 12), 6400 + 640 * (self._length - 12)
        if "max_source_positions" in dir(self._config) and re.search("Whisper|Flamingo3Enc|VoxtralEnc", self._head):
            times = 2 * self._config.max_source_positions
        shapes = {"mel first": (self._mel, times), "mel last": (times, self._mel), "spectrogram": (1, times, self._mel)}
        for name in (*_FEATURES, *_WAVES):
            if name in self._names:
                wave: tuple[int, ...] = (samples,) if layout == "mel first" else (1, samples)
                if layout == "spectrogram":
                    wave = (_find(self._config, "max_length") or times, self._mel)
                made[name] = torch.randn(self._batch, *(shapes[layout] if name in _FEATURES else wave))
        for name in ("feature_attention_mask", "input_features_mask", "audio_attention_mask"):
            if name in self._names and layout != "spectrogram":
                made[name] = torch.ones(self._batch, times, dtype=torch.long)
        return made

    def _texts(self, masked: bool) -> dict[str, Any]:
        ids = [self._ids(self._length)]
        kinds = {kind: self._token(kind) for kind in self.tokens}
        ids[0][torch.isin(ids[0], torch.tensor([token for token in kinds.values() if token is not None]))] = 2
        for kind, token in kinds.items():
            if token is not None and self.tokens[kind]:
                ids.insert(0, torch.full((self._batch, self.tokens[kind]), token))
        texts = torch.cat(ids, 1)
        made: dict[str, Any] = {"input_ids": texts}
        if masked and "attention_mask" in self._names:
            made["attention_mask"] = torch.ones_like(texts)
            made["attention_mask"][1, -3:] = 0
        if "bbox" in self._names:
            corners = torch.randint(0, 50, (*texts.shape, 4))
            made["bbox"] = torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)
        if "mm_token_type_ids" in self._names:
            made["mm_token_type_ids"] = torch.zeros_like(texts)
            for code, kind in enumerate(("image", "video", "audio"), start=1):
                if kinds[kind] is not None:
                    made["mm_token_type_ids"][texts == kinds[kind]] = code
        return made

    def _token(self, kind: str) -> int | None:
        found = _find(self._config, f"{kind}_token_id", f"{kind}_token_index")
        return found if isinstance(found, int) else None

    def _series(self) -> dict[str, Any]:
        config = self._config
        length = (getattr(config, "context_length", 0) or 32) + max(getattr(config, "lags_sequence", None) or [0])
        channels = getattr(config, "num_input_channels", None)
        wide = () if channels is None else (channels,)
        later = getattr(config, "prediction_length", 0) or getattr(config, "horizon_length", 0)
        features = getattr(config, "num_time_features", 0) or 0
        shapes = {
            "past_values": (length, *wide),
            "future_values": (later, *wide),
            "past_time_features": (length, features),
            "future_time_features": (later, features),
        }
        made = {name: torch.randn(self._batch, *shape) for name, shape in shapes.items() if name in self._names}
        if "past_observed_mask" in self._names:
            made["past_observed_mask"] = torch.ones(self._batch, length, *wide)
        return made

    def _required_rest(self, made: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
        width = _find(self._config, "hidden_size") or 32
        more: dict[str, Any] = {}
        unlabelled = "decoder_input_ids" in self._names and not (variant.labelled and "labels" in self._names)
        if unlabelled or "decoder_input_ids" in self._required:
            more["decoder_input_ids"] = self._ids(9)
        if "inputs" in self._names and not made:
            more["inputs"] = self._ids(self._length)
        more |= {name: self._ids(7) for name in ("qformer_input_ids", "task_inputs") if name in self._required}
        if "query_embeds" in self._required:
            more["query_embeds"] = torch.randn(self._batch, 6, width)
            states = _find(self._config, "encoder_hidden_size") or width
            more["encoder_hidden_states"] = torch.randn(self._batch, 9, states)
        if "image_attention_mask" in self._names and "pixel_values" in made:  # which image each token looks at
            images = made["pixel_values"].shape[1] if made["pixel_values"].dim() == 5 else 1
            more["image_attention_mask"] = torch.ones(self._batch, made["input_ids"].shape[1], images, dtype=torch.long)
        if "image_embeds_position_mask" in self._names and "pixel_values" in made:
            places = torch.arange(made["input_ids"].shape[1]) < (_find(self._config, "latent_query_num") or 0)
            more["image_embeds_position_mask"] = places.long().repeat(self._batch, 1)
        if "visual_feats" in self._names:
            more["visual_feats"] = torch.randn(self._batch, 4, _find(self._config, "visual_feat_dim") or width)
            more["visual_pos"] = torch.rand(self._batch, 4, 4)
        for name in ("inputs_embeds", "hidden_states"):
            if name in self._required:
                more[name] = torch.randn(self._batch, self._length, width)
        if "attention_mask" in self._required:
            more["attention_mask"] = torch.ones(self._batch, self._length, dtype=torch.long)
        if "position_ids" in self._required:
            more["position_ids"] = torch.arange(self._length)[None].repeat(self._batch, 1)
        return {name: value for name, value in more.items() if name not in made}

    def _labels(self, made: Mapping[str, Any]) -> dict[str, Any]:
        batch = torch.arange(self._batch)
        if "start_positions" in self._names:
            return {"start_positions": batch + 1, "end_positions": batch + 3}
        if "return_loss" in self._names and "labels" not in self._names:
            return {"return_loss": True}
        if "labels" not in self._names:
            return {}
        head, texts = self._head, made.get("input_ids")
        classes = getattr(self._config, "num_labels", 2)
        if re.search(r"(Image|Audio|Video|Sequence)Classification", head):
            return {"labels": batch % 2}
        if "Segmentation" in head:
            return {"labels": torch.randint(0, classes, (self._batch, *self._size))}
        if "CTC" in head:
            return {"labels": torch.randint(1, self._vocabulary, (self._batch, 4))}
        if texts is not None and "TokenClassification" in head:
            return {"labels": torch.randint(0, classes, tuple(texts.shape))}
        if not re.search(r"CausalLM|LMHead|MaskedLM|Generation|Seq2Seq|QuestionAnswering|PreTraining|SpeechTo", head):
            return {}
        if "decoder_input_ids" in self._names or texts is None:
            return {"labels": self._ids(9)}
        labels = texts.clone()
        for kind in self.tokens:
            if (token := self._token(kind)) is not None:
                labels[labels == token] = -100
        return {"labels": labels}


def _find(config: Any, *names: str) -> Any:
    """The first value under one of the names, in the configuration or in those inside it."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    for name in (*(getattr(config, "sub_configs", None) or {}), "backbone_config"):
        inner = getattr(config, name, None)
        if inner is not None and not isinstance(inner, dict) and (found := _find(inner, *names)) is not None:
            return found
    return None


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return size.get("height", 32), size.get("width", 32)
    if isinstance(size, (list, tuple)):
        return (size[-2], size[-1]) if len(size) > 1 else (size[0], size[0])
    return size, size
