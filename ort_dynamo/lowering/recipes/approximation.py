"""Fits polynomials that stand in for functions ONNX has no operator for, when a graph first needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import mpmath
import onnx_ir as ir

from ort_dynamo.lowering.op_builder import OpBuilder

__all__ = ["fit", "polynomial"]

_DIGITS = 30


@functools.cache
def fit(function: Callable[[Any], Any], terms: int) -> tuple[float, ...]:
    """Fit the coefficients, highest power first, of a polynomial that approximates `function` on [-1, 1].

    It is the interpolant at the Chebyshev nodes, within a small factor of the best polynomial of its degree (Trefethen,
    "Approximation Theory and Approximation Practice", theorem 4.4).

    Args:
        function: a function of an mpmath number; it is not evaluated at -1 and 1.
        terms: the number of coefficients.
    """
    with mpmath.workdps(_DIGITS):
        angles = [mpmath.pi * (2 * k + 1) / (2 * terms) for k in range(terms)]
        values = [function(mpmath.cos(angle)) for angle in angles]
        series = [
            2 * mpmath.fsum(v * mpmath.cos(n * angle) for v, angle in zip(values, angles, strict=True)) / terms
            for n in range(terms)
        ]
        # Clenshaw's rule on polynomials, lowest power first: b(n) = 2 x b(n + 1) - b(n + 2) + c(n).
        after = later = [mpmath.mpf(0)] * terms
        for coefficient in reversed(series[1:]):
            after, later = [2 * a - b for a, b in zip([0, *after[:-1]], later, strict=True)], after
            after[0] += coefficient
        powers = [a - b for a, b in zip([0, *after[:-1]], later, strict=True)]
        powers[0] += series[0] / 2
        return tuple(float(power) for power in reversed(powers))


def polynomial(op: OpBuilder, x: ir.Value, coefficients: Iterable[float]) -> ir.Value:
    """Evaluate the polynomial of `x` with these coefficients, highest power first, by Horner's rule."""
    first, second, *rest = coefficients
    return functools.reduce(lambda p, c: op.Add(op.Mul(p, x), c), rest, op.Add(op.Mul(x, first), second))
