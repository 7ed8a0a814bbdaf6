"""One sample of PyTorch's operator database: run in eager and under ort_train, and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from ties import assert_equal_but_for_ties, has_free_ties
from torch._dynamo.utils import counters
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_map

from ort_dynamo.testing import Tolerance, assert_close, observe

__all__ = ["DTYPES", "Verdict", "check_sample", "operators", "samples_of"]

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
        *("complex64", "complex128"),
    )
}

UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operators whose result is uninitialized memory."""

FAKE_STRIDES = {"nn.functional.max_unpool2d", "nn.functional.max_unpool2d.grad"}
"""Operators whose kernel gives other strides than torch's fake tensors promise; compiled code keeps the promise."""

TOLERANCES = {
    # A gradient formula's sum of cancelling terms, or a product of many factors, loses more than one operator does.
    torch.float32: Tolerance(1e-4, 1e-5),
    torch.float64: Tolerance(1e-9, 1e-11),
    torch.float16: Tolerance(1e-2, 2e-3),
    torch.bfloat16: Tolerance(5e-2, 1e-2),
}
"""The sweep's one table: by the dtype swept, relative to each tensor's largest entry."""


def _call_unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# The database seeds the generator around each random operator, where Dynamo breaks the graph, and the operator would
# never reach the backend. `observe` seeds it before.
common_methods_invocations.wrapper_set_seed = _call_unseeded


@dataclass
class Verdict:
    """The verdict on one sample.

    Attributes:
        kind: "same"; "other ties" if only the order of equal elements differs, which torch leaves open (ties.py);
            "more exact" if the result differs, but is at least as close to eager's in float64 as eager's own is;
            "different" or "failed", both while aot_eager agrees with eager; "not comparable" if eager or aot_eager
            fails too; "not compiled" if the result is eager's because nothing reached the backend.
        detail: the difference, or the error.
        native: overload -> nodes in ONNX Runtime.
        eager: "<overload>: <reason>" -> nodes in eager.
    """

    kind: str
    detail: str = ""
    native: dict[str, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)


@cache
def operators() -> dict[str, OpInfo]:
    """Full name (with the variant) -> operator."""
    return {op.full_name: op for op in op_db}


def samples_of(
    op: OpInfo, dtype: torch.dtype, limit: int | None, seed: int = 0, device: str = "cpu"
) -> list[SampleInput]:
    """Give the operator's samples for `dtype`, at most `limit` of them, evenly spread; none if it lacks the dtype.

    Args:
        seed: the seed of their values.
        device: the device of their tensors.
    """
    kind = torch.device(device).type
    if dtype not in op.supported_dtypes(kind):
        return []
    requires_grad = op.supports_autograd and dtype in op.supported_backward_dtypes(kind)
    torch.manual_seed(seed)
    with quiet():
        samples = list(op.sample_inputs(device, dtype, requires_grad=requires_grad))
    if limit is None or len(samples) <= limit:
        return samples
    return [samples[round(i * (len(samples) - 1) / max(limit - 1, 1))] for i in range(limit)]


def check_sample(op: OpInfo, sample: SampleInput, dtype: torch.dtype, *, dynamic: bool, in_place: bool) -> Verdict:
    """Run one sample, forward and with random cotangents backward, in eager and under ort_train.

    Args:
        dynamic: compile with symbolic sizes.
        in_place: the operator's in-place variant, on a copy of the input.
    """
    function = _call_in_place(op) if in_place else _call(op)
    arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
    with quiet():
        try:
            expected = observe(function, arguments, seed=0)
        except Exception as error:
            return Verdict("not comparable", f"eager raises {_short(error)}")
        counters.clear()
        actual = None
        try:
            actual = _compiled(function, arguments, "ort_train", dynamic)
            _compare(op, dtype, actual, expected)
        except Exception as error:
            kind = "different" if isinstance(error, AssertionError) else "failed"
            native, eager = _nodes()
            if kind == "different" and actual is not None and has_free_ties(op.name, sample):
                try:
                    assert_equal_but_for_ties(op.name, sample, actual, expected, TOLERANCES.get(dtype))
                    return Verdict("other ties", _short(error), native, eager)
                except AssertionError as other:
                    return Verdict(kind, _short(other), native, eager)
            if (
                kind == "different"
                and actual is not None
                and _is_more_exact(function, arguments, dtype, actual, expected)
            ):
                return Verdict("more exact", _short(error), native, eager)
            try:
                _compare(op, dtype, _compiled(function, arguments, "aot_eager", dynamic), expected)
            except Exception as other:
                return Verdict("not comparable", f"aot_eager: {_short(other)}", native, eager)
            return Verdict(kind, _short(error), native, eager)
        if not counters["ort_train"]["graphs"]:
            return Verdict("not compiled", "Dynamo gives no graph")
        return Verdict("same", "", *_nodes())


def _call(op: OpInfo) -> Callable[..., Any]:
    function = op.op

    def call(value: Any, args: Any, kwargs: Any) -> Any:
        return function(value, *args, **kwargs)

    return call


def _call_in_place(op: OpInfo) -> Callable[..., Any]:
    function = op.get_inplace()

    def call(value: Any, args: Any, kwargs: Any) -> Any:
        return function(value.clone(), *args, **kwargs)

    return call


def _compiled(function: Callable[..., Any], arguments: Any, backend: str, dynamic: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    return observe(compiled, arguments, seed=0)


def _compare(op: OpInfo, dtype: torch.dtype, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys(), f"{sorted(actual)} is not {sorted(expected)}"
    compares_strides = op.full_name not in FAKE_STRIDES
    for what, value in expected.items():
        mine = actual[what]
        if op.name in UNDEFINED and isinstance(value, torch.Tensor):
            mine, value = torch.zeros_like(mine), torch.zeros_like(value)
        # AOTAutograd lays a cotangent out like its output, eager does not: strides of gradients follow them.
        assert_close(mine, value, what, TOLERANCES.get(dtype), strides=compares_strides and what.startswith("output"))


def _is_more_exact(
    function: Callable[..., Any],
    arguments: Any,
    dtype: torch.dtype,
    actual: dict[str, Any],
    expected: dict[str, Any],
) -> bool:
    """Check whether each of our tensors is as close to eager's float64 result as eager's own is.

    If the exact gradient is zero, eager's is rounding noise that nothing else can equal.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False

    def widened(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != dtype:
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    try:
        exact = observe(function, tree_map(widened, arguments), seed=0)
    except Exception:
        return False  # no float64 form: then nothing speaks for us
    return actual.keys() == exact.keys() == expected.keys() and all(
        _is_as_near(actual[what], value, exact[what]) for what, value in expected.items()
    )


def _is_as_near(actual: Any, expected: Any, exact: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
        return actual is expected if expected is None else bool((actual == expected).all())
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return _distance(actual, exact) <= _distance(expected, exact)


def _distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    difference = torch.where(value.double() == exact, 0.0, (value.double() - exact).abs())
    difference = torch.where(value.isnan() & exact.isnan(), 0.0, difference)
    return float(difference.max()) if not bool(difference.isnan().any()) else float("inf")


def _nodes() -> tuple[dict[str, int], dict[str, int]]:
    return dict(counters["ort_train_native"]), dict(counters["ort_train_eager"])


def _short(error: Exception) -> str:
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return " | ".join(lines)[:600]


@contextmanager
def quiet() -> Iterator[None]:
    """Samples warn about their own operators: deprecated functions, sparse layouts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
