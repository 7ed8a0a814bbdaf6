"""Convert a user's dictionary to JSON and arrays and back. Loading runs no code, unlike unpickling.

JSON has null, true, false, text, lists, finite floats and integers of 64 bits natively. Any other value is an object
with one member, whose name is the kind:

| member | value |
|---|---|
| `int` | an integer beyond 64 bits, in hexadecimal |
| `float` | a NaN or an infinity: its 8 bytes, most significant first, in hexadecimal |
| `str` | text with surrogates: its UTF-8, in hexadecimal |
| `bytes`, `array`, `scalar`, `tensor` | the key of an array |
| `tuple` | a list |
| `dict`, `OrderedDict`, `Counter` | a list of [key, value] |
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ort_dynamo.training.checkpointing.array_types import array_of, is_stored, tensor_of

__all__ = ["decode", "encode"]

_DEEPEST = 200
"""Containers that may be one inside the other; JSON's own reader and writer stop at some 1000."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KEYS = (str, int, float, bool, type(None), bytes, tuple)


def encode(user_dict: Mapping[Any, Any], where: str = "user_dict") -> dict[str, Any]:
    """Encode a user's dictionary as {"json": text, "arrays": {key: array}}.

    Args:
        user_dict: a dict, OrderedDict or Counter of None, bool, int, float, str, bytes, NumPy arrays and scalars, torch
            tensors, and dicts, lists and tuples of these. Keys are any of these that are neither array nor tensor.
            Subclasses are refused, as they would be loaded as something else; torch.nn.Parameter is a tensor here.
        where: its name in an error.

    Raises:
        TypeError: a value is of another type; the message has its place, such as user_dict['a'][3].
        ValueError: containers are nested more than 200 deep, as those are that contain themselves.
    """
    if type(user_dict) not in _MAPPINGS.values():
        raise TypeError(f"{where} must be a dict, not {type(user_dict).__name__}")
    arrays: dict[str, Any] = {}
    return {"json": json.dumps(_Encoder(arrays).encode(user_dict, where, 0)), "arrays": arrays}


def decode(encoded: Mapping[str, Any]) -> Any:
    """Decode a result of `encode`. Tensors are on the CPU and need no gradient.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, RecursionError: `encoded` is nothing that `encode` makes.
    """
    value = _Decoder(encoded["arrays"]).decode(json.loads(encoded["json"]))
    if not isinstance(value, dict):
        raise ValueError("user_dict is not a dictionary")
    return value


class _Encoder:
    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def encode(self, value: Any, place: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if np.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is str:
            return {"str": value.encode("utf-8", "surrogatepass").hex()} if _SURROGATE.search(value) else value
        if depth > _DEEPEST:
            raise ValueError(f"{place[:200]}... is nested more than {_DEEPEST} deep, or contains itself")
        if kind is list or kind is tuple:
            items = [self.encode(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in _MAPPINGS.values():
            return {kind.__name__: [self._pair(key, item, place, depth) for key, item in value.items()]}
        return self._encode_data(value, place)

    def _pair(self, key: Any, item: Any, place: str, depth: int) -> list[Any]:
        if type(key) not in _KEYS:
            raise TypeError(f"{place} has a key of type {type(key).__name__}, which a checkpoint cannot store: {key!r}")
        inside = f"{place}[{key!r}]"
        return [self.encode(key, f"the key {key!r} of {place}", depth + 1), self.encode(item, inside, depth + 1)]

    def _encode_data(self, value: Any, place: str) -> dict[str, str]:
        kind = type(value)
        if kind is bytes:
            return self._keep("bytes", np.frombuffer(value, np.uint8))
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            try:
                return self._keep("tensor", array_of(value))
            except TypeError as error:
                raise TypeError(f"{place} cannot be stored in a checkpoint: {error}") from error
        if kind is np.ndarray and is_stored(value.dtype):
            return self._keep("array", value)
        if isinstance(value, np.generic) and is_stored(value.dtype):
            return self._keep("scalar", np.asarray(value))
        what = f"{kind.__name__} of dtype {value.dtype}" if isinstance(value, np.ndarray) else kind.__qualname__
        raise TypeError(
            f"{place} cannot be stored in a checkpoint: {what}. It may hold None, bool, int, float, str, bytes, "
            "numeric arrays and tensors, and dicts, lists and tuples of these"
        )

    def _keep(self, kind: str, array: np.ndarray[Any, Any]) -> dict[str, str]:
        name = str(len(self._arrays))
        self._arrays[name] = array
        return {kind: name}


class _Decoder:
    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        if kind == "int":
            return int(content, 16)
        if kind == "float":
            (number,) = np.frombuffer(bytes.fromhex(content), ">f8")
            return float(number)
        if kind == "str":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        if kind == "tuple":
            return tuple(self.decode(item) for item in content)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({self.decode(key): self.decode(item) for key, item in content})
        array = self._arrays[content]
        if not isinstance(array, np.ndarray):
            raise ValueError(f"the array {content!r} is a {type(array).__name__}")
        if kind == "bytes":
            return array.tobytes()
        if kind == "tensor":
            return tensor_of(array)
        if kind == "scalar":
            return array[()]
        if kind == "array":
            return array
        raise ValueError(f"{kind!r} is not a kind of value")
