"""Max pooling: maxima, indices and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_dynamo.lowering.recipes import windows
from ort_dynamo.testing import assert_like_eager

POOLS = {
    "2d": (nn.MaxPool2d(2), (2, 3, 6, 8)),
    "2d with a rest": (nn.MaxPool2d(2), (2, 3, 7, 9)),
    "2d ceil mode": (nn.MaxPool2d(2, ceil_mode=True), (2, 3, 7, 9)),
    "2d overlapping": (nn.MaxPool2d(3, 2, 1), (2, 3, 8, 9)),
    "2d overlapping ceil mode": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), (2, 3, 8, 9)),
    "2d ceil mode drops a window": (nn.MaxPool2d(2, 3, 1, ceil_mode=True), (2, 3, 6, 9)),
    "2d stride 1": (nn.MaxPool2d(3, 1, 1), (1, 2, 5, 5)),
    "2d gaps": (nn.MaxPool2d(2, 3), (2, 2, 8, 9)),
    "2d dilation": (nn.MaxPool2d(2, 2, 1, dilation=2), (2, 2, 9, 8)),
    "2d unequal": (nn.MaxPool2d((3, 2), (1, 2), (1, 0), (2, 1)), (2, 3, 9, 8)),
    "2d without a batch": (nn.MaxPool2d(2, padding=1), (3, 6, 6)),
    "1d": (nn.MaxPool1d(3, 2, 1), (2, 4, 9)),
    "1d ceil mode": (nn.MaxPool1d(2, ceil_mode=True), (2, 4, 9)),
    "1d without a batch": (nn.MaxPool1d(2), (4, 9)),
    "3d": (nn.MaxPool3d(2), (2, 2, 4, 5, 6)),
    "3d overlapping": (nn.MaxPool3d(3, 2, 1, ceil_mode=True), (1, 2, 4, 5, 6)),
    "adaptive 2d": (nn.AdaptiveMaxPool2d((3, 2)), (2, 3, 7, 5)),
    "adaptive 2d tiles": (nn.AdaptiveMaxPool2d((3, 2)), (2, 3, 9, 8)),
    "adaptive 2d to more": (nn.AdaptiveMaxPool2d((7, 9)), (2, 3, 4, 5)),
    "adaptive 2d to one": (nn.AdaptiveMaxPool2d(1), (2, 3, 4, 5)),
    "adaptive 2d without a batch": (nn.AdaptiveMaxPool2d(2), (3, 5, 4)),
    "adaptive 1d": (nn.AdaptiveMaxPool1d(3), (2, 4, 7)),
    "adaptive 3d": (nn.AdaptiveMaxPool3d((2, 1, 3)), (1, 2, 5, 3, 4)),
    "adaptive 3d tiles": (nn.AdaptiveMaxPool3d((2, 1, 3)), (1, 2, 4, 3, 6)),
}


@pytest.fixture(params=["kernel", "tables"])
def form(request, monkeypatch):
    """ONNX Runtime's kernel, and the tables that windows without a kernel take."""
    if request.param == "tables":
        monkeypatch.setattr(windows.Pool, "fits_onnx", False)


def with_ties(*shape):
    """Few different numbers, so that many windows have several largest ones."""
    return torch.randint(-3, 4, shape).float().requires_grad_()


def and_places(module):
    module.return_indices = True
    return module


@pytest.mark.parametrize("case", POOLS)
def test_maxima_places_and_gradients_equal_eager(case, form):
    module, shape = POOLS[case]
    assert_like_eager(and_places(module), with_ties(*shape))


@pytest.mark.parametrize("case", ["2d overlapping", "2d", "adaptive 2d", "1d"])
def test_maxima_alone_equal_eager(case):
    module, shape = POOLS[case]
    module.return_indices = False
    assert_like_eager(module, torch.randn(shape, requires_grad=True))
    with torch.no_grad():
        assert_like_eager(module, torch.randn(shape), gradients=False)


@pytest.mark.parametrize(
    "case",
    ["2d with a rest", "2d overlapping", "2d overlapping ceil mode", "2d ceil mode drops a window",
     "2d without a batch", "2d dilation", "3d overlapping", "adaptive 2d", "adaptive 2d tiles", "adaptive 1d"],
)  # fmt: skip
def test_max_pool_with_symbolic_sizes_equals_eager(case):
    module, shape = POOLS[case]
    assert_like_eager(and_places(module), with_ties(*shape), dynamic=True)


@pytest.mark.parametrize("module", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AdaptiveMaxPool2d((3, 2))], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_places_of_nan_and_infinity_equal_eager(module, bad):
    x = with_ties(2, 2, 6, 6).detach()
    x[0, 0, 1, 1] = x[0, 0, 2, 3] = x[0, 1, 0, 2] = x[1, 1, 5, 5] = x[1, 1, 5, 4] = bad
    assert_like_eager(and_places(module), x.requires_grad_())


@pytest.mark.parametrize("module", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_windows_of_nothing_but_nan_or_infinity_equal_eager(module, bad):
    assert_like_eager(and_places(module), torch.full((1, 2, 6, 6), bad, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_equal_eager(dtype):
    assert_like_eager(and_places(nn.MaxPool2d(3, 2, 1)), with_ties(2, 3, 8, 8).detach().to(dtype).requires_grad_())


@pytest.mark.parametrize("case", ["2d overlapping ceil mode", "2d dilation", "1d", "3d"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_maxima_and_places_of_integers_equal_eager(case, dtype):
    module, shape = POOLS[case]
    info = torch.iinfo(dtype)
    x = torch.randint(0, 5, shape).to(dtype)
    x[0, 0], x[-1, -1, 1:] = info.min, info.max
    assert_like_eager(and_places(module), x, gradients=False)


@pytest.mark.parametrize("return_indices", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_windows_without_an_element_equal_eager(rank, size, return_indices):
    """Windows of two elements whose dilation leads from the padding before an input into that behind it."""
    module = getattr(nn, f"MaxPool{rank}d")(2, 2, 1, dilation=size + 1, return_indices=return_indices)
    assert_like_eager(module, torch.randn(1, 2, *[size] * rank), gradients=False, allow_eager=True)


def test_max_pool_of_an_empty_batch_equals_eager():
    assert_like_eager(and_places(nn.MaxPool2d(2)), torch.randn(0, 3, 6, 6, requires_grad=True))


def test_two_pools_in_one_graph_equal_eager():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(3, 1, 1))
    assert_like_eager(net, torch.randn(2, 1, 12, 12, requires_grad=True))


def test_gradient_adds_where_windows_share_their_maximum():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1
    assert_like_eager(lambda x: functional.max_pool2d(x, 3, 1), x.requires_grad_())


@pytest.mark.parametrize("pool", [functional.adaptive_max_pool2d, functional.adaptive_avg_pool2d])
def test_adaptive_pooling_of_integers_is_torchs_own_error(pool):
    compiled = torch.compile(lambda x: pool(x.argmax(1), 5), backend="ort_train")
    with pytest.raises(RuntimeError, match="not implemented for 'Long'"):
        compiled(torch.randn(2, 3, 6, 6, 6))
