"""Fused kernels in NumPy: the reference of the tests, and a substitute where there is no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import (
    WIDE,
    Apply,
    ColumnSum,
    Constant,
    Counter,
    HostNumber,
    Kernel,
    Load,
    Reduce,
    Step,
    Total,
)

__all__ = ["FUNCTIONS", "computed"]

Array = npt.NDArray[Any]


def _each(function: Callable[[float], float]) -> Callable[[Array], Array]:
    def applied(x: Array) -> Array:
        return np.array([function(float(one)) for one in x.reshape(-1)], x.dtype).reshape(x.shape)

    return applied


def _unless(wrong: Array, x: Array) -> Array:
    if np.any(wrong):
        raise IndexError("a fused kernel found an index that is out of range")
    return x


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.logical_and,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "ceil": np.ceil,
    "cos": np.cos,
    "div": np.divide,
    "eq": np.equal,
    "erf": _each(math.erf),
    "exp": np.exp,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "half_erfc": _each(lambda x: math.erfc(x) / 2),
    "isnan": np.isnan,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "round": np.rint,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "stop": _unless,
    "sub": np.subtract,
    "tanh": np.tanh,
    "where": np.where,
    "xor": np.logical_xor,
}
"""The scalar functions that a kernel may apply. "div" is for floats, "round" goes to the nearest even number."""


def computed(kernel: Kernel, inputs: Sequence[Array], symbols: Sequence[int]) -> list[Array]:
    """Compute a kernel's outputs, each flat.

    Args:
        kernel: the program.
        inputs: of any shape, contiguous; half types as ml_dtypes has them.
        symbols: the value of each symbol of its sizes.
    """
    loops = [size.value(symbols) for size in kernel.loops]
    counters = np.meshgrid(*map(np.arange, loops), indexing="ij", sparse=True)

    def offsets(strides: Sequence[Size]) -> Array:
        found = np.zeros((1,) * len(loops), np.int64)
        for counter, stride in zip(counters, strides, strict=True):
            if stride.factor:
                found = found + counter * stride.value(symbols)
        return found

    flat = [np.ascontiguousarray(x).reshape(-1) for x in inputs]
    columns = tuple(range(len(loops) - kernel.columns, len(loops)))
    values: list[Array] = []
    with np.errstate(all="ignore"):
        for step in kernel.steps:
            values.append(_step(step, values, flat, offsets, columns, loops, symbols))
    outputs = []
    for dtype, store in zip(kernel.outputs, kernel.stores, strict=True):
        if isinstance(store, ColumnSum):
            full = np.broadcast_to(values[store.step], loops).reshape(-1, math.prod(loops[columns[0] :]))
            parts = kernel.parts.value(symbols)
            part = -(-len(full) // max(1, parts))
            full = np.pad(full, ((0, part * parts - len(full)), (0, 0)))
            sums = full.reshape(parts, part, full.shape[1]).sum(1)
            outputs.append(sums.astype(dtype.numpy()).reshape(-1))
            continue
        places = offsets(store.strides)
        result = np.empty(places.size, dtype.numpy())
        result[places.reshape(-1)] = np.broadcast_to(values[store.step], places.shape).astype(dtype.numpy()).reshape(-1)
        outputs.append(result)
    return outputs


def _step(
    step: Step,
    values: Sequence[Array],
    flat: Sequence[Array],
    offsets: Callable[[Sequence[Size]], Array],
    columns: tuple[int, ...],
    loops: Sequence[int],
    symbols: Sequence[int],
) -> Array:
    wide = WIDE.get(step.dtype, step.dtype).numpy()
    match step:
        case Load():
            places = offsets(step.strides) + step.offset.value(symbols)
            is_read = np.ones((1,) * len(loops), np.bool_)
            for place, stride, count in step.places:
                places = places + values[place] * stride.value(symbols)
                is_read = is_read & (values[place] >= 0) & (values[place] < count.value(symbols))
            for loop, number in step.only:
                is_read = is_read & (offsets([Size(int(other == loop)) for other in range(len(loops))]) == number)
            shown = (
                np.where(is_read, flat[step.input][np.where(is_read, places, 0)], 0)
                if step.only or step.places
                else flat[step.input][places]
            )
            return shown.astype(wide)
        case Counter():
            return offsets(step.strides)
        case HostNumber():
            return np.full((1,) * len(loops), step.value.value(symbols), wide)
        case Constant():
            return np.full((1,) * len(loops), step.value, wide)
        case Reduce():
            full = np.broadcast_to(values[step.argument], _row_shape(values[step.argument], columns, loops))
            reduced = full.sum(columns, keepdims=True) if step.function == "sum" else full.max(columns, keepdims=True)
            return np.asarray(reduced, wide)
        case Total():
            rows = tuple(axis for axis in range(len(loops)) if axis not in columns)
            return np.asarray(np.broadcast_to(values[step.argument], loops).sum(rows, keepdims=True), wide)
        case Apply():
            given = [values[argument] for argument in step.arguments]
            result = given[0] if step.function == "convert" else FUNCTIONS[step.function](*given)
            if step.function == "convert" and step.dtype == ir.DataType.BOOL:
                result = result != 0
            return np.asarray(result).astype(step.dtype.numpy()).astype(wide)


def _row_shape(value: Array, columns: tuple[int, ...], loops: Sequence[int]) -> tuple[int, ...]:
    """The shape of a step with all of its columns."""
    return tuple(loops[axis] if axis in columns else size for axis, size in enumerate(value.shape))
