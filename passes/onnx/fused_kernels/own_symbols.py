"""A kernel's sizes by symbols of its own, so that equal kernels of different graphs are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import Counter, Kernel, Load, Step, Store
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError

__all__ = ["with_own_symbols"]


def with_own_symbols(
    kernel: Kernel, inputs: Sequence[ir.Value], shapes: Callable[[ir.Value], Sequence[Size]]
) -> Kernel:
    """Renumber a kernel's symbols, each of which becomes a dimension of an input.

    Args:
        kernel: the kernel; its sizes have the symbols of a graph.
        inputs: the inputs of the kernel.
        shapes: the sizes of each input, with the same symbols.

    Raises:
        CannotFuseError: no input has a symbol for a dimension.
    """
    used = [*kernel.loops]
    for step in kernel.steps:
        used += (*step.strides, step.offset) if isinstance(step, Load) else ()
        used += [size for _, *sizes in step.places for size in sizes] if isinstance(step, Load) else ()
        used += step.strides if isinstance(step, Counter) else ()
    for store in kernel.stores:
        used += [*store.shape, *(store.strides if isinstance(store, Store) else ())]
    numbers = {symbol: number for number, symbol in enumerate(dict.fromkeys(s for size in used for s in size.symbols))}
    if not numbers:
        return kernel
    places = {
        size.symbols[0]: (index, axis)
        for index, value in reversed(list(enumerate(inputs)))
        for axis, size in enumerate(shapes(value))
        if size == Size(1, size.symbols[:1]) and size.symbols
    }
    if missing := numbers.keys() - places.keys():
        raise CannotFuseError(f"no input has a dimension for {len(missing)} of the symbols")

    def anew(sizes: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(Size(size.factor, tuple(sorted(numbers[symbol] for symbol in size.symbols))) for size in sizes)

    def renumbered(step: Step) -> Step:
        if isinstance(step, Load):
            places = tuple((place, anew([stride])[0], anew([count])[0]) for place, stride, count in step.places)
            return replace(step, strides=anew(step.strides), offset=anew([step.offset])[0], places=places)
        return replace(step, strides=anew(step.strides)) if isinstance(step, Counter) else step

    steps = tuple(map(renumbered, kernel.steps))
    stores = tuple(
        replace(store, shape=anew(store.shape), strides=anew(store.strides))
        if isinstance(store, Store)
        else replace(store, shape=anew(store.shape))
        for store in kernel.stores
    )
    symbols = tuple(places[symbol] for symbol in numbers)
    return replace(kernel, loops=anew(kernel.loops), steps=steps, stores=stores, symbols=symbols)
