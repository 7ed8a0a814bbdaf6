"""Strides that torch's elementwise kernels give a result, dimensions of one element included.

The rule is that of TensorIterator (aten/src/ATen/TensorIterator.cpp: compute_fast_setup_type, reorder_dimensions).
Fake tensors follow it but for dimensions of one element.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Layout", "contiguous_strides", "elementwise_strides", "is_dense"]

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""

_CHANNELS_LAST = (1, 3, 2, 0)


def contiguous_strides(sizes: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Give the strides of memory that goes through the dimensions in `order`, fastest first; by default the last is."""
    strides, step = [0] * len(sizes), 1
    for axis in reversed(range(len(sizes))) if order is None else order:
        strides[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(strides)


def is_dense(layout: Layout) -> bool:
    """Check whether a tensor's elements fill its memory, each in a place of its own, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(*layout, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def elementwise_strides(sizes: tuple[int, ...], operands: Sequence[Layout]) -> tuple[int, ...]:
    """Give the strides of a new result of `sizes`, of operands that are broadcast to it; scalars have no dimension."""
    if all(one[0] == sizes for one in operands):
        if all(_is_contiguous(one) for one in operands):
            return contiguous_strides(sizes)
        if len(sizes) == len(_CHANNELS_LAST) and all(_is_contiguous(one, _CHANNELS_LAST) for one in operands):
            return contiguous_strides(sizes, _CHANNELS_LAST)
        first = operands[0]
        if is_dense(first) and all(one[1] == first[1] for one in operands):
            return first[1]
    steps = [_broadcast(one, sizes) for one in operands]
    order = [*reversed(range(len(sizes)))]
    for begin in range(1, len(order)):
        place = begin
        for other in reversed(range(begin)):
            decided = _compare(order[other], order[place], steps, sizes)
            if decided > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif decided < 0:
                break
    return contiguous_strides(sizes, order)


def _is_contiguous(layout: Layout, order: Sequence[int] | None = None) -> bool:
    wanted = contiguous_strides(layout[0], order)
    return all(size == 1 or stride == one for size, stride, one in zip(*layout, wanted, strict=True))


def _broadcast(layout: Layout, sizes: Sequence[int]) -> list[int]:
    missing = len(sizes) - len(layout[0])
    own = [
        0 if size == 1 and whole != 1 else stride for size, stride, whole in zip(*layout, sizes[missing:], strict=True)
    ]
    return [0] * missing + own


def _compare(first: int, second: int, steps: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Compare two dimensions by the first operand that decides: swap (1), keep (-1), or undecided (0)."""
    for strides in steps:
        if not strides[first] or not strides[second]:
            continue
        if strides[first] != strides[second]:
            return -1 if strides[first] < strides[second] else 1
        if sizes[first] > sizes[second]:
            return 1
    return 0
