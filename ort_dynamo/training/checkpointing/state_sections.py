"""Checks that the content of a file is the state of an ORTTrainer, and gives its values the types that state has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training.checkpointing.sealed_file import PathOrFile, describe

__all__ = ["check_sections"]

_OF_PYTHON = ("trainer_options", "train_step_info")
"""Sections of Python's values, which files of older versions have as NumPy's."""


def check_sections(loaded: Any, path: PathOrFile) -> dict[str, Any]:
    """Check a loaded state's sections, as `ORTTrainer.state_dict` has them.

    A weight whose name has a "/" is nested in files of older versions; it gets its name back.

    Raises:
        CheckpointFileError: a section is not built as it should be.
    """
    try:
        return {key: _check(key, value) for key, value in _dict(loaded, "the state").items()}
    except TypeError as error:
        raise CheckpointFileError(path=describe(path), reason=f"it has no state of an ORTTrainer: {error}") from error


def _check(section: str, value: Any) -> Any:
    if section in _OF_PYTHON:
        return {key: _python_value(item, f"{section}[{key}]") for key, item in _dict(value, section).items()}
    if section == "model":
        return {kind: dict(_weights(states, f"model[{kind}]")) for kind, states in _dict(value, section).items()}
    if section == "optimizer":
        return _optimizer_states(_dict(value, section))
    if section == "partition_info":
        return {name: _partition(info, f"{section}[{name}]") for name, info in _dict(value, section).items()}
    return value


def _optimizer_states(section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for name, value in section.items():
        states[name] = {}
        for path, state in _weights(value, f"optimizer[{name}]"):
            *inner, key = path.split("/")
            states.setdefault("/".join([name, *inner]), {})[key] = state
        if not states[name] and value:
            del states[name]
    return states


def _weights(tree: Any, where: str, prefix: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for key, value in _dict(tree, where).items():
        if isinstance(value, dict):
            yield from _weights(value, where, f"{prefix}{key}/")
        elif isinstance(value, np.ndarray | np.generic | int | float):
            yield prefix + key, np.asarray(value)
        else:
            raise TypeError(f"{where}[{prefix}{key}] is a {type(value).__name__}, not an array")


def _partition(info: Any, where: str) -> dict[str, Any]:
    for key, value in _dict(info, where).items():
        if np.asarray(value).dtype.kind not in "iu":
            raise TypeError(f"{where}[{key}] has no integers")
    if "original_dim" not in info or np.size(info.get("megatron_row_partition", -1)) != 1:
        raise TypeError(f"{where} does not say how it was split")
    return _dict(info, where)


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{where} is a {type(value).__name__}, not a dictionary")
    return value


def _python_value(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, not a number or text")
