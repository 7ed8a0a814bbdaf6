"""Pooling that torch composes of others: unpooling, power averages, local response normalization."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize(("pool", "unpool", "shape"), [
    (functional.max_pool1d, functional.max_unpool1d, (2, 3, 8)),
    (functional.max_pool2d, functional.max_unpool2d, (2, 3, 7, 6)),
    (functional.max_pool3d, functional.max_unpool3d, (1, 2, 4, 5, 6)),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooled_maxima_and_gradients_equal_eager(pool, unpool, shape, dynamic):
    def there_and_back(x):
        maxima, places = pool(x, 2, return_indices=True)
        return unpool(maxima * maxima, places, 2, output_size=x.shape[2:])

    assert_like_eager(there_and_back, torch.randn(shape, requires_grad=True), dynamic=dynamic)


@pytest.mark.parametrize(("rank", "unpool"), [
    (1, functional.max_unpool1d),
    (2, functional.max_unpool2d),
    (3, functional.max_unpool3d),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_unpooling_to_no_elements_accepts_any_index_as_eager_does(rank, unpool, dynamic):
    def to_nothing(x, places):
        return unpool(x, places, 2, padding=1)

    x = torch.randn(1, 2, *[1] * rank)
    assert_like_eager(to_nothing, x, torch.full(x.shape, 5), gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("module", [nn.LPPool1d(2, 3), nn.LPPool2d(3, 2, ceil_mode=True)], ids=repr)
def test_power_averages_equal_eager(module):
    shape = (2, 3, 9) if isinstance(module, nn.LPPool1d) else (2, 3, 7, 8)
    assert_like_eager(module, torch.rand(shape, requires_grad=True))


@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 5, 4, 3), (1, 5, 2, 3, 2)])
def test_local_response_norm_equals_eager(shape):
    assert_like_eager(nn.LocalResponseNorm(3), torch.randn(shape, requires_grad=True))
