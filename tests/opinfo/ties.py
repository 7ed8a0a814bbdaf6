"""Comparison of results that allows other choices among equal elements.

torch promises no choice among equal elements for unstable sorts, topk, kthvalue, mode and medians along a dimension.
Eager's choice depends on its algorithm (a vectorized or introspective sort, a partial sort, a quickselect), ours on
TopK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput

from ort_dynamo.testing import Tolerance, assert_close

__all__ = ["assert_equal_but_for_ties", "has_free_ties"]

_DIMENSION = {"sort": 0, "argsort": 0, "topk": 1, "kthvalue": 1, "median": 0, "nanmedian": 0, "mode": 0}
"""Operator -> where its arguments have the dimension. msort has none: it sorts along the first."""

_POSITIONS = {"argsort": "output 0", "msort": None}
"""Operator -> index of the output that holds indices; for other operators it is the second."""


def has_free_ties(name: str, sample: SampleInput) -> bool:
    """Check whether torch leaves the order of equal elements open in this call."""
    along_a_dimension = name not in ("median", "nanmedian") or sample.args or "dim" in sample.kwargs
    return (name in _DIMENSION and bool(along_a_dimension) and not sample.kwargs.get("stable")) or name == "msort"


def assert_equal_but_for_ties(
    name: str,
    sample: SampleInput,
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    tolerance: Tolerance | None,
) -> None:
    """Compare the observations of a call that `has_free_ties`; indices are compared by the values that they select.

    Everything else must be equal: values, dtypes, shapes. Indices must be valid and unique, and select the same values
    as eager's. A gradient must have the same entries at our indices as eager's at its own. Among elements of equal
    value it must have the same entries as eager's, in any order.

    Raises:
        AssertionError: with the difference.
    """
    assert actual.keys() == expected.keys(), f"{sorted(actual)} is not {sorted(expected)}"
    x = sample.input.detach()
    positions, gradient = _POSITIONS.get(name, "output 1"), "gradient of argument 0"
    for what, value in expected.items():
        if what not in (positions, gradient):
            assert_close(actual[what], value, what, tolerance, strides=False)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = _dimension(name, sample, x)
    if positions is not None:
        ours, theirs = (_along(seen[positions], x, dim) for seen in (actual, expected))
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{positions} has another type"
        assert bool(((ours >= 0) & (ours < x.shape[dim])).all()), f"{positions} are no places of the input"
        in_order = ours.sort(dim).values
        assert not bool((in_order.diff(dim=dim) == 0).any()), f"{positions} has a place twice"
        assert_close(x.gather(dim, ours), x.gather(dim, theirs), f"what {positions} select", Tolerance(0, 0), False)
    if gradient in expected:
        mine, eagers = (_along(seen[gradient], x, dim) for seen in (actual, expected))
        if positions is not None:
            assert_close(mine.gather(dim, ours), eagers.gather(dim, theirs), f"{gradient} at {positions}", tolerance)
        assert_close(_by_value(x, mine, dim), _by_value(x, eagers, dim), f"{gradient} by value", tolerance)


def _dimension(name: str, sample: SampleInput, x: torch.Tensor) -> int:
    if name == "msort":
        return 0
    place = _DIMENSION[name]
    dim = sample.args[place] if len(sample.args) > place else sample.kwargs.get("dim", -1)
    return int(dim) % x.dim()


def _along(value: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """`value` with as many dimensions as `x`, where the operator dropped `dim`."""
    return value.detach() if value.dim() == x.dim() else value.detach().unsqueeze(dim)


def _by_value(x: torch.Tensor, gradient: torch.Tensor, dim: int) -> torch.Tensor:
    """`gradient` along `dim` in the order of the elements of `x`, and among equal ones in its own order."""
    first = gradient.argsort(dim=dim, stable=True)
    second = x.gather(dim, first).argsort(dim=dim, stable=True)
    return gradient.gather(dim, first.gather(dim, second))
