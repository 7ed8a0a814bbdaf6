"""A torch kernel that gives another dtype than its fake tensor: inputs of sessions are cast."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ort_dynamo.cache import open_island as islands
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.errors import ExecutionError
from ort_dynamo.runtime import compiled_graph
from ort_dynamo.runtime.compiled_graph import CompiledGraph

PROMISED: dict[str, torch.dtype] = {}


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """Define operators that have no lowering, and whose fake tensors have the dtype in PROMISED."""
    with torch.library._scoped_library("other_dtypes", "DEF") as library:
        library.define("kernel(Tensor x) -> Tensor")
        library.impl("kernel", lambda x: x.sin().half(), "CPU")
        library.impl("kernel", lambda x: torch.empty_like(x, dtype=PROMISED["dtype"]), "Meta")
        yield


def function(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.ops.other_dtypes.kernel(x)
    return (made.t() * 2 + 1).cos(), (x + 1).exp()


def expected(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.sin().half().to(dtype).t() * 2 + 1).cos()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_cast_where_it_enters(dtype: torch.dtype, dynamic: bool) -> None:
    PROMISED["dtype"] = dtype
    step = torch.compile(function, backend="ort_train", dynamic=dynamic)
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4)
        ours, beside = step(x)
        torch.testing.assert_close(ours, expected(x, dtype))
        torch.testing.assert_close(beside, (x + 1).exp())
    assert counters["ort_train"]["native_nodes"] > 0


def test_transposed_memory_is_cast_as_it_lies() -> None:
    PROMISED["dtype"] = torch.float32
    x = torch.randn(4, 3).t()
    ours, _ = torch.compile(function, backend="ort_train")(x)
    torch.testing.assert_close(ours, expected(x, torch.float32))


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        made = torch.ops.other_dtypes.kernel(x)
        ctx.save_for_backward(made)
        return x * 3

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (made,) = ctx.saved_tensors
        return grad * made.cos()


def test_a_saved_tensor_is_cast_in_the_backward() -> None:
    PROMISED["dtype"] = torch.float32
    x = torch.randn(3, 4, requires_grad=True)
    step = torch.compile(lambda x: Saved.apply(x).sin(), backend="ort_train", fullgraph=True)  # type: ignore[no-untyped-call]
    for _ in range(2):
        (found,) = torch.autograd.grad(step(x).sum(), x)
        torch.testing.assert_close(found, (3 * x).cos() * x.sin().half().float().cos())


def test_another_failure_stays_one() -> None:
    step = torch.compile(lambda table, index: table[index].sin(), backend="ort_train")
    step(torch.randn(4), torch.tensor([1]))
    with pytest.raises(ExecutionError):
        step(torch.randn(4), torch.tensor([4]))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[CompiledGraph]:
    """The graphs that a test opens."""
    found: list[CompiledGraph] = []

    def open_graph(*given: Any, **named: Any) -> CompiledGraph:
        found.append(compiled_graph.open_graph(*given, **named))
        return found[-1]

    CACHE.clear()
    monkeypatch.setattr(islands, "open_graph", open_graph)
    return found


def test_a_call_whose_dtypes_agree_asks_nothing(opened: list[CompiledGraph]) -> None:
    torch.compile(lambda x: x.sin() + 1, backend="ort_train")(torch.randn(3))
    source = inspect.getsource(opened[0].run)
    asked = source.index("cast_to")
    assert source.index("except Exception") < asked
    assert "dtype" not in source[:asked]


def test_the_function_does_not_hold_itself(opened: list[CompiledGraph]) -> None:
    torch.compile(lambda x: x.sin() + 1, backend="ort_train")(torch.randn(3))
    run = weakref.ref(opened.pop().run)
    torch._dynamo.reset()
    CACHE.clear()
    gc.collect()
    assert run() is None
