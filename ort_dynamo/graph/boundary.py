"""Layout of tensors at the boundary of a session, which only takes contiguous ones: shared by lowering and runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch

from ort_dynamo.torch_internals.sizes.size_guards import ask
from ort_dynamo.torch_internals.sizes.symbols import expression, given_expression, hints, known_true
from ort_dynamo.torch_internals.sizes.sympy_functions import Max

__all__ = [
    "ValueSpec",
    "copy_with_strides",
    "fed",
    "has_strides",
    "in_order",
    "input_spec",
    "inverse",
    "output_spec",
    "physical_order",
    "promised_strides",
    "symbolic_strides",
]


@dataclass(frozen=True)
class ValueSpec:
    """The form in which one value crosses the boundary of a session.

    Attributes:
        dtype: the torch dtype; int64 or float64 for a Python scalar.
        order: the tensor's dimensions from slowest to fastest in memory. The session gets the tensor with this
            permutation, which is contiguous and needs no copy. Empty for the identity.
        is_number: whether it is a Python scalar (a symbolic size, or a float computed from one), passed as a 0-d
            tensor.
        strides: the strides of an output that is no permutation of a contiguous tensor (overlapping, or with gaps);
            the result is copied into them. Empty otherwise.
        is_read: False for an input that no node reads, which the model lacks.
        as_rows: whether a number n is passed as the shape of an empty matrix, (n, 0), so that the session has it on the
            host.
    """

    dtype: torch.dtype
    order: tuple[int, ...] = ()
    is_number: bool = False
    strides: tuple[int, ...] = ()
    is_read: bool = True
    as_rows: bool = False


def physical_order(fake: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of `fake` from slowest to fastest in memory, when permuting by them makes it contiguous.

    Empty for a contiguous tensor, and for one that no permutation makes contiguous (expanded, sliced). Installs no
    guard: an order that is not statically known counts as "no".
    """
    if fake.dim() < 2:
        return ()
    if not _is_symbolic(fake):
        return _order(fake)
    # One question, so that a key holds the order itself, and not the example's strides that it is found by.
    layout = tuple(map(given_expression, (*fake.shape, *fake.stride())))
    return ask("the physical order", layout, partial(_order, fake))


def _order(fake: torch.Tensor) -> tuple[int, ...]:
    identity = tuple(range(fake.dim()))
    if has_strides(fake, identity):
        return ()
    strides = hints(fake.stride())
    if None in strides:
        return _order_without_example(fake)
    # Dimensions of size 1 may carry any stride: they follow their neighbours, by the stable sort.
    order = tuple(sorted(identity, key=lambda axis: -strides[axis]))  # type: ignore[operator]
    return order if order != identity and has_strides(fake, order) else ()


def _order_without_example(fake: torch.Tensor) -> tuple[int, ...]:
    """Find the same order, from the fastest dimension on, where strides depend on data."""
    left, order = list(range(fake.dim())), list[int]()
    expected: int | torch.SymInt = 1
    while left:
        axis = next((a for a in reversed(left) if _continues(fake, a, expected)), None)
        if axis is None:
            return ()
        left.remove(axis)
        order.insert(0, axis)
        expected = expected * fake.shape[axis]
    return tuple(order)


def _continues(fake: torch.Tensor, axis: int, expected: int | torch.SymInt) -> bool:
    return known_true(fake.shape[axis] == 1) or _same_stride(fake.stride(axis), expected)


def fed(value: Any, spec: ValueSpec) -> torch.Tensor:
    """Return the tensor that a session is given for a value, but for its layout in memory."""
    if spec.as_rows:
        return torch.empty(value, 0, dtype=spec.dtype)
    tensor = torch.tensor(value, dtype=spec.dtype) if spec.is_number else value
    return tensor.permute(spec.order) if spec.order else tensor


def input_spec(fake: Any) -> ValueSpec | None:
    """Give the form of a graph's input, by its fake value: a strided tensor or a scalar; None for anything else."""
    if isinstance(fake, (int, torch.SymInt)):
        return ValueSpec(torch.int64, is_number=True)
    if isinstance(fake, (float, torch.SymFloat)):
        return ValueSpec(torch.float64, is_number=True)
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
        return ValueSpec(fake.dtype, physical_order(fake))
    return None


def output_spec(fake: torch.Tensor) -> ValueSpec:
    """Give the form of a graph's output, a strided tensor."""
    return ValueSpec(fake.dtype, physical_order(fake), strides=promised_strides(fake))


def inverse(order: tuple[int, ...]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def promised_strides(fake: torch.Tensor) -> tuple[int, ...]:
    """Strides of `fake` that neither contiguous memory nor `physical_order` gives; empty where they do.

    Of static shapes only; those of others are `symbolic_strides`. Strides of dimensions of size 0 or 1 promise nothing.
    """
    if _is_symbolic(fake) or fake.numel() <= 1 or _is_dense(fake):
        return ()
    return tuple(fake.stride())


def symbolic_strides(fake: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    """Return the same where a size or stride is symbolic."""
    if not _is_symbolic(fake) or _is_dense(fake):
        return ()
    return tuple(fake.stride())


def copy_with_strides(tensor: torch.Tensor, strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Return a copy of `tensor` in memory with `strides`, from element `offset` on.

    Elements that share a place there are equal.
    """
    if offset:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        length = offset + last + 1 if tensor.numel() else 0
        result = tensor.new_empty(length).as_strided(tensor.shape, strides, offset)
    else:
        result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    places = result
    for axis, stride in enumerate(strides):
        if stride == 0 and tensor.shape[axis]:  # copy_ refuses to write one place more than once
            places, tensor = places.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
    places.copy_(tensor)
    return result


def _is_symbolic(fake: torch.Tensor) -> bool:
    return any(isinstance(number, torch.SymInt) for number in (*fake.shape, *fake.stride()))


def _is_dense(fake: torch.Tensor) -> bool:
    return has_strides(fake, physical_order(fake) or tuple(range(fake.dim())))


def has_strides(fake: torch.Tensor, order: Sequence[int]) -> bool:
    """Check whether memory goes through the dimensions in `order`, without gaps. Installs no guard."""
    return in_order([fake.shape[axis] for axis in order], [fake.stride(axis) for axis in order])


def in_order(sizes: Sequence[int | torch.SymInt], strides: Sequence[int | torch.SymInt]) -> bool:
    """Check whether strides are contiguous; dimensions of size 1 may have any. Installs no guard."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not known_true(size == 1):
            if not _same_stride(stride, expected):
                return False
            expected = expected * size
    return True


def _same_stride(stride: int | torch.SymInt, expected: int | torch.SymInt) -> bool:
    """Check whether a stride is the expected one, for a tensor that has elements: Max(1, size) is the size then."""
    if known_true(stride == expected):
        return True
    if not isinstance(stride, torch.SymInt):
        return False
    found = expression(stride).replace(lambda e: isinstance(e, Max) and 1 in e.args, _without_one)
    return bool(sympy.expand(found - expression(expected)) == 0)


def _without_one(maximum: sympy.Expr) -> sympy.Expr:
    rest = [argument for argument in maximum.args if argument != 1]
    return Max(*rest)  # type: ignore[no-untyped-call]
