"""The numbers of one tensor."""

from __future__ import annotations

import math

import pytest
import torch

from ort_dynamo.statistics import summarize as module
from ort_dynamo.statistics.summarize import Numbers, count_abnormal, summarize


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_statistics_are_those_of_the_elements_in_float64(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    tensor = (torch.randn(5, 8) * 3 + 100).to(dtype).t()
    wide = tensor.double()
    found = summarize(tensor)
    assert (found.min, found.max, found.nan, found.inf) == (wide.min(), wide.max(), 0, 0)
    assert found.mean == pytest.approx(wide.mean().item(), rel=1e-14)
    assert found.std == pytest.approx(wide.std(correction=0).item(), rel=1e-12)


def test_elements_that_are_not_finite_are_counted_and_left_out() -> None:
    tensor = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, math.nan])
    assert summarize(tensor) == Numbers(1.0, 3.0, 2.0, 1.0, nan=2, inf=2)


def test_nothing_finite_has_no_statistics() -> None:
    assert summarize(torch.tensor([math.nan, math.inf])) == Numbers(None, None, None, None, nan=1, inf=1)
    assert summarize(torch.ones(0, 3)) == Numbers(None, None, None, None, nan=0, inf=0)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([True, False, True, True]), Numbers(0.0, 1.0, 0.75, math.sqrt(3) / 4, 0, 0)),
        (torch.tensor([-2, 4], dtype=torch.int8), Numbers(-2.0, 4.0, 1.0, 3.0, 0, 0)),
        (torch.tensor([3 + 4j, 0j]), Numbers(0.0, 5.0, 2.5, 2.5, 0, 0)),
        (torch.tensor([complex(math.nan, 1), complex(math.inf, 0), 1j]), Numbers(1.0, 1.0, 1.0, 0.0, 1, 1)),
        (torch.tensor(7.0), Numbers(7.0, 7.0, 7.0, 0.0, 0, 0)),
        (torch.tensor([0.1] * 3, dtype=torch.float64), Numbers(0.1, 0.1, 0.1, 0.0, 0, 0)),
    ],
)
def test_other_dtypes_and_single_elements(tensor: torch.Tensor, expected: Numbers) -> None:
    assert summarize(tensor) == pytest.approx(expected, rel=1e-15)
    assert count_abnormal(tensor) == Numbers(None, None, None, None, expected.nan, expected.inf)


def test_no_large_element_overflows() -> None:
    found = summarize(torch.tensor([1.5e308, -1.5e308, 1.5e308, -1.5e308], dtype=torch.float64))
    assert found == Numbers(-1.5e308, 1.5e308, 0.0, 1.5e308, 0, 0)
