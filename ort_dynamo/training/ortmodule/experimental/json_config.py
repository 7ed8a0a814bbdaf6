"""Configures an ORTModule by a JSON file."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.embedding import nearest, read_json
from ort_dynamo.training.ortmodule.debug_options import DebugOptions
from ort_dynamo.training.ortmodule.environment import _SkipCheck, json_path
from ort_dynamo.training.ortmodule.fallback import _FallbackPolicy
from ort_dynamo.training.ortmodule.logger import LogLevel
from ort_dynamo.training.ortmodule.wrapper import ORTModule

__all__ = ["load_from_json"]

_log = logging.getLogger(__name__)


def load_from_json(ortmodule: ORTModule, path: str | None = None) -> None:
    """Configure an ORTModule by a JSON file; graphs compiled before are compiled again.

    Args:
        ortmodule: the ORTModule.
        path: the file; ORTMODULE_JSON_CONFIG_PATH goes before it. It holds an object with any of the keys
            PropagateCastOps (an object of Strategy, Level and Allow), DebugOptions (of LogLevel, SaveONNX, ONNXPrefix
            and SaveONNXPath), FallbackPolicy and SkipCheck (lists of names), OnnxOpsetVersion; and, without effect,
            UseExternalGPUAllocator, EnableCustomAutogradFunction, EnableGradAccOptimization, UseStaticShape,
            RunSymbolicShapeInference and UseMemoryEfficientGradient.

    Raises:
        ValueError: there is no path, the file is not JSON, larger than 1 MiB or nested too deeply, or a value is one
            that its key cannot take.
        KeyError: a key or a name that there is not.
        OSError: the file cannot be read.
    """
    path = json_path(path)
    if path is None:
        raise ValueError(
            "Path to json is not provided."
            "Provide the path through function call or setting the environment variable ORTMODULE_JSON_CONFIG_PATH"
        )
    data = read_json(Path(path))
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"No data found in provided json file {path}.")
    torch_module = ortmodule._torch_module
    settings, debug_options = torch_module.settings, torch_module.debug_options
    for key, value in data.items():
        _log.info("Found keyword %s in json. Loading attributes from file.", key)
        if key == "DebugOptions":
            debug_options = _debug_options(value)
        else:
            settings = dataclasses.replace(settings, **_reader(key)(key, value))
    torch_module.configure(debug_options, settings)


_Reader = Callable[[str, Any], dict[str, Any]]


def _reader(key: str) -> _Reader:
    if key not in _READERS:
        raise _no_such_key(key, "the file", [*_READERS, "DebugOptions"])
    return _READERS[key]


def _casts(key: str, value: Any) -> dict[str, Any]:
    read = {}
    for inner, given in _object(key, value).items():
        if inner == "Strategy":
            read["propagate_cast_ops_strategy"] = _member(PropagateCastOpsStrategy, given)
        elif inner == "Level":
            read["propagate_cast_ops_level"] = _typed(f"{key}.{inner}", given, int)
        elif inner == "Allow":
            read["propagate_cast_ops_allow"] = tuple(_names(f"{key}.{inner}", given, least=0))
        else:
            raise _no_such_key(inner, key, ["Strategy", "Level", "Allow"])
    return read


def _policy(key: str, value: Any) -> dict[str, Any]:
    return {"fallback_policy": _flags(_FallbackPolicy, key, value)}


def _skip_check(key: str, value: Any) -> dict[str, Any]:
    return {"skip_check": _flags(_SkipCheck, key, value)}


def _flags(kind: Any, key: str, value: Any) -> Any:
    return reduce(or_, (_member(kind, name) for name in _names(key, value)))


def _opset(key: str, value: Any) -> dict[str, Any]:
    return {"onnx_opset_version": _typed(key, value, int)}


def _without_effect(key: str, value: Any) -> dict[str, Any]:
    _typed(key, value, bool)
    _log.info("%s has no effect (python -m ort_dynamo help migrating_from_ortmodule).", key)
    return {}


_READERS: Mapping[str, _Reader] = {
    "PropagateCastOps": _casts,
    "FallbackPolicy": _policy,
    "SkipCheck": _skip_check,
    "OnnxOpsetVersion": _opset,
    "UseExternalGPUAllocator": _without_effect,
    "EnableCustomAutogradFunction": _without_effect,
    "EnableGradAccOptimization": _without_effect,
    "UseStaticShape": _without_effect,
    "RunSymbolicShapeInference": _without_effect,
    "UseMemoryEfficientGradient": _without_effect,
}
_DEBUG = {
    "LogLevel": "log_level",
    "SaveONNX": "save_onnx",
    "ONNXPrefix": "onnx_prefix",
    "SaveONNXPath": "save_path",
}


def _debug_options(value: Any) -> DebugOptions:
    given = _object("DebugOptions", value)
    for key in given:
        if key not in _DEBUG:
            raise _no_such_key(key, "DebugOptions", list(_DEBUG))
    arguments = {
        _DEBUG[key]: one
        if key == "LogLevel"
        else _typed(f"DebugOptions.{key}", one, bool if key == "SaveONNX" else str)
        for key, one in given.items()
    }
    if "log_level" in arguments:
        arguments["log_level"] = _member(LogLevel, arguments["log_level"])
    return DebugOptions(**arguments)


def _member(kind: Any, name: Any) -> Any:
    if not isinstance(name, str) or name not in kind.__members__:
        known = ", ".join(kind.__members__)
        raise KeyError(f"{name!r} is none of {known}{nearest(str(name), kind.__members__)}")
    return kind[name]


def _typed(key: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        names = {bool: "a boolean", int: "an int", list: "a list", str: "a text"}
        raise ValueError(f"{key} must be {names[kind]}, not {value!r}")
    return value


def _names(key: str, value: Any, *, least: int = 1) -> list[str]:
    names = [_typed(f"{key}[{index}]", one, str) for index, one in enumerate(_typed(key, value, list))]
    if len(names) < least:
        raise ValueError(f"{key} must have a name")
    return names


def _object(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object, not {value!r}")
    return value


def _no_such_key(key: str, where: str, known: list[str]) -> KeyError:
    return KeyError(f"{where} has a key {key!r} that is none of {', '.join(known)}{nearest(key, known)}")
