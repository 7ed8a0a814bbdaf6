"""Losses entry by entry, their reductions and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager

REDUCTIONS = ["none", "mean", "sum"]


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.7),
    "smooth_l1 without a smooth part": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.0),
    "huber": lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.6),
    "l1": F.l1_loss,
    "soft_margin": lambda x, t, reduction: F.soft_margin_loss(x, t, reduction=reduction),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_both_gradients_equal_eager(name, reduction):
    both = name != "soft_margin"  # torch has no gradient by its target
    for dynamic in (False, True):
        assert_like_eager(
            lambda x, t: LOSSES[name](x, t, reduction=reduction),
            r(4, 5),
            r(4, 5) if both else r(4, 5).detach(),
            dynamic=dynamic,
        )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_at_the_joints_equals_eager(name):
    x = torch.tensor([0.0, 0.7, -0.7, 0.6, -0.6, 5.0, -5.0, math.inf, math.nan], requires_grad=True)
    t = torch.ones(9) if name == "soft_margin" else torch.zeros(9)
    assert_like_eager(lambda x, t: LOSSES[name](x, t, reduction="none"), x, t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loss_of_other_dtypes_equals_eager(dtype):
    def function(x, t):
        return [loss(x, t, reduction="mean") for loss in LOSSES.values()]

    assert_like_eager(function, r(6, 7, dtype=dtype), r(6, 7, dtype=dtype).detach())


def test_loss_of_mixed_dtypes_equals_eager():
    assert_like_eager(lambda x, t: F.mse_loss(x, t), r(3, 4), torch.randn(3, 4, dtype=torch.float64))


def test_mean_over_nothing_is_nan():
    assert_like_eager(
        lambda x, t: (F.mse_loss(x, t), F.mse_loss(x, t, reduction="sum")), *[torch.empty(0, 3)] * 2, gradients=False
    )


def test_large_sums_stay_precise():
    x = torch.full((2000, 500), 0.1**0.5, requires_grad=True)
    assert_like_eager(lambda x: F.mse_loss(x, torch.zeros(2000, 500), reduction="sum"), x)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_equals_eager(reduction):
    def function(x, t, w):
        p = x.sigmoid()
        return F.binary_cross_entropy(p, t, reduction=reduction), F.binary_cross_entropy(p, t, w, reduction=reduction)

    assert_like_eager(function, r(4, 5), torch.rand(4, 5), torch.rand(5))
    assert_like_eager(function, r(4, 5), torch.rand(4, 5), torch.rand(4, 5), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_of_a_half_type_equals_eager(reduction, dtype):
    p = torch.rand(4, 5).to(dtype).requires_grad_()
    assert_like_eager(lambda p, t: F.binary_cross_entropy(p, t, reduction=reduction), p, torch.rand(4, 5).to(dtype))


def test_binary_cross_entropy_of_certainties_equals_eager():
    p = torch.tensor([0.0, 1, 0, 1, 1e-9, 1e-3, 0.5], requires_grad=True)
    t = torch.tensor([0.0, 1, 1, 0, 0, 0, 1])
    assert_like_eager(lambda p, t: F.binary_cross_entropy(p, t, reduction="none"), p, t)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_with_logits_equals_eager(reduction):
    def function(x, t, w, p):
        return (
            F.binary_cross_entropy_with_logits(x, t, reduction=reduction),
            F.binary_cross_entropy_with_logits(x, t, w, reduction=reduction),
            F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p, reduction=reduction),
        )

    for dynamic in (False, True):
        assert_like_eager(function, r(4, 5), torch.rand(4, 5), torch.rand(5), torch.rand(4, 1), dynamic=dynamic)


def test_binary_cross_entropy_of_large_logits_equals_eager():
    x = torch.tensor([100.0, -100, 1e4, -1e4, 0, -20, math.inf, -math.inf], requires_grad=True)
    t = torch.tensor([1.0, 0, 1, 1, 0.5, 1, 0.5, 0.5])
    assert_like_eager(lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"), x, t)


def test_losses_that_torch_decomposes_equal_eager():
    def function(x, y, t):
        return (
            F.kl_div(x, t),
            F.kl_div(x, t.log(), reduction="batchmean", log_target=True),
            F.multi_margin_loss(x, torch.tensor([0, 1, 3])),
            F.poisson_nll_loss(x, t),
            F.cosine_embedding_loss(x, y, torch.tensor([1.0, -1, 1])),
            F.triplet_margin_loss(x, y, t),
            F.hinge_embedding_loss(x, torch.ones(3, 4)),
            F.margin_ranking_loss(x, y, torch.ones(3, 4)),
        )

    with pytest.warns(UserWarning, match="reduction"):
        assert_like_eager(function, r(3, 4), r(3, 4), torch.rand(3, 4))


def test_soft_margin_of_float16_overflows_as_in_eager():
    x = torch.tensor([-20.0, 3.0, 20.0], dtype=torch.float16)
    assert_like_eager(F.soft_margin_loss, x, torch.ones_like(x), gradients=False)


def test_binary_cross_entropy_with_logits_of_float64_equals_eager():
    x = torch.tensor([-800.0, -40.0, 0.0, 1e-9, 40.0, 800.0], dtype=torch.float64, requires_grad=True)
    t = torch.rand(6, dtype=torch.float64)
    assert_like_eager(lambda x: F.binary_cross_entropy_with_logits(x, t, reduction="none"), x)


def test_smooth_losses_of_infinities_and_nan_equal_eager():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, 0.0, 0.7, -0.7, 0.0])
    assert_like_eager(
        lambda x: (
            F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none", beta=0.7),
            F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.7),
        ),
        x,
        gradients=False,
    )


MARGINS = {
    "padded labels": (F.multilabel_margin_loss, r(3, 4), [[3, 0, -1, 1], [-1, 2, 1, 1], [0, 1, 2, 3]]),
    "padded labels, one row": (F.multilabel_margin_loss, r(4), [3, 3, -1, 1]),
    "labels at the margin": (F.multilabel_margin_loss, [[0.0, 1, -1, 0], [2, 2, 2, 1]], [[1, -1, 0, 0], [0, 3, -1, 2]]),
    "labels beside nan": (F.multilabel_margin_loss, [[0, math.nan, 1], [math.inf, 0, 1]], [[0, -1, 1], [2, -1, 0]]),
    "one label": (F.multi_margin_loss, r(3, 4), [3, 0, 1]),
    "one label, one row": (F.multi_margin_loss, r(4), 2),
    "one label at the margin": (F.multi_margin_loss, [[0.0, 1, -1, 0.5], [2, 2, 2, 1]], [1, 0]),
    "one label beside nan": (F.multi_margin_loss, [[0, math.nan, 1], [math.inf, 0, 1]], [0, 1]),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", MARGINS)
def test_margin_losses_over_classes_equal_eager(name, reduction):
    loss, x, labels = MARGINS[name]
    x, labels = torch.as_tensor(x), torch.tensor(labels)
    x = x.detach().requires_grad_()
    for dynamic in (False, True):
        assert_like_eager(lambda x, t: loss(x, t, reduction=reduction), x, labels, dynamic=dynamic)


def test_powers_and_weights_of_margin_losses_equal_eager():
    x = torch.tensor([[0.0, math.nan, -3.0], [math.inf, 0.5, 1.0], [0.1, 0.2, 1.1]], requires_grad=True)
    labels, weight = torch.tensor([0, 1, 2]), torch.rand(3)
    assert_like_eager(lambda x: F.multi_margin_loss(x, labels, p=2, margin=0.5, weight=weight), x)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_margin_losses_without_gradients_equal_eager(around):
    labels = torch.tensor([[3, 0, -1, 1], [-1, 2, 1, 1]])
    first = torch.tensor([3, 0])
    both = around()(lambda x: (F.multilabel_margin_loss(x, labels), F.multi_margin_loss(x, first)))
    assert_like_eager(both, r(2, 4).detach(), gradients=False)


@pytest.mark.parametrize("labels", [[-2, 0, 1], [3, 0, 1], [-1, 3, 1], [-1, -2, 0]])
def test_margin_losses_refuse_labels_that_are_no_class(labels):
    labels = torch.tensor(labels)
    with pytest.raises(RuntimeError, match="out of range"):
        F.multilabel_margin_loss(torch.zeros(3), labels)
    compiled = torch.compile(lambda x, t: F.multilabel_margin_loss(x, t), backend="ort_train")
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(r(3), labels)


@pytest.mark.parametrize(("sizes", "labels"), [((2, 0), (2, 0)), ((1, 2, 3), (1, 2, 3)), ((2, 3), (2, 2))])
def test_margin_losses_refuse_wrong_shapes(sizes, labels):
    x, labels = torch.zeros(sizes), torch.zeros(labels, dtype=torch.long)
    for run in (lambda x, t: F.multilabel_margin_loss(x, t), lambda x, t: F.multi_margin_loss(x, t)):
        with pytest.raises(RuntimeError) as expected:
            run(x, labels)
        with pytest.raises(RuntimeError, match=str(expected.value)[:12]):
            torch.compile(run, backend="ort_train")(x, labels)
