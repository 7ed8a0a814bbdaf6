"""Fractional max-pooling: windows where random samples put them."""

import math

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager

POOLS = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}


# torch cannot trace the gradient in three dimensions with symbolic sizes.
@pytest.mark.parametrize(("rank", "dynamic"), [(2, False), (2, True), (3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fractional_pooling_equals_eager(rank, dtype, dynamic):
    def function(x, samples):
        given = POOLS[rank](x, (2, 3, 2)[:rank], output_size=(3, 4, 1)[:rank], _random_samples=samples)
        drawn, places = POOLS[rank](x * 2, 2, output_ratio=(0.6,) * rank, return_indices=True)  # by the generator
        return given, drawn, places

    x = torch.randn(2, 3, *(7, 9, 8)[:rank], dtype=dtype, requires_grad=True)
    assert_like_eager(function, x, torch.rand(2, 3, rank, dtype=dtype), dynamic=dynamic)


@pytest.mark.parametrize("rank", [2, 3])
def test_windows_are_eagers_for_many_samples(rank):
    def function(x, samples):
        return POOLS[rank](x, 2, output_size=5, _random_samples=samples, return_indices=True)

    assert_like_eager(function, torch.randn(16, 32, *[11] * rank), torch.rand(16, 32, rank), gradients=False)


def test_an_image_without_a_batch_equals_eager():
    function = lambda x, samples: F.fractional_max_pool2d(x, 3, output_size=2, _random_samples=samples)  # noqa: E731
    assert_like_eager(function, torch.randn(3, 7, 8, requires_grad=True), torch.rand(1, 3, 2))


def test_the_last_nan_and_the_first_of_equals_win():
    def function(x, samples):
        return F.fractional_max_pool2d(x, 3, output_size=2, _random_samples=samples, return_indices=True)

    x = torch.randint(3, (2, 2, 7, 8)).float()
    x[0, 0, 2, 2:4] = math.nan
    x[0, 1], x[1, 0, 0, 0] = -math.inf, math.inf
    assert_like_eager(function, x, torch.rand(2, 2, 2), gradients=False)


def test_half_width_stays_in_eager():
    x = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16)
    assert_like_eager(lambda x: F.fractional_max_pool2d(x, 2, output_size=2) + 1, x, gradients=False, allow_eager=True)


@pytest.mark.parametrize("rank", [2, 3])
def test_an_empty_batch_equals_eager(rank):
    def function(x, samples):
        return POOLS[rank](x, 2, output_size=3, _random_samples=samples)

    assert_like_eager(function, torch.randn(0, 3, *[6] * rank, requires_grad=True), torch.rand(0, 3, rank))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_place_that_is_the_greatest_of_several_windows_gets_all_their_gradients(dtype):
    def function(x, samples):
        return F.fractional_max_pool2d(x, 4, output_size=3, _random_samples=samples)

    x = torch.randn(2, 3, 7, 7).to(dtype).requires_grad_()
    assert_like_eager(function, x, torch.rand(2, 3, 2).to(dtype), allow_eager=True)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("leading", [(3,), (2, 3)])
def test_samples_of_more_images_than_there_are_equal_eager(rank, leading):
    def function(x, samples):
        return POOLS[rank](x, 2, output_size=3, _random_samples=samples)

    assert_like_eager(function, torch.randn(*leading, *[6] * rank, requires_grad=True), torch.rand(4, 3, rank))
