"""embedding_bag and its gradients."""

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager, eager_reasons

INDICES = torch.tensor([0, 1, 6, 1, 2, 1, 5, 5])
OFFSETS = torch.tensor([0, 3, 3, 4, 8])  # the second bag and the last one are empty


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 1, -2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_bags_and_gradient_equal_eager(mode, padding_idx, dynamic):
    def function(table, indices, offsets):
        return (
            F.embedding_bag(indices, table, offsets, mode=mode, padding_idx=padding_idx),
            F.embedding_bag(indices, table * 2, offsets, mode=mode, padding_idx=padding_idx, include_last_offset=True),
        )

    assert_like_eager(function, r(7, 4), INDICES, OFFSETS, dynamic=dynamic)


def test_a_gradient_scaled_by_frequency_stays_in_eager():
    # torch divides by the count of another row than the entry's; that is not ours to repeat.
    def function(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode="sum", scale_grad_by_freq=True)

    assert_like_eager(function, r(7, 4), INDICES, OFFSETS, allow_eager=True)
    assert any("divides by the count of another row" in reason for reason in eager_reasons())


@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights_of_samples_and_their_gradient_equal_eager(padding_idx, dtype):
    def function(table, weights, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode="sum", per_sample_weights=weights, padding_idx=padding_idx)

    assert_like_eager(function, r(7, 4, dtype=dtype), r(8, dtype=dtype), INDICES, OFFSETS)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_without_entries_equal_eager(mode):
    def function(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode=mode)

    assert_like_eager(function, r(7, 4), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_bags_equal_eager(mode, padding_idx, dynamic):
    def function(table, indices):
        return F.embedding_bag(indices, table, mode=mode, padding_idx=padding_idx)

    assert_like_eager(function, r(7, 4), torch.zeros(0, 3, dtype=torch.int64), dynamic=dynamic)


@pytest.mark.parametrize("padding_idx", [None, 5])
def test_the_gradient_of_no_weights_equals_eager(padding_idx):
    def function(table, weights, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode="sum", per_sample_weights=weights, padding_idx=padding_idx)

    assert_like_eager(function, r(7, 4), r(0), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size_with_int32_indices_equal_eager(mode):
    assert_like_eager(lambda t, i: F.embedding_bag(i, t, mode=mode), r(7, 4), INDICES.int().reshape(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_first_of_equal_entries_is_the_maximum(dtype):
    # torch's kernel replaces the first entry by greater ones: a first nan stays, any other is passed over.
    nan = float("nan")
    table = torch.tensor([[1.0, nan], [1.0, 3.0], [nan, 3.0], [-torch.inf, torch.inf]], dtype=dtype)
    bags = torch.tensor([[0, 1, 2], [2, 1, 0], [3, 2, 3]])
    assert_like_eager(lambda t, i: F.embedding_bag(i, t, mode="max"), table.requires_grad_(), bags)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding_idx", [-1, 1])
def test_all_four_results_equal_eagers(mode, padding_idx):
    # Those that the backward reads; the bags' sizes are zeros where it reads none.
    def function(table, indices, offsets):
        return torch.ops.aten._embedding_bag(table, indices, offsets, False, mode, False, None, False, padding_idx)

    assert_like_eager(function, torch.randn(7, 4), INDICES, OFFSETS, gradients=False)


def test_bags_that_share_their_indices_equal_eager():
    rows, starts = torch.tensor([0, 2, 5, 2, 2, 1, 0, 3]), torch.tensor([0, 3, 3, 6])

    def function(weight):
        return [F.embedding_bag(rows, weight, starts, mode=mode) for mode in ("sum", "mean", "max")]

    assert_like_eager(function, torch.randn(6, 4, requires_grad=True))
