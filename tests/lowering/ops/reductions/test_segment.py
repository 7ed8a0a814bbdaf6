"""Reductions of consecutive segments."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

REDUCTIONS = ["sum", "mean", "max", "min", "prod"]
LENGTHS = torch.tensor([3, 0, 3, 2, 2])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("initial", [None, 2.0])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segments_equal_eager(reduce, initial, dynamic):
    def function(x, lengths, offsets):
        how = {} if initial is None else {"initial": initial}
        first = torch.segment_reduce(x, reduce, lengths=lengths, **how)
        return first, torch.segment_reduce(x * 2, reduce, offsets=offsets, **how)

    # Equal extremes, zeros and a nan, in rows of three.
    column = torch.tensor([1.0, 3.0, 3.0, -1.0, 0.0, 2.0, math.nan, 4.0, 0.0, 0.0])
    x = torch.stack([column, torch.randn(10), torch.randn(10).round()], dim=1).requires_grad_()
    assert_like_eager(function, x, LENGTHS, torch.tensor([0, 2, 2, 7, 10]), dynamic=dynamic)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segments_along_another_axis_equal_eager(reduce):
    def function(x, lengths, offsets):
        first = torch.segment_reduce(x, reduce, lengths=lengths, axis=1)
        return first, torch.segment_reduce(x[:, :, 0], reduce, offsets=offsets, axis=1)

    lengths, offsets = torch.tensor([[1, 4, 1], [0, 6, 0]]), torch.tensor([[0, 2, 6], [0, 6, 6]])
    assert_like_eager(function, torch.randn(2, 6, 3, requires_grad=True), lengths, offsets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_segments_of_other_dtypes_equal_eager(dtype):
    def function(x, lengths):
        return [torch.segment_reduce(x, reduce, lengths=lengths) for reduce in REDUCTIONS]

    assert_like_eager(function, torch.randn(10).to(dtype).requires_grad_(), LENGTHS.int())


def test_entries_outside_every_segment_count_for_none():
    def function(x, lengths, offsets):
        some = [torch.segment_reduce(x, reduce, lengths=lengths, unsafe=True) for reduce in REDUCTIONS]
        return some + [torch.segment_reduce(x, reduce, offsets=offsets) for reduce in ("sum", "max")]

    assert_like_eager(function, torch.randn(6, requires_grad=True), torch.tensor([1, 2]), torch.tensor([1, 3, 4]))


def test_segments_of_nothing_stay_in_eager():
    function = lambda x, lengths: torch.segment_reduce(x * 2, "sum", lengths=lengths, unsafe=True)  # noqa: E731
    assert_like_eager(function, torch.randn(0, 2), torch.tensor([0, 0]), gradients=False, allow_eager=True)
