"""Compares values of a run with eager's, and takes float64 as the referee where eager itself is inexact."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ort_dynamo.testing import TOLERANCES, Tolerance, assert_close

__all__ = ["FACTOR_OF_ONE", "Difference", "difference", "differences", "excess", "first_problem", "largest"]

_FACTOR = 4.0
"""A value of a step may have this many times eager's own error."""

FACTOR_OF_ONE = 16.0
"""The same of one operator's result, in which eager's error may be small by chance."""

_CANCELLED = 1e-4
"""A result below this part of the absolute tolerance for its largest input is rounding."""

_OTHERS = 0.01
"""The part of integers and truth values that may differ, as where rounding decides a comparison."""


@dataclass(frozen=True)
class Difference:
    """A value of the step that is not eager's.

    Attributes:
        name: the value, such as "gradient of parameter layers.0.weight".
        problem: how it differs.
    """

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


def differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], truth: Callable[[], Mapping[str, Any]]
) -> tuple[Difference, ...]:
    """List the values of a step that differ from eager's by more than rounding.

    Args:
        found: name -> value.
        expected: the same of eager. Both have the same names, or the step itself is another.
        truth: gives the values in float64, if a value is not eager's; called at most once.
    """
    kinds = {_kind(name) for name in expected}
    scale = {kind: largest(one for name, one in expected.items() if _kind(name) == kind) for kind in kinds}
    exact: dict[str, Mapping[str, Any]] = {}

    def wide(name: str) -> Any:
        if not exact:
            exact["values"] = truth()
        return exact["values"].get(name)

    def noise(kind: str) -> float:
        errors = [
            _error(one, wide(name))
            for name, one in expected.items()
            if _kind(name) == kind and _is_inexact(one) and isinstance(wide(name), torch.Tensor)
        ]
        return statistics.median(errors) if errors else 0.0

    listed = []
    for name in dict.fromkeys([*expected, *found]):
        if name.startswith("gradient") and expected.get(name) is None and _is_no_gradient(found.get(name)):
            continue
        if name not in found or name not in expected:
            problem = "eager has it, and ort_train does not" if name in expected else "eager has no such value"
        else:
            strides = not name.startswith("gradient")  # a cotangent has the strides of its output, unlike eager's
            problem = difference(
                found[name],
                expected[name],
                partial(wide, name),
                scale[_kind(name)],
                strides=strides,
                noise=partial(noise, _kind(name)),
            )
        if problem:
            listed.append(Difference(name, problem))
    return tuple(listed)


def _is_no_gradient(value: Any) -> bool:
    """Check for the gradient of an unused leaf: AOTAutograd gives zeros where eager gives None."""
    return value is None or not bool(_dense(value).any())


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def largest(values: Iterable[Any]) -> float:
    """Return the largest finite number of some tensors, but at most 1: numbers far below it are rounding."""
    return min(1.0, max((_magnitude(one) for one in values if _is_inexact(one)), default=1.0))


def first_problem(
    found: Sequence[Any],
    expected: Sequence[Any],
    exact: Callable[[], Sequence[Any]],
    *,
    scale: float | None = None,
    inputs: Iterable[Any] = (),
) -> str:
    """Say how the first of several results that differs from torch's does; nothing where all agree.

    Args:
        found: the results, which may have other dtypes than torch's.
        expected: torch's.
        exact: gives them in float64.
        scale: as of `difference`; None goes by each result and by the inputs that it was computed from.
        inputs: these inputs.
    """
    for index, (ours, eager) in enumerate(zip(found, expected, strict=True)):
        if ours is None or not isinstance(eager, torch.Tensor):
            continue
        own = max(largest([eager]), _CANCELLED * largest(inputs)) if scale is None else scale
        truth = partial(_item, exact, index)
        if problem := difference(ours.to(eager.dtype), eager, truth, own, factor=FACTOR_OF_ONE):
            return f"result {index} {problem}" if len(expected) > 1 else problem
    return ""


def excess(found: Any, expected: Any, exact: Any) -> tuple[float, str]:
    """Say how many times torch's error the error of a result is, by number and in words; 0 where float64 is unknown.

    Torch's error counts as one rounding at least.
    """
    if found is None or not _is_inexact(expected) or not isinstance(exact, torch.Tensor):
        return 0.0, ""
    own, other = _error(found, exact), _error(expected, exact)
    rounding = torch.finfo(expected.dtype).eps * _magnitude(exact)
    problem = (
        f"its error against float64 is {own:.2g}, torch's {other:.2g}: no operator's is larger, relative to torch's"
    )
    return own / max(other, rounding, 1e-300), problem


def _item(values: Callable[[], Sequence[Any]], index: int) -> Any:
    return values()[index]


def difference(
    found: Any,
    expected: Any,
    truth: Callable[[], Any],
    scale: float = 1.0,
    *,
    strides: bool = False,
    factor: float = _FACTOR,
    noise: Callable[[], float] = lambda: 0.0,
) -> str:
    """Say how a value differs from eager's; nothing where it agrees, or where eager's is as inexact.

    Args:
        found: the value.
        expected: eager's.
        truth: gives it in float64; None where it is not known.
        scale: the absolute tolerance, in units of the table's.
        strides: whether they count.
        factor: how many times eager's own error it may have.
        noise: gives eager's usual error in such values, which its error in this one may be far below by chance.
    """
    limit = TOLERANCES.get(getattr(expected, "dtype", torch.float32), TOLERANCES[torch.float32])
    limit = Tolerance(limit.relative, limit.absolute * scale)
    if isinstance(found, float) and isinstance(expected, float):  # as item() reads them, rounded as their tensors are
        found, expected, truth = _wide(found), _wide(expected), partial(_called, truth)
    try:
        assert_close(found, expected, "it", limit, strides=strides)
    except AssertionError as error:
        problem = str(error).removeprefix("it ").removeprefix("it: ")
    else:
        return ""
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return problem
    try:
        assert_close(torch.zeros_like(found), torch.zeros_like(expected), "it", strides=strides)
    except AssertionError:
        return problem  # dtype, shape, device or strides
    if not _is_inexact(expected):
        part = (found != expected).double().mean().item()
        return problem if part > _OTHERS else ""
    exact = truth()
    if not isinstance(exact, torch.Tensor) or exact.shape != expected.shape or expected.layout is not torch.strided:
        return problem
    said = _refereed(found, expected, exact, limit, factor, problem)
    if not said or not (usual := noise()):
        return said
    return _refereed(
        found, expected, exact, Tolerance(limit.relative, limit.absolute + factor * usual), factor, problem
    )


def _wide(number: Any) -> Any:
    return torch.tensor(number, dtype=torch.float64) if isinstance(number, float) else number


def _called(truth: Callable[[], Any]) -> Any:
    return _wide(truth())


def _refereed(
    found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, limit: Tolerance, factor: float, problem: str
) -> str:
    kind = torch.complex128 if exact.is_complex() else torch.float64
    ours, eager, exact = (one.detach().to(kind) for one in (found, expected, exact))
    finite = torch.isfinite(exact) & torch.isfinite(eager)
    same = (ours == eager) | (ours == exact) | (ours.isnan() & (eager.isnan() | exact.isnan()))
    if not bool(same[~finite].all()):
        return problem
    if not bool(finite.any()):
        return ""
    own = (ours - exact)[finite].abs().nan_to_num(nan=float("inf")).max().item()
    other = (eager - exact)[finite].abs().max().item()
    most = exact[finite].abs().max().item()
    if own <= factor * other + limit.relative * most + limit.absolute:
        return ""
    return f"{problem}; its error against float64 is {own:.2g}, eager's {other:.2g}"


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error of a tensor against float64, where both are finite."""
    if value.layout is not torch.strided or value.shape != exact.shape:
        return 0.0
    apart = (value.detach().to(exact.dtype) - exact).abs()
    finite = apart[torch.isfinite(apart)]
    return finite.max().item() if finite.numel() else 0.0


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _magnitude(value: torch.Tensor) -> float:
    dense = _dense(value)
    finite = dense[torch.isfinite(dense)].abs()
    return finite.max().item() if finite.numel() else 0.0


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value.detach() if value.layout is torch.strided else value.detach().to_dense()
