"""Sampling at the positions of a grid, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager

PADDINGS = ["zeros", "border", "reflection"]


def operands(rank=2, dtype=torch.float32, channels=3):
    image = torch.randn(2, channels, *(4, 5, 3)[:rank], dtype=dtype, requires_grad=True)
    # A sixth of the places is beside the image; two fall on one pixel.
    grid = torch.rand(2, *(6, 3, 2)[:rank], rank, dtype=dtype) * 3 - 1.5
    grid[0, 0] = grid[0, 1]
    return image, grid.requires_grad_()


def sample(*, mode, padding_mode="zeros"):
    def function(image, grid):
        return [F.grid_sample(image, grid, mode, padding_mode, align_corners=align) for align in (False, True)]

    return function


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("rank", "mode"), [(2, "bilinear"), (2, "nearest"), (2, "bicubic"), (3, "bilinear"), (3, "nearest")]
)
def test_sampling_and_its_gradients_equal_eager(rank, mode, padding):
    assert_like_eager(sample(mode=mode, padding_mode=padding), *operands(rank))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_sampling_in_float64_equals_eager(mode):
    assert_like_eager(sample(mode=mode, padding_mode="reflection"), *operands(dtype=torch.float64))


@pytest.mark.parametrize("padding", PADDINGS)
def test_sampling_with_symbolic_sizes_equals_eager(padding):
    assert_like_eager(sample(mode="bilinear", padding_mode=padding), *operands(), dynamic=True)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone_equals_eager(wanted):
    image, grid = (x if i == wanted else x.detach() for i, x in enumerate(operands()))
    assert_like_eager(sample(mode="bilinear"), image, grid)


def test_places_at_the_ends_equal_eager():
    image, _ = operands()
    grid = torch.tensor([-1.0, 1.0, 0.0, 0.5, -5.0, 7.0])
    grid = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).expand(2, 6, 6, 2)
    for padding in PADDINGS:
        assert_like_eager(sample(mode="bilinear", padding_mode=padding), image, grid)


def test_an_image_of_one_pixel_equals_eager():
    _, grid = operands()
    for padding in PADDINGS:
        assert_like_eager(
            sample(mode="bilinear", padding_mode=padding), torch.randn(2, 3, 1, 1, requires_grad=True), grid
        )


def test_an_infinite_pixel_shows_only_where_it_is_sampled():
    image, grid = operands()
    image = image.detach()
    image[:, :, 0, 0] = math.inf
    assert_like_eager(sample(mode="bilinear"), image, grid.detach(), gradients=False)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 2)])
def test_affine_grids_equal_eager(size, align_corners):
    theta = torch.randn(2, len(size) - 2, len(size) - 1, requires_grad=True)
    assert_like_eager(lambda theta: F.affine_grid(theta, list(size), align_corners=align_corners), theta)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior has changed:UserWarning")
@pytest.mark.parametrize("align_corners", [False, True])
def test_affine_grids_of_one_pixel_and_of_symbolic_sizes_equal_eager(align_corners):
    def grids(theta, image):
        thin = (len(theta), 1, 1, 5), (len(theta), 1, 5, 1), (len(theta), 1, 1, 1)
        return [F.affine_grid(theta, list(size), align_corners=align_corners) for size in (image.shape, *thin)]

    theta, image = torch.randn(3, 2, 3), torch.randn(3, 1, 6, 7)
    assert_like_eager(grids, theta, image, gradients=False)
    assert_like_eager(grids, theta, image, gradients=False, dynamic=True)
    assert_like_eager(grids, theta.double(), image, gradients=False)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior has changed:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("space", [(6, 7), (5, 6, 7), (1, 5)], ids=str)
def test_gradients_of_affine_grids_of_symbolic_sizes_equal_eager(space, align_corners, dtype):
    def grids(theta, image):
        sizes = image.shape, (len(theta), 1, *space)
        return [F.affine_grid(theta, list(size), align_corners=align_corners) for size in sizes]

    # A batch of 3 would not be symbolic: the sizes of a matrix are fixed, and equal sizes are one symbol.
    theta = torch.randn(5, len(space), len(space) + 1, dtype=dtype, requires_grad=True)
    assert_like_eager(grids, theta, torch.randn(5, 2, *space), dynamic=True)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("shape", [(1, 2, 5, 6), (1, 2, 3, 5, 6)], ids=["image", "volume"])
def test_a_grid_that_is_no_number_samples_where_eager_does(shape, padding):
    modes = ["bilinear", "nearest"] + ["bicubic"] * (len(shape) == 4)

    def function(x, grid):
        return [F.grid_sample(x, grid, mode, padding, align) for mode in modes for align in (False, True)]

    rank = len(shape) - 2
    grid = torch.rand(1, *shape[2:], rank) * 3 - 1.5
    places = grid.view(-1, rank)
    places[0, 0], places[1, 1], places[2], places[3, 0] = math.nan, math.inf, -math.inf, math.nan
    assert_like_eager(function, torch.randn(shape), grid, gradients=False)  # eager's gradient reads beyond the image


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
def test_in_half_precision_the_places_are_eagers(dtype, padding):
    assert_like_eager(sample(mode="bilinear", padding_mode=padding), *operands(dtype=dtype), allow_eager=True)
