"""A kernel's sizes by symbols of its own, so that equal kernels of different graphs are equal."""

from __future__ import annotations

from collections.abc import Callable, KeysView, Sequence, Set
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from ort_dynamo.graph.fused_op import ITSELF, Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import ColumnSum, Counter, HostNumber, Kernel, Load, Step, Store
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError

__all__ = ["symbol_of_input", "with_own_symbols"]


def symbol_of_input(index: int) -> int:
    """Return the symbol of an input that is a number on the host; those of a graph are from 0 up."""
    return -1 - index


def with_own_symbols(
    kernel: Kernel, inputs: Sequence[ir.Value], shapes: Callable[[ir.Value], Sequence[Size]]
) -> Kernel:
    """Renumber a kernel's symbols, each of which becomes a dimension of an input, or an input that is a number.

    Symbols that only occur together, as in the rows of a flattened batch, may become one.

    Args:
        kernel: the kernel; its sizes have the symbols of a graph and of `symbol_of_input`.
        inputs: the inputs of the kernel.
        shapes: the sizes of each input, with the same symbols.

    Raises:
        CannotFuseError: no input has a symbol for a dimension.
    """
    used = _symbols(kernel)
    if not used:
        return kernel
    places = {symbol_of_input(index): (index, ITSELF) for index in range(len(inputs))}
    dims = [(size, (index, axis)) for index, value in enumerate(inputs) for axis, size in enumerate(shapes(value))]
    for size, place in dims:
        if len(size.symbols) == 1 and size.factor == 1:
            places.setdefault(size.symbols[0], place)
    missing = used - places.keys()
    for size, place in dims:
        if not missing.isdisjoint(size.symbols):
            whole = min(places) - 1
            kernel = _with_sizes(kernel, partial(_in_multiples, missing, size, whole))
            places[whole] = place
            used = _symbols(kernel)
            missing = used - places.keys()
    if missing:
        raise CannotFuseError(f"no input has a dimension for {len(missing)} of the symbols")
    numbers = {symbol: number for number, symbol in enumerate(used)}
    renumbered = _with_sizes(
        kernel, lambda size: Size(size.factor, tuple(sorted(numbers[symbol] for symbol in size.symbols)))
    )
    return replace(renumbered, symbols=tuple(places[symbol] for symbol in numbers))


def _in_multiples(missing: Set[int], whole: Size, symbol: int, size: Size) -> Size:
    """Write a size with a missing symbol as a multiple of `whole`, which is called `symbol`, if it is one."""
    if missing.isdisjoint(size.symbols) or size.factor % whole.factor:
        return size
    left = list(size.symbols)
    for one in whole.symbols:
        if one not in left:
            return size
        left.remove(one)
    return Size(size.factor // whole.factor, tuple(sorted([*left, symbol])))


def _symbols(kernel: Kernel) -> KeysView[int]:
    """Return the symbols of a kernel's sizes, in order."""
    found: dict[int, None] = {}

    def seen(size: Size) -> Size:
        found.update(dict.fromkeys(size.symbols))
        return size

    _with_sizes(kernel, seen)
    return found.keys()


def _with_sizes(kernel: Kernel, other: Callable[[Size], Size]) -> Kernel:
    """Return a kernel with other sizes."""

    def each(sizes: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(map(other, sizes))

    def step_with(step: Step) -> Step:
        match step:
            case Load():
                places = tuple((place, other(stride), other(count)) for place, stride, count in step.places)
                return replace(step, strides=each(step.strides), offset=other(step.offset), places=places)
            case Counter():
                return replace(step, strides=each(step.strides))
            case HostNumber():
                return replace(step, value=other(step.value))
        return step

    def store_with(store: Store | ColumnSum) -> Store | ColumnSum:
        if isinstance(store, Store):
            return replace(store, shape=each(store.shape), strides=each(store.strides))
        return replace(store, shape=each(store.shape))

    steps, stores = tuple(map(step_with, kernel.steps)), tuple(map(store_with, kernel.stores))
    return replace(kernel, loops=each(kernel.loops), steps=steps, stores=stores, parts=other(kernel.parts))
