"""Values of an ONNX graph that are no tensors while it runs: shapes, and values computed from them.

ONNX has tensors only, so `Shape` makes a tensor, and `Reshape` reads one. In torch a size is a number, which Dynamo
keeps symbolic; as the element of a tensor it would end the graph. So a value that comes from shapes and small constants
is a `Host` here: a tuple of numbers with the dtype that ONNX gives it, computed by Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ort_dynamo.graph.rounded_numbers import is_nan, round_to, truncate

__all__ = [
    "HOST_LIMIT",
    "HOST_RULES",
    "Host",
    "Setting",
    "Statistic",
    "Value",
    "as_tensor",
    "cast_number",
    "device_of",
    "flag",
    "integer",
    "integers",
    "largest",
    "map_host",
    "number",
    "numbers",
    "operands",
    "smallest",
]

HOST_LIMIT = 1024
"""The longest vector that is computed by Python: no shape is longer, and a longer constant is data."""


class Host(NamedTuple):
    """A scalar or a vector of Python scalars, or of symbolic sizes while Dynamo traces.

    Attributes:
        values: the elements; a scalar has one.
        scalar: whether the rank is 0, not 1.
        dtype: the dtype as a tensor.
        fixed: whether the elements are known when the graph is made, so that they may decide a length.
    """

    values: tuple[Any, ...]
    scalar: bool
    dtype: torch.dtype
    fixed: bool = False


Value: TypeAlias = Host | Tensor
"""Argument type of an operator that can compute with a Host."""

Setting: TypeAlias = Annotated[Value, "setting"]
"""An input with settings (axes, sizes, ratios): a Host if possible, and never a weight."""

Statistic: TypeAlias = Annotated[Tensor, "statistic"]
"""An input with a statistic of training or of the data, such as weights of classes: a buffer, never a weight."""


def as_tensor(value: Value, device: torch.device | None = None) -> Tensor:
    """Return the tensor of a value, on `device` if it is a Host."""
    if not isinstance(value, Host):
        return value
    elements = value.values[0] if value.scalar else value.values
    if all(isinstance(element, int) for element in value.values):  # unchanged: see cast_number
        return torch.tensor(elements, dtype=torch.int64, device=device).to(value.dtype)
    return torch.tensor(elements, dtype=value.dtype, device=device)


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor."""
    return tensor.device


def operands(*values: Value) -> list[Any]:
    """Arguments of a pointwise function of torch for values of one element type: tensors, and numbers for scalar Hosts.

    At least one of the values is a tensor.
    """
    (first, *_) = [value for value in values if not isinstance(value, Host)]
    return [
        value
        if not isinstance(value, Host)
        else value.values[0]
        if value.scalar and value.dtype == first.dtype
        else as_tensor(value, first.device)
        for value in values
    ]


def numbers(value: Value) -> list[Any]:
    """Return the elements of a vector or scalar, as numbers; reads a tensor, which waits for it."""
    if isinstance(value, Host):
        return list(value.values)
    if value.dim() > 1:
        raise ValueError(f"expected a vector or a scalar, not a tensor of {value.dim()} axes")
    found = value.tolist()
    return found if isinstance(found, list) else [found]


def integers(value: Value) -> list[int]:
    """Return the elements of a vector of integers."""
    return numbers(value)


def number(value: Value) -> Any:
    """Return the one element of a value, as a number."""
    if isinstance(value, Host):
        if len(value.values) != 1:
            raise ValueError(f"expected one number, not {len(value.values)}")
        return value.values[0]
    return value.item()


def integer(value: Value) -> int:
    """Return the one element of a value of integers."""
    return number(value)


def flag(value: Value) -> bool:
    """Return the one element of a value, as a bool."""
    return bool(number(value))


def cast_number(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Return a number as ONNX's Cast gives it, but not yet rounded; a size stays symbolic."""
    if new == torch.bool:
        return value != 0
    if new.is_floating_point:
        return value  # a whole number stays one, as Dynamo starts anew for a size that becomes a float
    return truncate(value, old)


def map_host(function: Callable[..., Any], *values: Host, dtype: torch.dtype | None = None) -> Host:
    """Apply a function of scalars to each element; values of length 1 are broadcast.

    Args:
        function: a function with one scalar per value.
        values: the values, of equal length or of length 1.
        dtype: the dtype of the result, by default that of the first value.
    """
    lengths = [len(value.values) for value in values if len(value.values) != 1]
    length = lengths[0] if lengths else 1
    if any(other != length for other in lengths):
        raise ValueError(f"vectors of lengths {sorted(set(lengths))} cannot be combined")
    rows = [value.values * length if len(value.values) == 1 else value.values for value in values]
    result = dtype or values[0].dtype
    found = tuple(round_to(function(*row), result) for row in zip(*rows, strict=True))
    return Host(found, all(value.scalar for value in values), result, all(value.fixed for value in values))


def largest(row: Sequence[Any]) -> Any:
    """Return the largest of some numbers; NaN if one is."""
    return math.nan if any(is_nan(value) for value in row) else max(row)


def smallest(row: Sequence[Any]) -> Any:
    """Return the smallest of some numbers; NaN if one is."""
    return math.nan if any(is_nan(value) for value in row) else min(row)


def _whole_quotient(a: Any, b: Any) -> Any:
    """Divide, rounding towards zero."""
    if a >= 0 and b > 0:
        return a // b
    found = abs(a) // abs(b)
    return found if (a >= 0) == (b >= 0) else -found


HOST_RULES: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _whole_quotient,
    "And": lambda a, b: a and b,
    "Or": lambda a, b: a or b,
    "Xor": operator.ne,
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Max": lambda *row: largest(row),
    "Min": lambda *row: smallest(row),
    "Where": lambda condition, a, b: a if condition else b,
    "Neg": operator.neg,
    "Abs": abs,
    "Not": operator.not_,
}
"""ONNX's pointwise operators, of numbers; Div is that of integers."""
