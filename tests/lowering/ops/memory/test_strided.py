"""as_strided: a tensor's memory under other sizes and strides."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager, eager_reasons


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


VIEWS = {
    "overlapping": lambda y: y.as_strided((2, 3), (1, 2)),
    "a column": lambda y: y.as_strided((3,), (4,), 1),
    "a range": lambda y: y.as_strided((2, 2), (2, 1), 3),
    "one element often": lambda y: y.as_strided((3, 2), (0, 0), 5),
    "no element": lambda y: y.as_strided((0, 2), (1, 1)),
    "one element": lambda y: y.as_strided((), (), 7),
    "everything": lambda y: y.as_strided((6, 2), (2, 1)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_as_strided_and_its_gradient_equal_eager(name, dynamic):
    assert_like_eager(lambda x: VIEWS[name](x * 2) * 1, r(3, 4), dynamic=dynamic)


@pytest.mark.parametrize("name", ["overlapping", "a column", "everything"])
def test_as_strided_of_a_permuted_tensor_equals_eager(name):
    assert_like_eager(lambda x: VIEWS[name](x.t() * 2) * 1, r(3, 4))


def test_as_strided_of_an_expanded_tensor_equals_eager():
    assert_like_eager(lambda x: x.as_strided((2, 3), (1, 0)) * 2, torch.randn(3, 1).expand(3, 4), gradients=False)


def test_as_strided_with_sizes_of_the_input_equals_eager():
    def windows(x):
        return (x * 2).as_strided((x.shape[0] - 2, 3), (1, 1)) * 3

    assert_like_eager(windows, r(9), dynamic=True)


@pytest.mark.parametrize("name", ["a column", "a range", "no element", "one element", "everything"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_writing_through_as_strided_equals_eager(name, dynamic):
    def function(x, v):
        y = x * 2
        VIEWS[name](y).copy_(v)
        return y

    assert_like_eager(function, r(3, 4), torch.tensor(1.5).requires_grad_(), dynamic=dynamic)


def test_memory_that_the_tensor_does_not_hold_is_left_to_eager():
    base = torch.randn(20)
    assert_like_eager(lambda x: x.as_strided((2, 2), (1, 2), 0) * 2, base[5:15], gradients=False, allow_eager=True)
    assert any("memory outside of the tensor" in reason for reason in eager_reasons())


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_that_leave_the_graph_keep_their_strides(dynamic):
    def function(x):
        y = x * 2
        return x.as_strided((2, 3), (1, 2)), x.as_strided((2,), (3,), 1), torch.unsafe_chunk(y, 3, 1)

    assert_like_eager(function, r(4, 6), dynamic=dynamic)


def test_a_strided_view_of_a_part_that_leaves_the_graph_equals_eager():
    def function(x):
        y = (x * 2)[1:]
        return y.as_strided((2, 2), (1, 3), 6), x[1:].as_strided((2, 2), (1, 3), 7)

    assert_like_eager(function, r(4, 6))


@pytest.mark.parametrize("dynamic", [False, True])
def test_memory_in_another_order_equals_eager(dynamic):
    def read(x):
        return x.as_strided((x.shape[0], x.shape[1] - 1), (1, x.shape[0])) * 2

    def write(x, y):
        return torch.as_strided_scatter(x, y, (x.shape[0] - 1, 2), (1, x.shape[0]), 1)

    transposed = torch.randn(7, 5).t().requires_grad_()
    assert_like_eager(read, transposed, dynamic=dynamic)
    assert_like_eager(write, transposed.detach(), r(4, 2).detach(), gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_new_memory_with_gaps_equals_eager(dynamic):
    def make(x):
        rows, columns = x.shape
        return x.new_empty_strided((rows, columns), (2 * columns, 2)).fill_(3) + x

    assert_like_eager(make, r(5, 7), dynamic=dynamic)
