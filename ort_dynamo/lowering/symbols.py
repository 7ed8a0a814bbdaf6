"""Symbolic sizes inside a graph: a sympy expression over size symbols becomes an int64 or a float64 value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import sympy
import torch

from ort_dynamo.errors import UnsupportedNodeError
from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.sizes import sympy_functions
from ort_dynamo.torch_internals.sizes.symbols import expression, given_expression, known_true, product_of

__all__ = ["FoundSymbols", "Symbols", "broadcast", "factors", "known_dims", "same_size", "same_sizes", "symbols_of"]


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Check whether two sizes are the same polynomial of size symbols; others may be equal, too. Installs no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    first, second = expression(a), expression(b)
    return bool(first == second or sympy.expand(first - second) == 0)


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Check whether two shapes have the same sizes, by `same_size`."""
    return len(a) == len(b) and all(map(same_size, a, b))


def broadcast(*shapes: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, ...]:
    """Return the common shape of tensors that broadcast; of symbolic sizes that must be equal, the first. No guard."""
    rank = max(map(len, shapes))
    columns = zip(*((*(1,) * (rank - len(shape)), *shape) for shape in shapes), strict=True)
    return tuple(_broadcast_size([size for size in column if not known_true(size == 1)]) for column in columns)


def _broadcast_size(sizes: list[int | torch.SymInt]) -> int | torch.SymInt:
    """Return the common one of sizes that are not known to be 1."""
    fixed = [size for size in sizes if isinstance(size, int)]
    return (fixed or sizes or [1])[0]


def factors(size: int | torch.SymInt) -> list[int | torch.SymInt]:
    """Split `size` into the factors of its expression, an integer last; no product gives itself. Installs no guard."""
    if not isinstance(size, torch.SymInt):
        return [size]
    number, rest = expression(size).as_coeff_Mul()
    powers = [part.as_base_exp() for part in sympy.Mul.make_args(rest)]
    found = [base for base, times in powers if times.is_Integer for _ in range(int(times))]
    if sympy.Mul(number, *found) != expression(size) or not all(part.is_integer for part in (number, *found)):
        return [size]
    symbolic = product_of(size, found)
    return symbolic if number == 1 else [*symbolic, int(number)]


_OF_SIZES = (sympy.Add, sympy.Mul, sympy_functions.CleanDiv, sympy_functions.FloorDiv)
"""Expressions that slices and reshapes make of sizes, and that have an ONNX form."""

_FLOATS_OF_SIZES = (
    sympy.Add,
    sympy.Mul,
    sympy_functions.FloatTrueDiv,
    sympy_functions.IntTrueDiv,
    sympy_functions.ToFloat,
)
"""Those that are floats, such as the share of one row in a mean."""


class Symbols:
    """Knows, for each size expression that some graph input carries, how to read it.

    Values are 0-d; int64, or float64 for a float. Each expression is built once per graph.

    Args:
        builder: the builder of the graph.
        by_shapes: whether a number is read off the shapes of tensors, or computed from them, where a graph is given it
            as a number, too.
    """

    def __init__(self, builder: LoweringBuilder, *, by_shapes: bool = False) -> None:
        self._builder = builder
        self._by_shapes = by_shapes
        self._scalars: dict[sympy.Expr, ir.Value] = {}
        self._op = builder.op
        self._readers: dict[sympy.Expr, Callable[[], ir.Value]] = {}
        self._values: dict[sympy.Expr, ir.Value] = {}
        self._computed: dict[sympy.Expr, Callable[[], ir.Value]] = {}

    @property
    def is_needed(self) -> bool:
        """Check whether a size or a number of the graph is symbolic."""
        return bool(self._scalars or self._readers or self._computed)

    def offer_scalar(self, expr: sympy.Expr, value: ir.Value) -> None:
        """`value`, an int64 or float64 scalar input, is `expr`."""
        self._scalars.setdefault(expr, value)

    def offer_dim(self, expr: sympy.Expr, value: ir.Value, axis: int) -> None:
        """Dimension `axis` of the graph input `value` is `expr`."""
        self._readers.setdefault(expr, lambda: self._read_dim(value, axis))

    def offer_computed_dim(self, expr: sympy.Expr, value: ir.Value, axis: int) -> None:
        """Dimension `axis` of a value that the graph computes is `expr`; it is read where `expr` has no other form."""
        self._computed.setdefault(expr, lambda: self._read_dim(value, axis))

    def value(self, expr: sympy.Expr) -> ir.Value:
        """Return a 0-d value equal to `expr`.

        Raises:
            UnsupportedNodeError: a symbol that no input carries, or a function with no ONNX form here. No value has
                such a size either.
        """
        if expr not in self._values:
            try:
                self._values[expr] = self._build(expr)
            except UnsupportedNodeError:
                if expr not in self._computed:
                    raise
                self._values[expr] = self._computed[expr]()
        return self._values[expr]

    def _read_dim(self, value: ir.Value, axis: int) -> ir.Value:
        return self._op.Squeeze(self._op.Shape(value, start=axis, end=axis + 1), [0])

    def _build(self, expr: sympy.Expr) -> ir.Value:
        if expr in self._scalars and not (self._by_shapes and self._is_of_shapes(expr)):
            return self._scalars[expr]
        if expr in self._readers:
            return self._readers[expr]()
        op = self._op
        if expr.is_Integer:
            return self._builder.constant(int(expr), ir.DataType.INT64)
        args = expr.args
        match expr:
            case _ if not expr.is_integer:
                return self._build_float(expr)
            case sympy.Add():
                return functools.reduce(op.Add, map(self.value, args))
            case sympy.Mul() if all(a.is_integer for a in args):
                return functools.reduce(op.Mul, map(self.value, args))
            case sympy.Pow() if args[1].is_Integer and int(args[1]) > 0:
                return functools.reduce(op.Mul, [self.value(args[0])] * int(args[1]))
            case sympy.Max() | sympy_functions.Max():
                return op.Max(*map(self.value, args))
            case sympy.Min() | sympy_functions.Min():
                return op.Min(*map(self.value, args))
            case sympy_functions.FloorDiv() | sympy_functions.CleanDiv():
                return self._floor_div(*map(self.value, args))
            case sympy_functions.ModularIndexing():
                base, divisor, modulus = map(self.value, args)
                return op.Mod(self._floor_div(base, divisor), modulus)
            case sympy_functions.Mod() | sympy_functions.PythonMod() | sympy.Mod():
                return op.Mod(*map(self.value, args))
            case sympy_functions.CeilToInt():
                return op.Cast(op.Ceil(self._float(args[0])), to=ir.DataType.INT64)
            case sympy_functions.FloorToInt():
                return op.Cast(op.Floor(self._float(args[0])), to=ir.DataType.INT64)
            case sympy_functions.RoundToInt():
                return op.Cast(op.Round(self._float(args[0])), to=ir.DataType.INT64)
            case sympy_functions.TruncToInt():
                return op.Cast(self._float(args[0]), to=ir.DataType.INT64)
        raise _unknown(expr)

    def _is_of_shapes(self, expr: sympy.Expr) -> bool:
        """Check whether a number is a dimension of the graph's inputs, or a sum, product or quotient of such."""
        if expr in self._readers or expr.is_Number:
            return True
        made = _OF_SIZES if expr.is_integer else _FLOATS_OF_SIZES
        return isinstance(expr, made) and all(map(self._is_of_shapes, expr.args))

    def _build_float(self, expr: sympy.Expr) -> ir.Value:
        """Compute Python's float arithmetic on sizes, such as the divisor of a variance, in float64."""
        op = self._op
        match expr:
            case sympy.Number():
                return self._builder.constant(float(expr), ir.DataType.DOUBLE)
            case sympy_functions.ToFloat():
                return self._float(expr.args[0])
            case sympy.Add():
                return functools.reduce(op.Add, map(self._float, expr.args))
            case sympy.Mul():
                return functools.reduce(op.Mul, map(self._float, expr.args))
            case sympy.Pow() if expr.args[1] == -1:
                return op.Div(self._builder.constant(1.0, ir.DataType.DOUBLE), self._float(expr.args[0]))
            case sympy.Max() | sympy_functions.Max():
                return op.Max(*map(self._float, expr.args))
            case sympy.Min() | sympy_functions.Min():
                return op.Min(*map(self._float, expr.args))
            case sympy_functions.FloatTrueDiv() | sympy_functions.IntTrueDiv():
                return op.Div(*map(self._float, expr.args))
            case sympy.Pow() | sympy_functions.FloatPow():
                return op.Pow(*map(self._float, expr.args))
            case sympy_functions.OpaqueUnaryFn_sqrt():
                return op.Sqrt(self._float(expr.args[0]))
        raise _unknown(expr)

    def _float(self, expr: sympy.Expr) -> ir.Value:
        value = self.value(expr)
        return value if value.dtype == ir.DataType.DOUBLE else self._op.Cast(value, to=ir.DataType.DOUBLE)

    def _floor_div(self, dividend: ir.Value, divisor: ir.Value) -> ir.Value:
        # ONNX integer Div truncates. Mod has the divisor's sign, so dividend - Mod is an exact multiple.
        op = self._op
        return op.Div(op.Sub(dividend, op.Mod(dividend, divisor)), divisor)


def _unknown(expr: sympy.Expr) -> UnsupportedNodeError:
    return UnsupportedNodeError(f"the number {expr} cannot be computed from the graph's inputs")


def known_dims(fake: Any) -> list[tuple[int, sympy.Expr]]:
    """(axis, expression) for each symbolic dimension of a fake tensor."""
    return [(axis, given_expression(size)) for axis, size in enumerate(fake.shape) if isinstance(size, torch.SymInt)]


@dataclass(frozen=True)
class FoundSymbols:
    """Size symbols in a fake value.

    Attributes:
        free: every symbol in any of its sizes.
        rounded: every rounded float in any of its sizes.
        whole: those of both that are a size by themselves, so that the value carries them.
    """

    free: frozenset[sympy.Symbol]
    rounded: frozenset[sympy.Expr]
    whole: frozenset[sympy.Expr]


def symbols_of(fake: Any) -> FoundSymbols:
    """Return the size symbols of a fake value: a tensor, a scalar, or a tuple of them."""
    exprs: list[sympy.Expr] = []
    for leaf in tree_leaves(fake):
        sizes = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
        exprs.extend(given_expression(size) for size in sizes if isinstance(size, torch.SymInt))
    free = frozenset(symbol for expr in exprs for symbol in expr.free_symbols)
    rounded = frozenset(part for expr in exprs for part in expr.atoms(*sympy_functions.ROUNDED))
    return FoundSymbols(free, rounded, (free | rounded).intersection(exprs))
