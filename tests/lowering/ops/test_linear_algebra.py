"""Determinants, and what surrounds factorisations that stay in eager."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3, 3), (1, 1), (0, 0), (0, 2, 2)], ids=str)
def test_determinants_equal_eager(shape):
    assert_like_eager(lambda x: (torch.linalg.det(x), torch.det(x * 2)), torch.randn(shape), gradients=False)


def test_gradients_of_determinants_equal_eager():
    assert_like_eager(lambda x: torch.linalg.det(x) * 2, torch.randn(2, 3, 3).requires_grad_(), allow_eager=True)


def test_solutions_of_empty_systems_equal_eager():
    # onnxruntime-training 1.19.2 divides by zero in a product of empty matrices.
    a, b = torch.randn(2, 0, 0, requires_grad=True), torch.randn(2, 0, requires_grad=True)
    assert_like_eager(torch.linalg.solve, a, b, allow_eager=True)
    assert_like_eager(lambda x: torch.linalg.qr(x), torch.randn(1, 1, 0, 0, requires_grad=True), allow_eager=True)


def test_empty_tensors_of_other_strides_cross_into_a_session():
    assert_like_eager(
        lambda x: torch.linalg.matrix_power(x, -2), torch.randn(0, 2, 2, requires_grad=True), allow_eager=True
    )
