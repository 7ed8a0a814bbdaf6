"""Rows of nothing but an infinity, with kernels that give a finite number for their extreme, as CUDA's do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.targets.target import Target

LARGEST = torch.finfo(torch.float32).max
ROWS = torch.tensor(
    [[-math.inf] * 3, [math.inf] * 3, [1.0, -math.inf, 2.0], [1.0, math.inf, 2.0], [math.nan, -math.inf, -math.inf]]
)


@pytest.fixture(autouse=True)
def finite_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound each extreme of floating-point numbers as a kernel does that begins with the largest finite number."""
    has_defect, operator = Target.has_defect, OpBuilder.__getattr__

    def bounded(self: OpBuilder, op_type: str) -> Callable[..., Any]:
        call = operator(self, op_type)
        if op_type not in ("ReduceMax", "ReduceMin"):
            return call

        def reduce(value: Any, *inputs: Any, **attributes: Any) -> Any:
            found = call(value, *inputs, **attributes)
            if not value.dtype.is_floating_point():
                return found
            return (
                operator(self, "Max")(found, -LARGEST)
                if op_type == "ReduceMax"
                else operator(self, "Min")(found, LARGEST)
            )

        return reduce

    monkeypatch.setattr(
        Target, "has_defect", lambda self, name: name == "extremes_of_infinity" or has_defect(self, name)
    )
    monkeypatch.setattr(OpBuilder, "__getattr__", bounded)
    CACHE.clear()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax(1),
        lambda x: x.amin((0, 1)),
        lambda x: x.amax(1, keepdim=True),
        lambda x: x.max(),
        lambda x: x.max(1).values,
        lambda x: x.logsumexp(1),
        lambda x: torch.softmax(x[2:3], 1),
        lambda x: torch.ops.aten._safe_softmax(x, 1),
        lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    ],
)
def test_an_infinite_extreme_is_as_in_eager(function: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(function, backend="ort_train", options={"placement": "onnxruntime", "fallback": "error"})
    torch.testing.assert_close(compiled(ROWS), function(ROWS), equal_nan=True)


def test_the_extreme_itself_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "has_defect", lambda *_: False)
    compiled = torch.compile(lambda x: x.amax(1), backend="ort_train", options={"placement": "onnxruntime"})
    assert compiled(ROWS)[0] == -LARGEST
