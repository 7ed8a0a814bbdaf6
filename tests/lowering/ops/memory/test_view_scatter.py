"""Writing into views and the gradients of views."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

aten = torch.ops.aten


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


VIEWS = {
    "select": lambda x: (x[1], x[:, -1], x.select(2, 3)),
    "slice": lambda x: (x[1:3], x[:, 2:], x[..., :-2], x[:, :, 1:-1]),
    "slice with a step": lambda x: (x[::2], x[:, 1::3], x[..., 1:5:2], x[..., -5::2]),
    "slice beyond the end": lambda x: (x[3:99], x[:, -99:2]),
    "diagonal": lambda x: (x.diagonal(), x.diagonal(1, 0, 2), x.diagonal(-2, 1, 2), x.diagonal(1, -1, 0)),
    "unbind": lambda x: x.unbind(1)[2],
    "split": lambda x: x.split([1, 3], 1)[1],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_gradient_of_a_view_equals_eager(name, dynamic):
    assert_like_eager(VIEWS[name], r(5, 4, 6), dynamic=dynamic)


BACKWARDS = {
    "select": lambda g, s: (aten.select_backward(g[0], s, 0, -2), aten.select_backward(g[:, 0], s, 1, 3)),
    "slice": lambda g, s: (
        aten.slice_backward(g[:2], s, 0, 1, 3, 1),
        aten.slice_backward(g[:, :, :3], s, 2, -3, 99, 1),
    ),
    "whole slice": lambda g, s: aten.slice_backward(g, s, 1, 0, 4, 1),
    "empty slice": lambda g, s: aten.slice_backward(g[:0], s, 0, 3, 3, 1),
    "slice with a step": lambda g, s: (
        aten.slice_backward(g[:, :, :3], s, 2, 0, 99, 2),
        aten.slice_backward(g[:, :, :2], s, 2, 1, 5, 3),
        aten.slice_backward(g[:3], s, 0, -5, 99, 2),
    ),
    "diagonal": lambda g, s: (
        aten.diagonal_backward(g[0, 0, :, None].expand(6, 4)[:, :3], s, 1, 0, 1),
        aten.diagonal_backward(g[:, :, 0][:, :4], s, 0, 1, 2),
        aten.diagonal_backward(g[:4, 0, :0], s, 9, 0, 2),
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_backward_operator_equals_eager(name, dtype):
    assert_like_eager(lambda g: BACKWARDS[name](g, (5, 4, 6)), torch.randn(5, 4, 6, dtype=dtype), gradients=False)


SCATTERS = {
    "select": (lambda x, v: x.select_scatter(v, 1, 2), (5, 6)),
    "select from the end": (lambda x, v: x.select_scatter(v, -1, -1), (5, 4)),
    "slice": (lambda x, v: x.slice_scatter(v, 1, 1, 3), (5, 2, 6)),
    "slice from the end": (lambda x, v: x.slice_scatter(v, 2, -4, -1), (5, 4, 3)),
    "slice to the end": (lambda x, v: x.slice_scatter(v, 0, 2), (3, 4, 6)),
    "whole slice": (lambda x, v: x.slice_scatter(v, 1), (5, 4, 6)),
    "slice beyond the end": (lambda x, v: x.slice_scatter(v, 1, -99, 99), (5, 4, 6)),
    "slice with a step": (lambda x, v: x.slice_scatter(v, 2, 1, 6, 2), (5, 4, 3)),
    "step in the first dimension": (lambda x, v: x.slice_scatter(v, 0, 0, None, 3), (2, 4, 6)),
    "diagonal": (lambda x, v: x.diagonal_scatter(v, 0, 1, 2), (5, 4)),
    "diagonal above": (lambda x, v: x.diagonal_scatter(v, 2, 0, 2), (4, 4)),
    "diagonal below": (lambda x, v: x.diagonal_scatter(v, -1, 2, 0), (4, 5)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SCATTERS)
def test_writing_into_a_view_and_gradients_equal_eager(name, dynamic):
    function, sizes = SCATTERS[name]
    assert_like_eager(function, r(5, 4, 6), r(*sizes), dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int8, torch.bool], ids=str)
def test_writing_into_views_of_every_dtype_equals_eager(dtype):
    def function(x, v):
        return (
            x.select_scatter(v[:, 0], 1, 1),
            x.slice_scatter(v, 1, 1, 3),
            x.slice_scatter(v, 1, 0, 4, 2),
            x.diagonal_scatter(v[:4, 0]),
        )

    assert_like_eager(function, torch.ones(5, 4).to(dtype), torch.zeros(5, 2).to(dtype), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_assignments_to_views_equal_eager(dynamic):
    def function(x, v):
        x = x * 1
        x[:, 1:3] = v
        x[:, -1] = v[:, 0]
        x[::2, 0] *= 3
        x.diagonal(dim1=1, dim2=2).mul_(2)
        x[..., 1:5:2].add_(1)
        return x

    assert_like_eager(function, r(5, 4, 6), r(5, 2, 6), dynamic=dynamic)


def test_writing_another_dtype_into_a_view_equals_eager():
    def function(x, v):
        x = x.clone()
        x[1:3] = v
        x[0] = 2
        return x

    assert_like_eager(function, torch.randn(4, 3), torch.randn(2, 3, dtype=torch.float64), gradients=False)


def test_a_matrix_with_a_diagonal_written_is_multiplied_as_it_stands():
    # Its axes are in order already: a Transpose that says so would be taken for one that transposes.
    def function(x, diagonal, y):
        written = torch.diagonal_scatter(x * 2, diagonal)
        return written @ y + diagonal, torch.permute_copy(x, (0, 1)) @ y + diagonal

    assert_like_eager(function, torch.randn(3, 3), torch.randn(3), torch.randn(3, 3), gradients=False)


@pytest.mark.parametrize("shape", [(0, 0), (4, 0), (0, 4)], ids=str)
def test_writes_into_empty_views_equal_eager(shape):
    def write(x):
        y = x.clone()
        y[::2] = 1.5
        y[..., 1::2] += 1
        y.diagonal().zero_()
        return y

    assert_like_eager(write, torch.randn(shape), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_slice_that_turns_out_empty_equals_eager(dynamic):
    def cut(x, y):
        z = torch.fmod(x, y)
        return z, z.diagonal_scatter(z.diagonal() * 2)[..., 0:-4:2]

    assert_like_eager(cut, torch.full((2, 4), True), r(2, 4), dynamic=dynamic)


def test_a_diagonal_of_symbolic_sizes_written_outside_of_an_island():
    def write(x, y):
        z = torch.fmod(x, y)
        return z, z.diagonal_scatter(z.diagonal() * 2), x.flip(0).diagonal_scatter(x.diagonal())

    assert_like_eager(write, r(3, 4), r(3, 4), dynamic=True)
    x = torch.full((2, 4), True)
    assert_like_eager(write, x, r(2, 4), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_gradients_of_every_second_or_third_entry_equal_eager(dtype, dynamic):
    def parts(x):
        return x[..., ::2], x[..., 1::2], x[..., 2:-1:3], x[::3]

    assert_like_eager(parts, r(4, 3, 13, dtype=dtype), dynamic=dynamic)
    assert_like_eager(parts, r(14, dtype=dtype), dynamic=dynamic)


def test_the_zeros_between_steps_stay_zeros_beside_infinity_and_nan():
    grad = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0]])
    assert_like_eager(lambda g: aten.slice_backward(g, [2, 4], 1, 0, 4, 2), grad, gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_that_is_an_argument_equals_eager(dynamic):
    def write(x, y, n):
        z = x.clone()
        z[:, 1::n] = y
        return z, torch.slice_scatter(x, y, 1, 0, -1, n)

    assert_like_eager(lambda x, n: (x[:, ::n], x[1::n], x[..., 2:-1:n]), r(7, 11, 9), 3, dynamic=dynamic)
    assert_like_eager(write, r(7, 10), r(7, 3), 3, dynamic=dynamic)
