"""Symbolic sizes: torch's facts about them, asked without installing a guard.

torch represents a size that is not fixed as a `torch.SymInt`, whose private `node` holds a sympy expression over size
symbols and the ShapeEnv that knows their ranges, the guards and the example's values ("hints"). All tested versions,
2.11 to 2.15, have it so. Answers that depend on more than the expression itself are asked through `size_guards.ask`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, has_static_value
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ort_dynamo.torch_internals.sizes.size_guards import ask

__all__ = [
    "DataDependentSizeError",
    "assumptions",
    "by_number",
    "expression",
    "given_expression",
    "has_hint_of_one",
    "has_static_value",  # Dynamo knows this function, and answers it while it traces
    "has_symbolic_sizes",
    "hints",
    "is_empty",
    "is_nonnegative",
    "is_unbacked",
    "kind",
    "known_equal",
    "known_true",
    "optimization_hint",
    "product_of",
]

_Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_GUESS = 8192  # torch's own for a size that depends on data

DataDependentSizeError = GuardOnDataDependentSymNode
"""Raised where a program, or a lowering, asks for the value of a size that only the data decides. In all versions."""


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Check whether torch holds sizes or strides of a fake tensor as symbols, be it wrapped by functionalization.

    It does so, too, where guards have since made all of them known, and `tensor.shape` gives integers.
    """
    if isinstance(tensor, FunctionalTensor):  # has been told the integers
        tensor = torch._from_functional_tensor(tensor.elem)
    return bool(tensor._has_symbolic_sizes_strides)


def given_expression(number: Any) -> sympy.Expr:
    """Return the sympy expression of a scalar out of a graph's fake values, which the graph's key spells.

    A scalar that is not symbolic becomes a sympy number. `node.expr` in all versions: the expression, with those
    equalities applied that are known by then.
    """
    return number.node.expr if isinstance(number, _SYMBOLIC) else sympy.sympify(number)


def expression(number: int | _Symbolic) -> sympy.Expr:
    """Return the same of a scalar that may have been computed, in ways that depend on facts about the sizes in it.

    (`a % b` on SymInts is one function where both are known to be nonnegative, and another where they are not.)
    """
    expr = given_expression(number)
    if isinstance(number, _SYMBOLIC):
        ask("the expression", (expr,), lambda: None)
    return expr


def known_true(condition: bool | torch.SymBool) -> bool:
    """Check whether a condition on sizes holds for all sizes that the guards allow; False if that is unknown.

    It is `statically_known_true` in all versions.
    """
    if isinstance(condition, bool):
        return condition
    answer = partial(symbolic_shapes.statically_known_true, condition)
    return ask("known to be true", (given_expression(condition),), lambda: bool(answer()))


def known_equal(first: Sequence[int | torch.SymInt], second: Sequence[int | torch.SymInt]) -> bool:
    """Check whether two shapes, or the strides of two tensors, are known to be equal."""
    return len(first) == len(second) and all(known_true(one == other) for one, other in zip(first, second, strict=True))


def is_nonnegative(size: int | torch.SymInt) -> bool:
    """Check whether a size is nonnegative by torch's assumptions on its symbols; dimensions are positive."""
    if isinstance(size, int):
        return size >= 0
    expr = given_expression(size)
    return ask("nonnegative", (expr,), lambda: bool(expr.is_nonnegative))


def is_empty(sizes: Iterable[int | torch.SymInt]) -> bool:
    """Check whether a tensor of `sizes` is known to have no elements; installs no guard."""
    return any(isinstance(size, int) and size == 0 for size in sizes)


def is_unbacked(*sizes: int | torch.SymInt) -> bool:
    """Check whether one of `sizes` depends on data: it has a symbol of another kind, and no hint.

    `has_free_unbacked_symbols` in all versions.
    """
    exprs = tuple(given_expression(size) for size in sizes if isinstance(size, torch.SymInt))
    if not exprs:
        return False
    return ask("depends on data", exprs, lambda: any(map(symbolic_shapes.has_free_unbacked_symbols, exprs)))


def has_hint_of_one(size: int | torch.SymInt) -> bool:
    """Check whether a size is 1 in the example: for one that torch has looked at, so that a guard holds it."""
    if isinstance(size, int):
        return size == 1
    return ask("1 in the example", (given_expression(size),), lambda: hints([size]) == [1])


def hints(sizes: Iterable[int | torch.SymInt]) -> list[int | None]:
    """Return the sizes' values in the example, None for one that depends on data.

    Not recorded: ask for decisions that depend on them through `size_guards.ask`, so that the decision enters the key
    and not the values. `node.hint` and `node.has_hint` in all versions.
    """
    return [_hint(size) if isinstance(size, torch.SymInt) else size for size in sizes]


def _hint(size: torch.SymInt) -> int | None:
    hint: int | None = size.node.hint if size.node.has_hint() else None
    return hint


def optimization_hint(size: int | torch.SymInt) -> int:
    """Return a size's value in the example, or a guess for one that depends on data; for estimates.

    It is `optimization_hint`, or in 2.11 `size_hint`, which raises without a guess.
    """
    found = getattr(symbolic_shapes, "optimization_hint", None)
    return int(vars(symbolic_shapes)["size_hint"](size, _GUESS) if found is None else found(size))


def product_of(size: torch.SymInt, exprs: Iterable[sympy.Expr]) -> list[int | torch.SymInt]:
    """Sizes with the expressions `exprs`, in the ShapeEnv of `size`: `create_symintnode` in all versions."""
    environment = size.node.shape_env
    return [environment.create_symintnode(expr, hint=None) for expr in exprs]


def kind(symbol: sympy.Symbol) -> str:
    """Give the kind of a size symbol: "SIZE", "FLOAT", "UNBACKED_INT" ….

    torch tells them apart by the first letters of their names, in all versions.
    """
    return "/".join(one.name for one in SymT if symbol_is_type(symbol, one))


def assumptions(symbol: sympy.Symbol) -> dict[str, bool]:
    """Give sympy's assumptions about a symbol, for simplification: {"integer": True, "positive": True, …}."""
    return dict(sorted(symbol.assumptions0.items()))


def by_number(symbol: sympy.Symbol) -> tuple[Any, ...]:
    """Return a key to sort symbols by, in the order of their numbers: s9 comes before s10, as s10 does before s11."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", symbol.name))
