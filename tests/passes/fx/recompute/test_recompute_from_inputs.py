"""Recomputing pointwise operators whose arguments are saved: a joint graph in, tags out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint_graphs import assert_tags, saved_bytes, weight
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.fx_testing import assert_fx_untouched
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.recompute.recompute_from_inputs import RecomputeFromInputs

Capture = Callable[..., GraphModule]


def test_a_result_of_a_graphs_input_is_recomputed(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.exp().sum(), weight(4, 4))  # exp's gradient reads its result
    assert saved_bytes(gm) == 4 * 16
    assert_tags(
        RecomputeFromInputs(),
        gm,
        """
        exp = aten.exp.default(primals_1)  # f32[4, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(exp)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 0


def test_a_result_of_a_saved_tensor_is_recomputed(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        before = x @ w
        return (torch.sigmoid(before) * before.sin()).sum()  # sin keeps the product, and so sigmoid need not be kept

    gm = joint_graph(function, weight(2, 3), weight(3, 4))
    without = saved_bytes(gm)
    assert_tags(
        RecomputeFromInputs(),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 4]
        sigmoid = aten.sigmoid.default(mm)  # f32[2, 4] | MUST_RECOMPUTE | gate
        sin = aten.sin.default(mm)  # f32[2, 4] | MUST_RECOMPUTE
        mul = aten.mul.Tensor(sigmoid, sin)  # f32[2, 4]
        sum = aten.sum.default(mul)  # f32[]
        """,
    )
    assert saved_bytes(gm) == without - 2 * 4 * 8


def test_a_result_of_an_unsaved_tensor_stays_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: torch.tanh(x @ w).sum(), weight(2, 3), weight(3, 4))
    assert_fx_untouched(RecomputeFromInputs(), gm)


def test_a_chain_is_recomputed_only_from_a_saved_argument(joint_graph: Capture) -> None:
    # Both results are saved without the pass. The second one's argument is the first, which is recomputed itself.
    gm = joint_graph(lambda x: x.exp().tanh().sum(), weight(4))
    assert_tags(
        RecomputeFromInputs(),
        gm,
        """
        exp = aten.exp.default(primals_1)  # f32[4] | MUST_RECOMPUTE
        tanh = aten.tanh.default(exp)  # f32[4]
        sum = aten.sum.default(tanh)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 4 * 4


def test_other_operators_than_pointwise_ones_stay_saved(joint_graph: Capture) -> None:
    assert_fx_untouched(RecomputeFromInputs(), joint_graph(lambda x: torch.softmax(x, 0).square().sum(), weight(4)))
    assert_fx_untouched(RecomputeFromInputs(), joint_graph(lambda x: torch.cumsum(x, 0).sin().sum(), weight(4)))


def test_a_result_that_the_program_gets_lives_anyway(joint_graph: Capture) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x.exp()
        return made, made * 2

    assert_fx_untouched(RecomputeFromInputs(), joint_graph(function, weight(4)))


def test_views_of_a_result_are_recomputed_with_it(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (x.exp().t() @ w).sum(), weight(3, 2), weight(3, 4))
    assert_tags(
        RecomputeFromInputs(),
        gm,
        """
        exp = aten.exp.default(primals_1)  # f32[3, 2] | MUST_RECOMPUTE
        t = aten.t.default(exp)  # f32[2, 3] strides (1, 2) | MUST_RECOMPUTE
        mm = aten.mm.default(t, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 0


def test_a_random_mask_is_not_recomputed(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: torch.nn.functional.dropout(x, 0.5).sum(), weight(4))
    assert_fx_untouched(RecomputeFromInputs(), gm)


def test_tags_of_a_checkpoint_policy_stay(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.exp().sum(), weight(4))
    (node,) = [node for node in JointGraph(gm).forward if node.name == "exp"]
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert_fx_untouched(RecomputeFromInputs(), gm)
