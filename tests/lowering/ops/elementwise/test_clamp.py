"""Clamps, interpolation, fused multiply-adds."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan])


@pytest.mark.parametrize(
    ("low", "high"), [(-0.5, 0.5), (None, 0.3), (-0.2, None), (1.0, -1.0), (0, 1), (-math.inf, 0.0)]
)
def test_clamp_to_numbers_equals_eager(low, high):
    assert_like_eager(lambda x: torch.clamp(x, low, high), torch.randn(3, 5, requires_grad=True))
    n = torch.arange(-4, 5)
    assert_like_eager(
        lambda e, n, h: (torch.clamp(e, low, high), torch.clamp(n, low, high), torch.clamp(h, low, high)),
        EDGES, n, torch.randn(6).half(), gradients=False,
    )  # fmt: skip


def test_clamp_to_nan_is_nan():
    function = lambda x: (torch.clamp(x, math.nan, 1.0), torch.nn.functional.hardtanh(x, -1.0, math.nan))  # noqa: E731
    assert_like_eager(function, EDGES, gradients=False)


def test_clamp_to_tensors_equals_eager():
    x, low, high = (torch.randn(4, 5, requires_grad=True) for _ in range(3))
    assert_like_eager(torch.clamp, x, low, high)
    assert_like_eager(lambda x, low, high: (x.clamp(min=low), x.clamp(max=high[0])), x, low, high, dynamic=True)
    assert_like_eager(lambda e, b: (e.clamp_min(b), e.clamp_max(b)), EDGES, EDGES.flip(0), gradients=False)


def test_clamp_min_and_max_equal_eager():
    assert_like_eager(lambda x: (x.clamp_min(0.1), x.clamp_max(0)), torch.randn(3, 5, requires_grad=True))
    assert_like_eager(lambda n: (n.clamp_min(1), n.clamp_max(0.5)), torch.arange(-4, 5), gradients=False)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_lerp_by_a_number_equals_eager(weight):
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    assert_like_eager(lambda a, b: torch.lerp(a, b, weight), a, b)


def test_lerp_by_a_tensor_equals_eager():
    a, b, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.rand(3, 1)
    assert_like_eager(torch.lerp, a, b, w.requires_grad_())
    assert_like_eager(torch.lerp, a.half().detach(), b.half().detach(), w.half().detach(), gradients=False)


@pytest.mark.parametrize("function", [torch.addcmul, torch.addcdiv])
@pytest.mark.parametrize("value", [1, -0.3])
def test_fused_multiply_add_equals_eager(function, value):
    a, b, c = torch.randn(3, 4), torch.randn(4), torch.rand(3, 1) + 0.3
    assert_like_eager(
        lambda a, b, c: function(a, b, c, value=value), a.requires_grad_(), b.requires_grad_(), c.requires_grad_()
    )
    assert_like_eager(
        lambda a, b, c: function(a, b, c, value=value), *(t.detach().half() for t in (a, b, c)), gradients=False
    )


def test_clamps_of_great_integers_between_numbers_equal_eager():
    n = torch.tensor([0, 1, 2**31, -(2**31), 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**32 + 5])
    assert_like_eager(
        lambda n: (
            n.clamp(0, 2**40),
            n.clamp(-(2**53), 2**53),
            n.clamp(5, 2),
            n.clamp(0, 2**53 + 1),
            n.clamp(-(2**53) - 1, 2**63 - 1),
        ),
        n,
        gradients=False,
    )


@pytest.mark.parametrize("bound", [0.5, -math.inf, math.nan])
def test_clamp_to_a_number_that_is_known_at_run_time_equals_eager(bound):
    def function(x, n):
        number = n.item()
        hardtanh = torch.ops.aten.hardtanh(x, -1, number)
        return x.clamp(min=number), x.clamp(max=number), x.clamp(-1, number), hardtanh

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_like_eager(function, EDGES, torch.tensor(bound), gradients=False, allow_eager=True)  # item() itself
