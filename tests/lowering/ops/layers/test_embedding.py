"""Table look-up and its gradient."""

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager

INDICES = torch.tensor([[0, 1, 6], [1, 2, 1]])


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("padding_idx", [None, 1, -2])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient_with_repeated_rows_equals_eager(padding_idx, scale_grad_by_freq, dynamic):
    def function(table, indices):
        return F.embedding(indices, table, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq)

    assert_like_eager(function, r(7, 4), INDICES, dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tables_of_other_dtypes_equal_eager(dtype):
    assert_like_eager(lambda t, i: F.embedding(i, t, padding_idx=2), r(7, 4, dtype=dtype), INDICES.int())


@pytest.mark.parametrize(
    "indices", [torch.tensor(3), torch.zeros(0, dtype=torch.int64), torch.tensor([[[5]]])], ids=str
)
def test_any_shape_of_indices_equals_eager(indices):
    assert_like_eager(lambda t, i: F.embedding(i, t), r(7, 4), indices)


def test_many_collisions_are_summed_alike_in_every_run():
    table, indices = r(50, 16), torch.randint(50, (4000,))
    compiled = torch.compile(lambda t, i: F.embedding(i, t), backend="ort_train")
    cotangent = torch.randn(4000, 16)
    runs = [torch.autograd.grad(compiled(table, indices), table, cotangent)[0] for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    expected = torch.zeros(50, 16).index_add(0, indices, cotangent)
    torch.testing.assert_close(runs[0], expected, rtol=1e-4, atol=1e-4)


def test_a_row_of_nan_gradients_stays_a_row():
    table = r(7, 4)
    scale = torch.ones(2, 3, 1)
    scale[0, 1] = float("nan")
    assert_like_eager(lambda t, i, s: F.embedding(i, t, padding_idx=0) * s, table, INDICES, scale)


def test_tied_embedding_and_projection_equal_eager():
    assert_like_eager(lambda t, i: F.embedding(i, t) @ t.T, r(7, 4), INDICES)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_cut_to_a_greatest_norm_equal_eager(norm_type, dtype):
    def function(table, indices, scale):
        return F.embedding(indices, table, max_norm=1.5, norm_type=norm_type) * scale

    # The table is changed in place, so it cannot require a gradient of its own here.
    assert_like_eager(function, torch.randn(7, 4, dtype=dtype), INDICES, r(1, dtype=dtype))
