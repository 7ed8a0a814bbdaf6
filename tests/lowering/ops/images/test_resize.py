"""Resizing, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager, eager_reasons

MODES = {
    1: ["nearest", "nearest-exact", "linear"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "antialiased bilinear", "antialiased bicubic"],
    3: ["nearest", "nearest-exact", "trilinear"],
}
SIZES = (7, 4, 5)


def resize(mode, **options):
    name = mode.removeprefix("antialiased ")
    return lambda x: F.interpolate(x, mode=name, antialias=name != mode, **options)


def image(rank, dtype=torch.float32):
    return torch.randn(2, 3, *SIZES[:rank], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(("rank", "mode"), [(rank, mode) for rank, modes in MODES.items() for mode in modes])
def test_resizing_and_its_gradient_equal_eager(rank, mode):
    options = [
        {"size": (3, 9, 5)[:rank]},
        {"size": (1, 1, 1)[:rank]},
        {"scale_factor": 2.0},
        {"scale_factor": (1.7, 0.61, 3.0)[:rank]},
        {"scale_factor": 1.3, "recompute_scale_factor": True},
    ]
    if "nearest" not in mode:
        options += [{"align_corners": True, **options[0]}, {"align_corners": True, **options[3]}]
    assert_like_eager(lambda x: [resize(mode, **some)(x) for some in options], image(rank))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_resizing_of_other_dtypes_equals_eager(mode, dtype):
    assert_like_eager(lambda x: (resize(mode, scale_factor=2.0)(x), resize(mode, size=(5, 9))(x)), image(2, dtype))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resizing_with_symbolic_sizes_equals_eager(mode):
    assert_like_eager(
        lambda x: (resize(mode, scale_factor=2.0)(x), resize(mode, size=(5, 9))(x)), image(2), dynamic=True
    )


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_a_nan_or_infinity_spreads_as_in_eager(mode, entry):
    x = torch.randn(2, 3, 7, 4)
    x[0, 0, 2, 1] = entry
    assert_like_eager(resize(mode, size=(5, 9)), x.requires_grad_())
    # The cotangent of this output is infinite in one place.
    weight = torch.ones(2, 3, 5, 9)
    weight[1, 2, 1, 3] = entry
    assert_like_eager(lambda x: resize(mode, size=(5, 9))(x) * weight, image(2))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_long_axis_is_resized_entry_by_entry(mode):
    # Twice as long: the coordinates are exact. Others are off by 1e-4 in torch's float32.
    assert_like_eager(resize(mode, size=(3, 600)), torch.randn(1, 1, 4, 300, requires_grad=True))


def test_an_empty_batch_equals_eager():
    for mode in ("nearest", "bilinear", "bicubic"):
        assert_like_eager(resize(mode, size=(5, 9)), torch.randn(0, 3, 4, 4, requires_grad=True))


def test_channels_last_is_kept():
    x = image(2).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert_like_eager(resize("bilinear", scale_factor=2.0), x)
    assert_like_eager(resize("nearest", scale_factor=2.0), x)


def test_an_axis_that_keeps_its_size_is_left_alone():
    assert_like_eager(resize("bilinear", size=SIZES[:2]), image(2))
    assert_like_eager(resize("bicubic", size=(SIZES[0], 9)), image(2))


def test_integers_are_resized_by_torchs_decomposition():
    # To the nearest place only: between places, torch's decomposition differs from eager's fixed-point arithmetic.
    x = torch.randint(0, 255, (2, 3, 4, 5), dtype=torch.uint8)
    assert_like_eager(resize("nearest", size=(6, 7)), x, gradients=False)


def test_a_very_long_axis_takes_no_matrix():
    # The interpolation matrix would take 11 GB.
    x = torch.randn(1, 2, 38_000, requires_grad=True)
    assert_like_eager(resize("nearest", size=400), x.detach(), gradients=False)
    assert_like_eager(resize("linear", size=400), x, allow_eager=True)
    assert any("too large" in reason for reason in eager_reasons())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"scale_factor": 0.6}, {"scale_factor": 1.7}, {"size": (3, 11)},
                                     {"size": (3, 7), "align_corners": True}], ids=str)  # fmt: skip
def test_antialiased_resizing_with_symbolic_sizes_equals_eager(options, dtype):
    for mode in ("bilinear", "bicubic"):
        assert_like_eager(resize(f"antialiased {mode}", **options), image(2, dtype), dynamic=True)


@pytest.mark.parametrize("align_corners", [False, True])
def test_antialiased_resizing_to_one_row_with_symbolic_sizes_equals_eager(align_corners):
    # The input has one plane: eager mixes up the images of a batch that becomes one row.
    one = resize("antialiased bilinear", size=(1, 4), align_corners=align_corners)
    assert_like_eager(one, torch.randn(1, 1, 7, 5, requires_grad=True), dynamic=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_infinities_with_symbolic_sizes_equal_eager(mode):
    x = torch.randn(2, 3, 13, 9)
    x[0, 0, 3, 4], x[1, 1, 7, 7], x[1, 2, 7, 7], x[1, 2, 7, 6] = math.inf, math.nan, -math.inf, math.inf
    for factor in (0.4, 1.7):
        assert_like_eager(resize(f"antialiased {mode}", scale_factor=factor), x, gradients=False, dynamic=True)
