"""A log-softmax becomes arithmetic, and the backward saves two numbers a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import recomputed, saved_bytes, weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.expand_log_softmax import ExpandLogSoftmax
from ort_dynamo.passes.fx.recompute.recompute_pointwise import RecomputePointwise
from ort_dynamo.testing import TOLERANCES

Capture = Callable[..., GraphModule]

aten = torch.ops.aten


def traced(function: Callable[[Tensor], Tensor], x: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(x)


def test_a_log_softmax_becomes_arithmetic() -> None:
    assert_fx_rewrites(
        ExpandLogSoftmax(7),
        """
        x: f32[4, 7]
        _log_softmax = aten._log_softmax.default(x, -1, False)  # f32[4, 7]
        return _log_softmax
        """,
        """
        x: f32[4, 7]
        amax = aten.amax.default(x, [-1], True)  # f32[4, 1] | ignores_nan
        sub = aten.sub.Tensor(x, amax)  # f32[4, 7]
        exp = aten.exp.default(sub)  # f32[4, 7]
        sum = aten.sum.dim_IntList(exp, [-1], True)  # f32[4, 1]
        log = aten.log.default(sum)  # f32[4, 1]
        sub_1 = aten.sub.Tensor(sub, log)  # f32[4, 7]
        return sub_1
        """,
        tolerance=TOLERANCES[torch.float32],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf"), -float("inf")])
def test_the_numbers_are_those_of_the_operator(dtype: torch.dtype, odd: float) -> None:
    x = torch.randn(4, 7, dtype=dtype) * 30
    x[1, 3] = odd
    x[2] = -float("inf")
    gm = traced(lambda x: aten._log_softmax.default(x, -1, False), x)
    assert run_twice(ExpandLogSoftmax(7), gm)
    torch.testing.assert_close(gm(x), F.log_softmax(x, -1), equal_nan=True)
    without = torch.where(x.isnan(), -float("inf"), x).amax(-1, keepdim=True)  # a maximum that loses NaN
    shifted = x - without
    lost = shifted - shifted.exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(lost, F.log_softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten._log_softmax.default(x, 0, False),
        lambda x: aten._log_softmax.default(x.bfloat16(), 1, False),
        lambda x: aten._log_softmax.default(x[:, :1], 1, False),
        lambda x: aten._log_softmax.default(torch.cat([x, x], 1), 1, False),
        lambda x: aten._log_softmax.default(x[0, 0], 0, False),
        lambda x: aten._softmax.default(x, 1, False),
    ],
    ids=["another axis", "a half type", "one column", "too many columns", "a scalar", "a softmax"],
)
def test_others_stay(function: Callable[[Tensor], Tensor]) -> None:
    assert_fx_untouched(ExpandLogSoftmax(7), traced(function, torch.randn(4, 7)))


def loss(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy((x @ w).bfloat16().float(), torch.arange(8))


def test_the_backward_keeps_the_logits_and_two_numbers_a_row(joint_graph: Capture) -> None:
    gm = joint_graph(loss, weight(8, 4), weight(4, 64))
    beside = 8 * 8 + 4  # the targets, and how many count
    assert saved_bytes(gm) == 4 * 8 * 64 + beside
    assert run_twice(ExpandLogSoftmax(64), gm)
    assert run_twice(RecomputePointwise(), gm)
    assert saved_bytes(gm) == 2 * 8 * 64 + 2 * 4 * 8 + beside
    assert recomputed(gm)


def test_a_matmuls_input_stays_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: ((x.bfloat16().float() + 1) @ w).sum(), weight(8, 4), weight(4, 4))
    before = saved_bytes(gm)
    assert_fx_untouched(RecomputePointwise(), gm)
    assert saved_bytes(gm) == before


def test_a_result_is_not_recomputed_from_inputs_of_as_many_bytes(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, y: (x @ y + y @ x).exp().sum(), weight(8, 8), weight(8, 8))
    assert_fx_untouched(RecomputePointwise(), gm)


def test_a_result_is_not_recomputed_from_saved_inputs_of_as_many_bytes(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, y: ((x @ y).sin() + (y @ x).sin()).exp().sum(), weight(8, 8), weight(8, 8))
    assert_fx_untouched(RecomputePointwise(), gm)


def test_the_backward_adds_a_bias_to_the_logits_again(joint_graph: Capture) -> None:
    """The forward writes the matmul's result anyway, but need not write the sum."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        logits = x.bfloat16() @ w.bfloat16() + b.bfloat16()
        return F.cross_entropy(logits.float(), torch.arange(256) % 64)

    gm = joint_graph(loss, weight(256, 4), weight(4, 64), weight(64))
    run_twice(ExpandLogSoftmax(64), gm)
    run_twice(RecomputePointwise(), gm)
    joint = JointGraph(gm)
    saved = {node.name for one in joint.cut(joint.tagged()).saved for node in one.nodes}
    assert "mm" in saved
    assert not {name for name in saved if name.startswith("add")}
