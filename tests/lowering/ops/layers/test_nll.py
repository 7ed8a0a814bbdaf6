"""Negative log-likelihood and cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager

REDUCTIONS = ["none", "mean", "sum"]


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


CASES = {
    "batch": (lambda: r(5, 4), lambda: torch.tensor([0, 1, 2, 3, 2])),
    "one sample": (lambda: r(4), lambda: torch.tensor(3)),
    "sequence": (lambda: r(3, 4, 6), lambda: torch.randint(4, (3, 6))),
    "image": (lambda: r(3, 4, 2, 5), lambda: torch.randint(4, (3, 2, 5))),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_cross_entropy_equals_eager(case, weighted, reduction):
    make, targets = CASES[case]
    weight = torch.rand(4) if weighted else None

    def function(x, t, w):
        return F.cross_entropy(x, t, w, reduction=reduction, ignore_index=2)

    assert_like_eager(function, make(), targets(), weight)
    if case != "one sample":
        assert_like_eager(function, make(), targets(), weight, dynamic=True)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_total_weight_equals_eager(weighted, reduction):
    weight = torch.rand(4) if weighted else None
    t = torch.tensor([0, 1, -100, 3])
    image = torch.randn(4, 4, 2, 3)
    aten = torch.ops.aten

    def function(x, t, w):
        return (
            aten.nll_loss_forward(x, t, w, reduction, -100),
            aten.nll_loss_forward(x[:2], t[:2], w, reduction, 1),
            aten.nll_loss2d_forward(image, t[:, None, None].expand(4, 2, 3), w, reduction, -100),
            aten.nll_loss_forward(x[0], t[1], w, reduction, -100),
        )

    assert_like_eager(function, torch.randn(4, 4), t, weight, gradients=False)


def test_mean_over_ignored_targets_is_nan_and_its_gradient_zero():
    assert_like_eager(lambda x, t: F.cross_entropy(x, t), r(3, 4), torch.full((3,), -100))


def test_ignored_rows_may_hold_nan():
    x = torch.randn(3, 4)
    x[1] = float("nan")
    assert_like_eager(lambda x, t: F.nll_loss(x, t), x.requires_grad_(), torch.tensor([0, -100, 3]))


def test_loss_over_no_rows_equals_eager():
    def function(x, t):
        return F.nll_loss(x, t), F.nll_loss(x, t, reduction="sum"), F.nll_loss(x, t, reduction="none")

    assert_like_eager(function, torch.randn(0, 4), torch.zeros(0, dtype=torch.int64), gradients=False)


def test_label_smoothing_equals_eager():
    def function(x, t, w):
        return F.cross_entropy(x, t, label_smoothing=0.1), F.cross_entropy(x, t, w, label_smoothing=0.1)

    assert_like_eager(function, r(5, 4), torch.tensor([0, 1, -100, 3, 3]), torch.rand(4))


def test_cross_entropy_with_probabilities_equals_eager():
    assert_like_eager(lambda x, t: F.cross_entropy(x, t), r(5, 4), torch.rand(5, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_cross_entropy_of_other_dtypes_equals_eager(dtype):
    assert_like_eager(lambda x, t: F.cross_entropy(x, t), r(30, 40, dtype=dtype), torch.randint(40, (30,)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("target", [torch.tensor(2), torch.tensor([2, 0, 1])], ids=["one", "several"])
@pytest.mark.parametrize("grad", [torch.tensor(2.0), torch.tensor([2.0])], ids=["scalar", "vector"])
def test_the_gradient_of_one_sample_reads_the_first_target(reduction, target, grad):
    def function(grad, x, t, w):
        return torch.ops.aten.nll_loss_backward(grad, x, t, w, reduction, 1, torch.tensor(4.0))

    assert_like_eager(function, grad, torch.randn(3), target, torch.tensor([1.0, 2.0, 4.0]), gradients=False)
