"""One model type of transformers under ort_train: a tiny model of it, and its training steps against eager."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
import transformers.models.auto.modeling_auto as auto
from model_inputs import InputMaker, Variant
from tiny_config import RULES, tiny_config
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from training_step import (
    as_near_as_rounded_weights,
    compare,
    disturbed,
    double,
    evaluation,
    training_step,
    verdict,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import ort_dynamo.backend  # noqa: F401  # imported before a fork
from ort_dynamo.testing import eager_reasons

__all__ = ["NotBuiltError", "Subject", "build", "check", "model_types"]

_HEADS = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"),
    *("ZERO_SHOT_OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "CTC", "SEMANTIC_SEGMENTATION"),
    *("UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "IMAGE_CLASSIFICATION"),
    *("AUDIO_CLASSIFICATION", "MASK_GENERATION", "PRETRAINING", "TIME_SERIES_PREDICTION", "KEYPOINT_DETECTION"),
    *("KEYPOINT_MATCHING", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "IMAGE_TO_IMAGE", "IMAGE_MATTING"),
)
_LARGEST = 30_000_000
"""Parameters."""
_LENGTHS = (12, 15)
_TRIALS = 40
_SHAKEN = 3
"""Copies of a model with weights disturbed by rounding."""
_FEATURES = re.compile(r"tokens?:? (\d+).{0,60}?features?:? (\d+)", re.S)


class NotBuiltError(Exception):
    """No configuration, head and inputs were found that work in eager."""


class Subject:
    """A model with inputs that work in eager."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self.model = model
        # BatchNorm over the last, smallest images needs more than two of them to be well-conditioned.
        self._batch = 4 if any("BatchNorm" in type(m).__name__ for m in model.modules()) else 2
        self._config = config
        self._tokens: dict[str, int] = {}
        self.variant = self._working_variant()

    def inputs(self, length: int) -> dict[str, Any] | None:
        """Inputs of a length; None where the model takes none of that length."""
        maker = InputMaker(self._config, self.model, length, self._batch)
        maker.tokens.update(self._tokens)
        if length != _LENGTHS[0] and not self._fits(maker, self.variant):
            return None
        torch.manual_seed(length)
        return maker.make(self.variant)

    def _working_variant(self) -> Variant:
        maker = InputMaker(self._config, self.model, _LENGTHS[0], self._batch)
        for _, variant in zip(range(_TRIALS), maker.variants(), strict=False):
            maker.tokens = dict.fromkeys(maker.tokens, 0)
            if self._fits(maker, variant):
                self._tokens = maker.tokens
                return variant
        raise NotBuiltError("no inputs were found that fit")

    def _fits(self, maker: InputMaker, variant: Variant) -> bool:
        """Try the inputs in eager; set the number of image tokens if the model's error names it."""
        for _ in range(2):
            error = self._try(maker, variant)
            if error is None:
                return True
            if not (wanted := _FEATURES.search(error)):
                break
            kind = "video" if "ideo" in error else "image" if variant.image != "none" else "audio"
            maker.tokens[kind] = int(wanted[2]) // self._batch
        return False

    def _try(self, maker: InputMaker, variant: Variant) -> str | None:
        subject = copy.deepcopy(self.model)
        try:
            seen = training_step(subject, subject, maker.make(variant))
        except Exception as error:  # made-up inputs that do not fit raise anything
            return str(error)
        learns = any(name.startswith("gradient") for name in seen)
        return None if learns and bool(torch.isfinite(seen["loss"])) else "no gradient, or no finite loss"


def build(model_type: str) -> Subject:
    reasons: list[str] = []
    for rule in RULES:
        try:
            config = tiny_config(model_type, rule)
        except Exception as error:  # sizes that do not fit raise anything
            reasons.append(f"{rule}: {error}")
            continue
        for name in _heads(model_type):
            try:
                return Subject(_made(name, config), config)
            except Exception as error:
                reasons.append(f"{rule}, {name}: {error}")
    raise NotBuiltError("; ".join(" ".join(reason.split())[:150] for reason in reasons[-3:]))


def _heads(model_type: str) -> Iterator[str]:
    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in _HEADS]
    named = [table.get(model_type, ()) for table in (*tables, auto.MODEL_MAPPING_NAMES)]
    yield from dict.fromkeys(name for names in named for name in ([names] if isinstance(names, str) else names))


def _made(name: str, config: Any) -> torch.nn.Module:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if count > _LARGEST:
        raise NotBuiltError(f"{count:,} parameters")
    torch.manual_seed(0)
    model: torch.nn.Module = cls(copy.deepcopy(config))
    for weight in model.parameters():
        if weight.dim() > 1 and not weight.any():  # a router made of zeros leaves the choice among equals open
            torch.nn.init.normal_(weight, std=0.02)
    return model.float().train()


def check(model_type: str, evaluate: bool) -> dict[str, Any]:
    """Compile a model of this type and compare it with eager, at two lengths where it has one.

    Sizes that change with the length are symbolic from the start, as they are after torch's automatic recompilation;
    they are static, and one length is compared, where Dynamo cannot trace the model otherwise, with any backend.
    """
    begin = time.monotonic()
    subject = build(model_type)
    try:
        record = _compared(subject, subject.inputs(_LENGTHS[1]), evaluate)
    except TorchRuntimeError:  # Dynamo's own, before any backend is called
        torch._dynamo.reset()
        record = _compared(subject, None, evaluate)
        record["inputs"] += ", static"
    return {**record, "seconds": round(time.monotonic() - begin, 1)}


def _compared(subject: Subject, second: dict[str, Any] | None, evaluate: bool) -> dict[str, Any]:
    """The record of a model: its step, one with the `second` inputs if there are any, and an evaluation if wished."""
    first = subject.inputs(_LENGTHS[0])
    assert first is not None
    changing = [
        (name, axis)
        for name, value in first.items()
        if second and isinstance(value, torch.Tensor)
        for axis, sizes in enumerate(zip(value.shape, second[name].shape, strict=True))
        if sizes[0] != sizes[1]
    ]
    theirs, ours = subject.model, copy.deepcopy(subject.model)
    counters.clear()
    run = torch.compile(ours, backend="ort_train")

    def marked(**inputs: Any) -> Any:
        for name, axis in changing:
            torch._dynamo.maybe_mark_dynamic(inputs[name], axis)
        return run(**inputs)

    stages = [("step", training_step, marked, first)]
    stages += [("another length", training_step, run, second)] if second and changing else []
    stages += [("evaluation", evaluation, run, first)] if evaluate else []
    verdicts: dict[str, str] = {}
    details: dict[str, str] = {}
    for stage, observe, call, inputs in stages:
        theirs.train(observe is training_step)
        ours.train(observe is training_step)
        ours.load_state_dict(theirs.state_dict())
        _detach_states(theirs)
        _detach_states(ours)
        start = copy.deepcopy(theirs)
        expected = observe(theirs, theirs, inputs)
        wide = partial(_exact, observe, start, inputs)
        actual = observe(ours, call, inputs)
        verdicts[stage], found = verdict(actual, expected, wide)
        if verdicts[stage] == "different":
            control = copy.deepcopy(start)
            traced = observe(control, torch.compile(control, backend="aot_eager"), inputs)
            shaken = (observe(one, one, inputs) for one in (disturbed(start, seed) for seed in range(_SHAKEN)))
            if as_near_as_rounded_weights(actual, found, wide(), shaken):
                verdicts[stage] = "ill-conditioned"
            elif compare(traced, expected):
                verdicts[stage] = "not comparable"
        details |= {f"{stage}, {name}": text for name, text in list(found.items())[:5]}
    return {
        "kind": _worst(verdicts.values()),
        "head": type(theirs).__name__,
        "inputs": str(subject.variant),
        "details": details,
        "eager": eager_reasons(),
        "counts": dict(counters["ort_train"]),
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def _detach_states(model: torch.nn.Module) -> None:
    """A recurrent model may keep the last step's state, which cannot be copied while it has a history."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())


def _exact(observe: Any, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    model, inputs = double(model, inputs)
    return observe(model, model, inputs)


def _worst(kinds: Iterable[str]) -> str:
    return max(kinds, key=("same", "rounding", "undecided", "ill-conditioned", "not comparable", "different").index)


def model_types() -> list[str]:
    """Every model type that has a model."""
    return [name for name in CONFIG_MAPPING_NAMES if any(True for _ in _heads(name))]
