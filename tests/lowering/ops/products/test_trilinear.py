"""Bilinear layers."""

import pytest
import torch
from torch import nn

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize("leading", [(5,), (), (2, 3), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_bilinear_and_its_gradients_equal_eager(leading, bias):
    x, y = torch.randn(*leading, 4, requires_grad=True), torch.randn(*leading, 6, requires_grad=True)
    assert_like_eager(nn.Bilinear(4, 6, 3, bias), x, y)


def test_bilinear_with_a_symbolic_batch_equals_eager():
    x, y = torch.randn(7, 4, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    assert_like_eager(nn.Bilinear(4, 6, 3), x, y, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_equal_eager(dtype):
    x, y = torch.randn(5, 4, dtype=dtype, requires_grad=True), torch.randn(5, 6, dtype=dtype, requires_grad=True)
    assert_like_eager(nn.Bilinear(4, 6, 3).to(dtype), x, y)


def test_sums_over_other_dimensions_equal_eager():
    x, y, z = (torch.randn(shape, requires_grad=True) for shape in ((2, 3), (3, 4), (2, 4)))

    def both(x, y, z):
        one = torch.ops.aten._trilinear(x, y, z, [2], [0], [1], [1])
        return one, torch.ops.aten._trilinear(x, y, z, [2], [0], [1], [])

    assert_like_eager(both, x, y, z)
