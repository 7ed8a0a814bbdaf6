"""The schema of ORTTrainerOptions: every option with its type, its bounds and its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import cerberus

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.embedding import onnxruntime
from ort_dynamo.training.amp.loss_scaler import LossScaler
from ort_dynamo.training.document_errors import DocumentErrors, did_you_mean, unsorted_keys
from ort_dynamo.training.optim.lr_scheduler import _LRScheduler

__all__ = ["FREE", "SPELLINGS", "checked", "copied"]

_Path: TypeAlias = tuple[str, ...]
_Rule: TypeAlias = dict[str, Any]
_Complain: TypeAlias = Callable[[str, str], None]

_CASTS = ("graph_transformer", "propagate_cast_ops_config")

SPELLINGS: dict[_Path, _Path] = {
    (*_CASTS, "propagate_cast_ops_strategy"): (*_CASTS, "strategy"),
    (*_CASTS, "propagate_cast_ops_level"): (*_CASTS, "level"),
    (*_CASTS, "propagate_cast_ops_allow"): (*_CASTS, "allow"),
    (*_CASTS, "allow_layer_norm_mod_precision"): ("graph_transformer", "allow_layer_norm_mod_precision"),
}
"""Path of an option in the old documents -> its path in the old code and here. Both are accepted."""

_PIPELINE = ("distributed", "pipeline_parallel")
FREE: tuple[_Path, ...] = (("provider_options",), (*_PIPELINE, "sliced_schema"), (*_PIPELINE, "sliced_axes"))
"""Levels, with all below them, whose keys are the user's own."""


class _OptionValidator(cerberus.Validator):  # type: ignore[misc]  # cerberus has no types
    """cerberus, with the types of this schema; True is no integer, and bytes are no list."""

    types_mapping = {  # noqa: RUF012  # as cerberus declares it
        **cerberus.Validator.types_mapping,
        "integer": cerberus.TypeDefinition("integer", (int,), (bool,)),
        "list": cerberus.TypeDefinition("list", (Sequence,), (str, bytes, bytearray)),
        "lr_scheduler": cerberus.TypeDefinition("lr_scheduler", (_LRScheduler,), ()),
        "loss_scaler": cerberus.TypeDefinition("loss_scaler", (LossScaler,), ()),
        "propagate_cast_ops_strategy": cerberus.TypeDefinition(
            "propagate_cast_ops_strategy", (PropagateCastOpsStrategy,), ()
        ),
    }


def _level(**fields: _Rule) -> _Rule:
    return {"type": "dict", "default_setter": lambda _: {}, "schema": fields}


def _integer(default: int, **bounds: int) -> _Rule:
    return {"type": "integer", "default": default, **bounds}


def _flag(default: bool) -> _Rule:
    return {"type": "boolean", "default": default}


def _text(default: str) -> _Rule:
    return {"type": "string", "default": default}


def _texts() -> _Rule:
    return {"type": "list", "schema": {"type": "string"}, "default_setter": lambda _: []}


def _named(values: _Rule) -> _Rule:
    return {
        "type": "dict",
        "default_setter": lambda _: {},
        "keysrules": {"type": "string"},
        "valuesrules": values,
    }


def _object(**check: Any) -> _Rule:
    return {**check, "nullable": True, "default": None}


def _check_callable(field: str, value: object, complain: _Complain) -> None:
    if value is not None and not callable(value):
        complain(field, "Must be callable or None")


def _check_session_options(field: str, value: object, complain: _Complain) -> None:
    if value is not None and not isinstance(value, onnxruntime().SessionOptions):
        complain(field, "must be of session_options type")


_SCHEMA: dict[str, _Rule] = {
    "batch": _level(gradient_accumulation_steps=_integer(1, min=1)),
    "device": _level(id=_text("cuda"), mem_limit=_integer(0, min=0)),
    "distributed": _level(
        world_rank=_integer(0, min=0),
        world_size=_integer(1, min=1),
        local_rank=_integer(0, min=0),
        data_parallel_size=_integer(1, min=1),
        horizontal_parallel_size=_integer(1, min=1),
        pipeline_parallel=_level(
            pipeline_parallel_size=_integer(1, min=1),
            num_pipeline_micro_batches=_integer(1, min=1),
            pipeline_cut_info_string=_text(""),
            sliced_schema=_named({"type": "list", "schema": {"type": "integer"}}),
            sliced_axes=_named({"type": "integer"}),
            sliced_tensor_names=_texts(),
        ),
        allreduce_post_accumulation=_flag(False),
        deepspeed_zero_optimization=_level(stage=_integer(0, min=0, max=1)),
        enable_adasum=_flag(False),
    ),
    "lr_scheduler": _object(type="lr_scheduler"),
    "mixed_precision": _level(enabled=_flag(False), loss_scaler=_object(type="loss_scaler")),
    "graph_transformer": _level(
        attn_dropout_recompute=_flag(False),
        gelu_recompute=_flag(False),
        transformer_layer_recompute=_flag(False),
        number_recompute_layers=_integer(0, min=0),
        allow_layer_norm_mod_precision=_flag(False),
        propagate_cast_ops_config=_level(
            strategy={"type": "propagate_cast_ops_strategy", "default": PropagateCastOpsStrategy.FLOOD_FILL},
            level=_integer(1, min=-1, max=2),
            allow=_texts(),
        ),
    ),
    "utils": _level(
        frozen_weights=_texts(),
        grad_norm_clip=_flag(True),
        memory_efficient_gradient=_flag(False),
        run_symbolic_shape_infer=_flag(False),
    ),
    "debug": _level(
        deterministic_compute=_flag(False),
        check_model_export=_flag(False),
        graph_save_paths=_level(
            model_after_graph_transforms_path=_text(""),
            model_with_gradient_graph_path=_text(""),
            model_with_training_graph_path=_text(""),
            model_with_training_graph_after_optimization_path=_text(""),
        ),
    ),
    "_internal_use": _level(
        enable_internal_postprocess=_flag(True),
        extra_postprocess=_object(check_with=_check_callable),
        onnx_opset_version=_integer(14, min=12, max=14),
        enable_onnx_contrib_ops=_flag(True),
    ),
    "provider_options": {"type": "dict", "default_setter": lambda _: {}, "allow_unknown": True, "schema": {}},
    "session_options": _object(check_with=_check_session_options),
}


def checked(options: object) -> dict[str, Any]:
    """Give options with all defaults, in new containers.

    Raises:
        ValueError: they are no dict, or do not match the schema; the message has cerberus's errors.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"Invalid options: expected a dict, got {options!r}")
    values = copied(options)
    _check_keys(values)
    for old, new in SPELLINGS.items():
        _respell(values, old, new)
    validator = _OptionValidator(_SCHEMA, error_handler=DocumentErrors)
    found: dict[str, Any] | None = validator.validated(values)
    if found is None:
        raise ValueError(f"Invalid options: {validator.errors}{did_you_mean(validator.errors, _SCHEMA)}")
    return found


def copied(value: Any) -> Any:
    """Copy nested dicts and lists, and keep their other values."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def _check_keys(values: dict[Any, Any], path: tuple[Any, ...] = ()) -> None:
    """Refuse keys at which cerberus would fail, in levels that are checked."""
    if path[:1] == ("provider_options",):
        return
    if odd := unsorted_keys(values):
        raise ValueError(f"Invalid options: {_nested(path, odd)}")
    for key, value in values.items():
        if isinstance(value, dict):
            _check_keys(value, (*path, key))


def _nested(path: tuple[Any, ...], errors: Any) -> Any:
    """Give the errors of a level the form that they have within the whole."""
    for key in reversed(path):
        errors = {key: [errors]}
    return errors


def _respell(values: dict[str, Any], old: _Path, new: _Path) -> None:
    """Move an option from its place in the documents to that in the code."""
    source = _at(values, old[:-1])
    if source is None or old[-1] not in source:
        return
    target = _at(values, new[:-1])
    assert target is not None, "the target is the source, or around it"
    if new[-1] in target:
        error = {old[-1]: [f"is another name of {'.'.join(new)!r}, which is given, too"]}
        raise ValueError(f"Invalid options: {_nested(old[:-1], error)}")
    target[new[-1]] = source.pop(old[-1])


def _at(values: dict[str, Any], path: _Path) -> dict[str, Any] | None:
    """Give the dict at a path, if there is one."""
    found: Any = values
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
