"""Distances between the rows of matrices, with their gradients."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

ORDERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf]


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("p", ORDERS)
def test_distances_between_all_rows_equal_eager(p):
    x = r(2, 5, 3)
    same_row = x.detach()[:, 1:3].clone().requires_grad_()
    assert_like_eager(lambda x, y: torch.cdist(x, y, p), x, r(2, 4, 3))
    assert_like_eager(lambda x, y: torch.cdist(x, y, p, "donot_use_mm_for_euclid_dist"), x, same_row)


def test_many_distances_equal_eager():
    assert_like_eager(lambda x, y: torch.cdist(x, y), r(30, 3), r(40, 3))
    assert_like_eager(lambda x, y: torch.cdist(x, y, 1.0), r(2, 6, 3), r(1, 4, 3), dynamic=True)
    assert_like_eager(
        lambda x, y: torch.cdist(x, y), r(3, 1, 5, 3, dtype=torch.float64), r(2, 4, 3, dtype=torch.float64)
    )


def test_distances_of_nothing_equal_eager():
    assert_like_eager(lambda x, y: torch.cdist(x, y), r(0, 3), r(4, 3))
    assert_like_eager(lambda x, y: torch.cdist(x, y), r(2, 0), r(4, 0))


@pytest.mark.parametrize("p", ORDERS)
def test_distances_within_a_matrix_equal_eager(p):
    assert_like_eager(lambda x: torch.nn.functional.pdist(x, p), r(6, 3))


def test_distances_within_a_small_matrix_equal_eager():
    assert_like_eager(torch.nn.functional.pdist, r(2, 3))
    assert_like_eager(torch.nn.functional.pdist, r(1, 3), gradients=False)
    assert_like_eager(torch.nn.functional.pdist, r(5, 3), dynamic=True)


def test_distances_of_tensors_equal_eager():
    x = r(3, 4)
    assert_like_eager(lambda x, y: (torch.dist(x, y), torch.dist(x, y, 1), torch.dist(x, y, math.inf)), x, r(4))
    assert_like_eager(lambda x, y: torch.nn.functional.pairwise_distance(x, y, 3.0), x, r(3, 4))
