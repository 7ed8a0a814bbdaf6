"""Pointwise operators on numeric and bool tensors, with one, two and more inputs, and casts."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ort_dynamo.graph.rounded_numbers import ceil, divide, floor, is_nan, power_of
from ort_dynamo.onnx_module.host_values import (
    HOST_RULES,
    Host,
    Value,
    as_tensor,
    cast_number,
    map_host,
    operands,
)
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
"""One input and no attribute, and the same in torch."""

_BOOL = frozenset({"And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not"})
"""Give bools."""


def _register_unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    def apply(x: Tensor) -> Tensor:
        return function(x)

    apply.__name__ = apply.__qualname__ = f"onnx_{name}"
    globals()[apply.__name__] = onnx_operator(name)(apply)


def _register_host_unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    rule, dtype = HOST_RULES[name], torch.bool if name in _BOOL else None

    def apply(x: Value) -> Value:
        return map_host(rule, x, dtype=dtype) if isinstance(x, Host) else function(x)

    apply.__name__ = apply.__qualname__ = f"onnx_{name}"
    globals()[apply.__name__] = onnx_operator(name)(apply)


def _register_binary(name: str, function: Callable[[Any, Any], Tensor]) -> None:
    rule, dtype = HOST_RULES[name], torch.bool if name in _BOOL else None
    of_floats = divide if name == "Div" else rule

    def apply(a: Value, b: Value) -> Value:
        if isinstance(a, Host) and isinstance(b, Host):
            return map_host(of_floats if a.dtype.is_floating_point else rule, a, b, dtype=dtype)
        return function(*operands(a, b))

    apply.__name__ = apply.__qualname__ = f"onnx_{name}"
    globals()[apply.__name__] = onnx_operator(name)(apply)


def _quotient(a: Any, b: Any) -> Tensor:
    if (a if isinstance(a, Tensor) else b).is_floating_point():
        return a / b
    dividend = a if isinstance(a, Tensor) else torch.full_like(b, a)
    return torch.div(dividend, b, rounding_mode="trunc")


def _logical(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return a function of torch's that takes no Python bools."""

    def apply(a: Any, b: Any) -> Tensor:
        like = a if isinstance(a, Tensor) else b
        return function(*[x if isinstance(x, Tensor) else torch.tensor(x, device=like.device) for x in (a, b)])

    return apply


for _name, _function in _UNARY.items():
    _register_unary(_name, _function)
for _name, _function in {
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Not": torch.logical_not,
}.items():
    _register_host_unary(_name, _function)
for _name, _pair in {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _quotient,
    "And": _logical(torch.logical_and),
    "Or": _logical(torch.logical_or),
    "Xor": _logical(torch.logical_xor),
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
}.items():
    _register_binary(_name, _pair)


@onnx_operator("Floor")
def round_down(x: Value) -> Value:
    """Return the largest whole number below or at each element."""
    return map_host(lambda value: floor(value, x.dtype), x) if isinstance(x, Host) else torch.floor(x)


@onnx_operator("Ceil")
def round_up(x: Value) -> Value:
    """Return the smallest whole number above or at each element."""
    return map_host(lambda value: ceil(value, x.dtype), x) if isinstance(x, Host) else torch.ceil(x)


@onnx_operator("Identity")
def identity(x: Value) -> Value:
    """Give back the input."""
    return x


@onnx_operator("Pow")
def power(x: Value, y: Value) -> Value:
    """Compute a power in the base's dtype."""
    if isinstance(x, Host) and isinstance(y, Host):
        return map_host(power_of if x.dtype.is_floating_point else _host_power, x, y)
    of_floats, is_real = (value.dtype.is_floating_point for value in (x, y))
    if isinstance(x, Tensor) and isinstance(y, Host) and y.scalar and (of_floats or (not is_real and y.values[0] >= 0)):
        return torch.pow(x, y.values[0]).to(x.dtype)
    base, exponent = _all_tensors((x, y))
    wide = base.double() if is_real and not of_floats else base  # torch would compute in the exponent's dtype
    return torch.pow(wide, exponent).to(base.dtype)


def _host_power(a: Any, b: Any) -> Any:
    """Return a power of an integer."""
    return math.trunc(math.pow(a, b)) if isinstance(b, float) or b < 0 or b > 63 else a**b


def _host_remainder(a: Any, b: Any) -> Any:
    """Return the remainder that has the sign of the dividend."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) % abs(b) if a >= 0 else -(abs(a) % abs(b))
    return math.nan if b == 0 or is_nan(a) or math.isinf(a) else math.fmod(a, b)


@onnx_operator("Mod")
def modulo(a: Value, b: Value, *, fmod: int = 0) -> Value:
    """With the sign of the dividend if `fmod`, else of the divisor."""
    if isinstance(a, Host) and isinstance(b, Host):
        return map_host(_host_remainder if fmod else operator.mod, a, b)
    return (torch.fmod if fmod else torch.remainder)(*_all_tensors((a, b)))


@onnx_operator("BitShift")
def shift(a: Tensor, b: Tensor, *, direction: Literal["LEFT", "RIGHT"]) -> Tensor:
    """By bits; bits that leave are lost."""
    return torch.bitwise_left_shift(a, b) if direction == "LEFT" else torch.bitwise_right_shift(a, b)


@onnx_operator("BitwiseAnd")
def bitwise_and(a: Tensor, b: Tensor) -> Tensor:
    """Bit by bit."""
    return torch.bitwise_and(a, b)


@onnx_operator("BitwiseOr")
def bitwise_or(a: Tensor, b: Tensor) -> Tensor:
    """Bit by bit."""
    return torch.bitwise_or(a, b)


@onnx_operator("BitwiseXor")
def bitwise_xor(a: Tensor, b: Tensor) -> Tensor:
    """Bit by bit."""
    return torch.bitwise_xor(a, b)


def _all_tensors(values: tuple[Value, ...]) -> list[Tensor]:
    (device, *_) = [value.device for value in values if isinstance(value, Tensor)]
    return [as_tensor(value, device) for value in values]


@onnx_operator("Max")
def maximum(x: Value, *others: Value) -> Value:
    """Return the largest of all inputs, each broadcast; NaN if one of them is."""
    values = (x, *others)
    if all(isinstance(value, Host) for value in values):
        return map_host(HOST_RULES["Max"], *values)  # type: ignore[arg-type]
    return functools.reduce(torch.maximum, _all_tensors(values))


@onnx_operator("Min")
def minimum(x: Value, *others: Value) -> Value:
    """Return the smallest of all inputs, each broadcast; NaN if one of them is."""
    values = (x, *others)
    if all(isinstance(value, Host) for value in values):
        return map_host(HOST_RULES["Min"], *values)  # type: ignore[arg-type]
    return functools.reduce(torch.minimum, _all_tensors(values))


@onnx_operator("Sum")
def total(x: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of all inputs, each broadcast."""
    return functools.reduce(torch.add, others, x)


@onnx_operator("Mean")
def mean(x: Tensor, *others: Tensor) -> Tensor:
    """Return the mean of all inputs, each broadcast."""
    return functools.reduce(torch.add, others, x) / (len(others) + 1)


@onnx_operator("Where")
def where(condition: Value, x: Value, y: Value) -> Value:
    """Choose by `condition`, all broadcast."""
    values = (condition, x, y)
    if all(isinstance(value, Host) for value in values):
        return map_host(HOST_RULES["Where"], condition, x, y, dtype=x.dtype)  # type: ignore[arg-type]
    chosen, first, second = _all_tensors(values)
    return torch.where(chosen, first, second)


@onnx_operator("IsInf")
def is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Check each element for an infinity of the given signs."""
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_negative or detect_positive:
        return torch.isneginf(x) if detect_negative else torch.isposinf(x)
    return torch.zeros_like(x, dtype=torch.bool)


@onnx_operator("Cast")
def cast(x: Value, *, to: torch.dtype, saturate: int = 1, round_mode: str = "up") -> Value:
    """Change the dtype; `saturate` and `round_mode` concern types of 8 bits, which are not supported."""
    if isinstance(x, Host):
        return map_host(lambda value: cast_number(value, x.dtype, to), x, dtype=to)
    return x.to(to)


@onnx_operator("CastLike")
def cast_like(x: Value, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Value:
    """Change the dtype to that of `like`."""
    return cast(x, to=like.dtype)
