"""Polynomials that stand in for functions ONNX has no operator for, fitted when a graph first needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import mpmath
import onnx_ir as ir
from onnxscript import OpBuilder

__all__ = ["fit", "polynomial"]

_DIGITS = 40


@functools.cache
def fit(function: Callable[[Any], Any], terms: int) -> tuple[float, ...]:
    """Coefficients, highest power first, of a polynomial that is near `function` on [-1, 1].

    The interpolant at the Chebyshev nodes, within a small factor of the best polynomial of its degree (Trefethen,
    "Approximation Theory and Approximation Practice", theorem 4.4).

    Args:
        function: takes and gives an mpmath number.
        terms: how many coefficients.
    """
    with mpmath.workdps(_DIGITS):
        return tuple(float(c) for c in mpmath.chebyfit(function, [-1, 1], terms))


def polynomial(op: OpBuilder, x: ir.Value, coefficients: Iterable[float]) -> ir.Value:
    """The polynomial of `x` with these coefficients, highest power first, by Horner's rule."""
    first, second, *rest = coefficients
    return functools.reduce(lambda p, c: op.Add(op.Mul(p, x), c), rest, op.Add(op.Mul(x, first), second))
