"""Average pooling: values and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_dynamo.lowering.recipes import windows
from ort_dynamo.testing import assert_like_eager

POOLS = {
    "2d": (nn.AvgPool2d(2), (2, 3, 6, 8)),
    "2d with a rest": (nn.AvgPool2d(2), (2, 3, 7, 9)),
    "2d ceil mode": (nn.AvgPool2d(2, ceil_mode=True), (2, 3, 7, 9)),
    "2d overlapping": (nn.AvgPool2d(3, 2, 1), (2, 3, 8, 9)),
    "2d overlapping ceil mode": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (2, 3, 8, 9)),
    "2d without the padding": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 3, 8, 9)),
    "2d ceil mode without the padding": (nn.AvgPool2d(3, 2, 1, True, False), (2, 3, 8, 9)),
    "2d ceil mode drops a window": (nn.AvgPool2d(2, 3, 1, ceil_mode=True), (2, 3, 6, 9)),
    "2d stride 1": (nn.AvgPool2d(3, 1, 1), (1, 2, 5, 5)),
    "2d gaps": (nn.AvgPool2d(2, 3), (2, 2, 8, 9)),
    "2d gaps ceil mode": (nn.AvgPool2d(2, 3, ceil_mode=True), (2, 2, 8, 10)),
    "2d own divisor": (nn.AvgPool2d(3, 2, 1, divisor_override=5), (2, 2, 8, 9)),
    "2d own divisor ceil mode": (nn.AvgPool2d(3, 2, 1, True, False, divisor_override=2), (2, 2, 8, 9)),
    "2d unequal": (nn.AvgPool2d((3, 2), (1, 2), (1, 0)), (2, 3, 9, 8)),
    "2d without a batch": (nn.AvgPool2d(2, padding=1), (3, 6, 6)),
    "1d": (nn.AvgPool1d(3, 2, 1), (2, 4, 9)),
    "1d ceil mode": (nn.AvgPool1d(2, ceil_mode=True), (2, 4, 9)),
    "1d without the padding": (nn.AvgPool1d(3, 2, 1, count_include_pad=False), (2, 4, 9)),
    "1d without a batch": (nn.AvgPool1d(2), (4, 8)),
    "3d": (nn.AvgPool3d(2), (2, 2, 4, 5, 6)),
    "3d overlapping": (nn.AvgPool3d(3, 2, 1, True, False), (1, 2, 4, 5, 6)),
    "adaptive 2d": (nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 7, 5)),
    "adaptive 2d tiles": (nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 9, 8)),
    "adaptive 2d to more": (nn.AdaptiveAvgPool2d((7, 9)), (2, 3, 4, 5)),
    "adaptive 2d to one": (nn.AdaptiveAvgPool2d(1), (2, 3, 4, 5)),
    "adaptive 2d to itself": (nn.AdaptiveAvgPool2d((None, 2)), (2, 3, 4, 5)),
    "adaptive 2d without a batch": (nn.AdaptiveAvgPool2d(2), (3, 6, 4)),
    "adaptive 1d": (nn.AdaptiveAvgPool1d(3), (2, 4, 7)),
    "adaptive 3d": (nn.AdaptiveAvgPool3d((2, 1, 3)), (1, 2, 5, 3, 4)),
    "adaptive 3d tiles": (nn.AdaptiveAvgPool3d((2, 1, 3)), (1, 2, 4, 3, 6)),
}


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("case", POOLS)
def test_averages_and_gradients_equal_eager(case):
    module, shape = POOLS[case]
    assert_like_eager(module, leaf(*shape))


@pytest.mark.parametrize("case", ["1d", "2d overlapping", "adaptive 1d", "adaptive 2d"])
def test_averages_in_inference_equal_eager(case):
    module, shape = POOLS[case]
    with torch.no_grad():
        assert_like_eager(module, torch.randn(shape), gradients=False)


@pytest.mark.parametrize(
    "case", ["2d", "2d overlapping ceil mode", "2d without the padding", "2d own divisor", "3d overlapping"]
)
def test_averages_by_tables_equal_eager(case, monkeypatch):
    monkeypatch.setattr(windows.Pool, "fits_onnx", False)
    module, shape = POOLS[case]
    assert_like_eager(module, leaf(*shape))


@pytest.mark.parametrize(
    "case",
    ["2d", "2d with a rest", "2d overlapping", "2d overlapping ceil mode", "2d ceil mode drops a window",
     "2d without the padding", "2d ceil mode without the padding", "2d own divisor ceil mode", "2d without a batch",
     "2d gaps", "1d ceil mode", "3d overlapping", "adaptive 2d", "adaptive 2d tiles", "adaptive 2d to one",
     "adaptive 1d"],
)  # fmt: skip
def test_average_pool_with_symbolic_sizes_equals_eager(case):
    module, shape = POOLS[case]
    assert_like_eager(module, leaf(*shape), dynamic=True)


def test_tiles_of_a_symbolic_size_equal_eager():
    def halved(x):
        return functional.avg_pool2d(functional.pad(x, [0, x.shape[3], 0, x.shape[2]]), 2)

    assert_like_eager(halved, leaf(2, 3, 6, 8), dynamic=True)


@pytest.mark.parametrize("module", [nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((3, 2))], ids=repr)
def test_nan_and_infinity_stay_in_their_windows(module):
    x = torch.randn(2, 2, 7, 7)
    x[0, 0, 0, 0], x[0, 1, 3, 3], x[1, 0, 6, 6] = math.nan, math.inf, -math.inf
    assert_like_eager(module, x, gradients=False)


@pytest.mark.parametrize("module", [nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((3, 2))], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_average_pool_equals_eager(module, dtype):
    assert_like_eager(module, torch.randn(2, 3, 8, 8, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize(
    "case",
    ["2d with a rest", "2d overlapping ceil mode", "2d without the padding", "2d gaps ceil mode", "2d unequal", "2d",
     "2d own divisor", "2d without a batch", "1d", "3d overlapping", "adaptive 2d", "adaptive 2d tiles",
     "adaptive 3d tiles"],
)  # fmt: skip
def test_float64_averages_without_a_kernel_equal_eager(case):
    module, shape = POOLS[case]
    assert_like_eager(module, torch.randn(shape, dtype=torch.float64, requires_grad=True))


def test_float64_averages_of_symbolic_sizes_equal_eager():
    module, shape = POOLS["2d overlapping ceil mode"]
    assert_like_eager(module, torch.randn(shape, dtype=torch.float64, requires_grad=True), dynamic=True)


@pytest.mark.parametrize("case", ["2d overlapping ceil mode", "2d without the padding", "2d own divisor", "1d", "3d"])
@pytest.mark.parametrize("largest", [50, 1 << 62])
def test_averages_of_integers_equal_eager(case, largest):
    module, shape = POOLS[case]
    assert_like_eager(module, torch.randint(-largest, largest, shape), gradients=False)


def test_averages_of_large_integers_of_symbolic_sizes_equal_eager():
    module, shape = POOLS["2d overlapping ceil mode"]
    assert_like_eager(module, torch.randint(-(1 << 62), 1 << 62, shape), gradients=False, dynamic=True)


def test_average_pool_of_an_empty_batch_equals_eager():
    assert_like_eager(nn.AvgPool2d(2), torch.randn(0, 3, 6, 6, requires_grad=True))


@pytest.mark.parametrize("shape", [(2, 3, 13, 9), (2, 3, 12, 10), (1, 2, 1030, 5)], ids=str)
def test_adapted_averages_keep_infinity_and_nan_in_their_windows(shape):
    x = torch.randn(shape)
    x[0, 0, 3, 4], x[-1, 1, -2, 0] = float("inf"), float("nan")
    assert_like_eager(lambda x: functional.adaptive_avg_pool2d(x, (4, 5)), x, gradients=False)
    assert_like_eager(lambda x: functional.adaptive_avg_pool2d(x, (4, 5)), torch.randn(shape, requires_grad=True))
