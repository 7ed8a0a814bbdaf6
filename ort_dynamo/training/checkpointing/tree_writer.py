"""Writes a dictionary as HDF5: a dictionary is a group, any other value a contiguous dataset.

onnxruntime.training reads these files as it reads its own. Values that it would not tell apart have an attribute
"kind": "int", "float" and "bool" are Python's, "array" is an array without dimensions, "str" and "bytes" are stored as
uint8, and the name of an element type that HDF5 lacks marks its bytes, along a last axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ort_dynamo.training.checkpointing.array_types import NATIVE, array_of, is_stored
from ort_dynamo.training.checkpointing.key_names import name_of

__all__ = ["DEEPEST", "write_tree"]

DEEPEST = 64
"""Groups that may be one inside the other."""


def write_tree(group: Any, tree: Mapping[str, Any], where: str = "", depth: int = 0) -> None:
    """Write a dictionary into an h5py.Group.

    Args:
        group: an empty h5py.Group.
        tree: nested dictionaries of arrays, tensors, numbers, text and bytes; a list or tuple of numbers is an array.
        where: the dictionary's name in an error.
        depth: groups that the group is in.

    Raises:
        TypeError: a key is not text, or a value cannot be stored; it names the place.
        ValueError: more than `DEEPEST` dictionaries are in one another.
    """
    if depth > DEEPEST:
        raise ValueError(f"{where} is in more than {DEEPEST} dictionaries")
    for key, value in tree.items():
        if not isinstance(key, str):
            raise TypeError(f"a key of {where or 'the dictionary'} is not text but {type(key).__name__}: {key!r}")
        place = f"{where}[{key!r}]"
        if isinstance(value, Mapping):
            write_tree(group.create_group(name_of(key)), value, place, depth + 1)
        else:
            _write_value(group, name_of(key), value, place)


def _write_value(group: Any, name: str, value: Any, place: str) -> None:
    if isinstance(value, bool | int | float | str | bytes) and not isinstance(value, np.generic):
        _write_python_value(group, name, value)
        return
    try:
        array = array_of(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{place} cannot be stored in a checkpoint: {error}") from error
    if not is_stored(array.dtype):
        raise TypeError(f"{place} cannot be stored in a checkpoint: {type(value).__name__} of dtype {array.dtype}")
    if array.dtype.name not in NATIVE:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)
        _mark(group.create_dataset(name, data=data), array.dtype.name)
        return
    dataset = group.create_dataset(name, data=array, dtype=array.dtype.newbyteorder("="))
    if array.ndim == 0 and not isinstance(value, np.generic):
        _mark(dataset, "array")


def _write_python_value(group: Any, name: str, value: bool | int | float | str | bytes) -> None:
    data: Any = value
    if isinstance(value, str):
        if "\0" not in value and value.isprintable():  # printable: no half of a surrogate pair is among it
            group.create_dataset(name, data=value)
            return
        kind, data = "str", np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    elif isinstance(value, bytes):
        kind, data = "bytes", np.frombuffer(value, np.uint8)
    elif isinstance(value, bool):
        kind = "bool"
    elif isinstance(value, float):
        kind, data = "float", np.float64(value)
    else:
        kind, data = "int", np.int64(value) if -(2**63) <= value < 2**63 else hex(value)
    _mark(group.create_dataset(name, data=data), kind)


def _mark(dataset: Any, kind: str) -> None:
    dataset.attrs.create("kind", np.bytes_(kind.encode()))
