"""Every option of ORTTrainerOptions, with its default, values that it takes, and errors."""

from __future__ import annotations

import ast
import copy
from typing import Any

import onnxruntime
import pytest

from ort_dynamo import ORTTrainerOptions, PropagateCastOpsStrategy, amp, optim

CASTS = "graph_transformer.propagate_cast_ops_config"
PIPELINE = "distributed.pipeline_parallel"
SCHEDULER = optim.LinearWarmupLRScheduler(10)
SCALER = amp.DynamicLossScaler()
SESSION_OPTIONS = onnxruntime.SessionOptions()
TYPES = {"boolean": (1, "True", 0.0), "integer": (True, 1.0, "1"), "string": (1, b"a", ["a"]), "list": ("a", b"a", 1)}


def of_type(kind: str, *more: Any) -> list[tuple[Any, Any]]:
    return [(value, f"must be of {kind} type") for value in (*TYPES[kind], *more)]


def flag(default: bool) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    return default, [True, False], of_type("boolean")


def integer(default: int, low: int, high: int | None = None) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    bad = [*of_type("integer"), (low - 1, f"min value is {low}")]
    good = [low, low + 1, 2**40] if high is None else list(range(low, high + 1))
    return default, good, bad if high is None else [*bad, (high + 1, f"max value is {high}")]


def text(default: str) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    return default, ["", "a path"], of_type("string")


def texts() -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    wrong = [(["a", 1], [{1: ["must be of string type"]}])]
    return [], [[], ["a"], ["b", "a"]], [*of_type("list"), *wrong]


def instance(kind: str, good: Any) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    return None, [None, good], [(value, f"must be of {kind} type") for value in (1, "a", object, {})]


DICTS = [(1, "must be of dict type"), ([], "must be of dict type")]
STRATEGIES = [(value, "must be of propagate_cast_ops_strategy type") for value in (2, "FLOOD_FILL")]
OPTIONS: dict[str, tuple[Any, list[Any], list[tuple[Any, Any]]]] = {
    "batch.gradient_accumulation_steps": integer(1, 1),
    "device.id": ("cuda", ["cpu", "cuda:1"], of_type("string")),
    "device.mem_limit": integer(0, 0),
    "distributed.world_rank": integer(0, 0),
    "distributed.world_size": integer(1, 1),
    "distributed.local_rank": integer(0, 0),
    "distributed.horizontal_parallel_size": (1, [1], integer(1, 1)[2]),
    f"{PIPELINE}.pipeline_parallel_size": (1, [1], integer(1, 1)[2]),
    f"{PIPELINE}.num_pipeline_micro_batches": integer(1, 1),
    f"{PIPELINE}.pipeline_cut_info_string": text(""),
    f"{PIPELINE}.sliced_schema": (
        *({}, [{}, {"any": [1, 2]}]),
        [*DICTS, ({"a": [True]}, [{"a": [{0: ["must be of integer type"]}]}])],
    ),
    f"{PIPELINE}.sliced_axes": (
        *({}, [{}, {"any": 0}]),
        [*DICTS, ({"a": "b"}, [{"a": ["must be of integer type"]}]), ({1: 1}, [{1: ["must be of string type"]}])],
    ),
    f"{PIPELINE}.sliced_tensor_names": texts(),
    "distributed.allreduce_post_accumulation": flag(False),
    "distributed.deepspeed_zero_optimization.stage": integer(0, 0, 1),
    "distributed.enable_adasum": flag(False),
    "lr_scheduler": instance("lr_scheduler", SCHEDULER),
    "graph_transformer.attn_dropout_recompute": flag(False),
    "graph_transformer.gelu_recompute": flag(False),
    "graph_transformer.transformer_layer_recompute": flag(False),
    "graph_transformer.number_recompute_layers": integer(0, 0),
    "graph_transformer.allow_layer_norm_mod_precision": flag(False),
    f"{CASTS}.strategy": (PropagateCastOpsStrategy.FLOOD_FILL, list(PropagateCastOpsStrategy), STRATEGIES),
    f"{CASTS}.level": integer(1, -1, 2),
    f"{CASTS}.allow": texts(),
    "utils.frozen_weights": texts(),
    "utils.grad_norm_clip": flag(True),
    "utils.memory_efficient_gradient": flag(False),
    "utils.run_symbolic_shape_infer": flag(False),
    "debug.deterministic_compute": flag(False),
    "debug.check_model_export": flag(False),
    "debug.graph_save_paths.model_after_graph_transforms_path": text(""),
    "debug.graph_save_paths.model_with_gradient_graph_path": text(""),
    "debug.graph_save_paths.model_with_training_graph_path": text(""),
    "debug.graph_save_paths.model_with_training_graph_after_optimization_path": text(""),
    "_internal_use.enable_internal_postprocess": flag(True),
    "_internal_use.extra_postprocess": (None, [None, len], [(1, "Must be callable or None")]),
    "_internal_use.onnx_opset_version": integer(14, 12, 14),
    "_internal_use.enable_onnx_contrib_ops": flag(True),
    "provider_options": ({}, [{}, {"EP": {"any": 1}, "x": 2}], DICTS),
    "session_options": instance("session_options", SESSION_OPTIONS),
}
"""Every option but two, with its default, values that it takes, and values that it refuses with cerberus's errors."""
DOCUMENTED = {
    f"{CASTS}.strategy": f"{CASTS}.propagate_cast_ops_strategy",
    f"{CASTS}.level": f"{CASTS}.propagate_cast_ops_level",
    f"{CASTS}.allow": f"{CASTS}.propagate_cast_ops_allow",
    "graph_transformer.allow_layer_norm_mod_precision": f"{CASTS}.allow_layer_norm_mod_precision",
}


def put(tree: dict[str, Any], path: str, value: Any, around: Any = lambda level: level) -> None:
    """Put a value into nested dicts; `around` makes the container of an inner dict."""
    *levels, last = path.split(".")
    for key in levels:
        inner = tree.setdefault(key, around({}))
        tree = inner[0] if isinstance(inner, list) else inner
    tree[last] = value


def defaults() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, (default, _, _) in OPTIONS.items():
        put(tree, path, copy.copy(default))
    tree["mixed_precision"] = {"enabled": False, "loss_scaler": None}
    tree["distributed"]["data_parallel_size"] = 1
    return tree


def nested(path: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    put(tree, path, value)
    return tree


def refused(options: Any) -> Any:
    """The errors for options that are not taken, as data."""
    with pytest.raises(ValueError) as caught:
        ORTTrainerOptions(options)
    prefix, text = "Invalid options: ", str(caught.value)
    assert text.startswith(prefix)
    return ast.literal_eval(text.removeprefix(prefix).partition("\n")[0])


def read(options: Any, path: str) -> Any:
    for name in path.split("."):
        options = getattr(options, name)
    return getattr(options, "_validated_opts", options)
