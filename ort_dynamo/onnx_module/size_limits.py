"""Limits the memory that a few bytes of a file may ask for: the sizes of new tensors that are written in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ort_dynamo.onnx_module.host_values import Host

__all__ = ["check_sizes"]

MOST_ELEMENTS = 1 << 31
"""Maximum number of elements of a new tensor whose size is a constant of the file."""


def _product(args: Sequence[Any], at: int) -> Any:
    return math.prod(max(abs(size), 1) for size in args[at].values)


def _steps(args: Sequence[Any]) -> Any:
    start, limit, delta = (value.values[0] for value in args)
    return abs(limit - start) / abs(delta) if delta else math.inf


_ELEMENTS: dict[str, tuple[tuple[int, ...], Callable[[Sequence[Any]], Any]]] = {
    "ConstantOfShape": ((0,), lambda args: _product(args, 0)),
    "Expand": ((1,), lambda args: _product(args, 1)),
    "Tile": ((1,), lambda args: _product(args, 1)),
    "Pad": ((1,), lambda args: _product(args, 1)),
    "OneHot": ((1,), lambda args: _product(args, 1)),
    "Upsample": ((1,), lambda args: _product(args, 1)),
    "Range": ((0, 1, 2), _steps),
}
"""The inputs that the size of the result depends on, and its formula; other factors of the size are at least 1."""


def check_sizes(op_type: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the elements that a node's constants ask for, as far as they are known.

    Raises:
        ValueError: they are more than MOST_ELEMENTS.
    """
    if op_type == "Resize":
        places: tuple[int, ...] = tuple(at for at in range(1, len(args)) if isinstance(args[at], Host))
        count = max([_product(args, at) for at in places], default=1)
    elif op_type == "Pad" and "pads" in kwargs:
        count = math.prod(max(abs(size), 1) for size in kwargs["pads"])
    elif op_type in _ELEMENTS:
        places, size = _ELEMENTS[op_type]
        known = all(at < len(args) and isinstance(args[at], Host) and args[at].values for at in places)
        count = size(args) if known else 1
    else:
        return 1
    if not count <= MOST_ELEMENTS:
        raise ValueError(f"it asks for {count} elements; at most {MOST_ELEMENTS} are allowed")
    return float(count)
