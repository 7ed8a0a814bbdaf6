"""Casts across the boundary between forward and backward: a joint graph in, tags out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint_graphs import kept_bytes, tagged_by, weight
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.recompute_casts import RecomputeCasts

Capture = Callable[..., GraphModule]


def recomputed(gm: GraphModule, *static: int) -> list[str]:
    return tagged_by(RecomputeCasts(static), gm)


def test_the_narrow_side_of_a_widening_is_kept(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x * x).float().exp().sin().sum(), weight(4, 4, dtype=torch.bfloat16))
    before = kept_bytes(gm)
    assert recomputed(gm) == []  # exp's gradient reads its result, sin's its input: neither reads the cast
    gm = joint_graph(lambda x: (x * x).float().sin().sum(), weight(4, 4, dtype=torch.bfloat16))
    before = kept_bytes(gm)
    assert recomputed(gm) == ["_to_copy"]
    assert (before, kept_bytes(gm)) == (4 * 16, 2 * 16)


def test_views_of_the_widened_tensor_are_made_again_with_it(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x * x).float().t().sin().sum(), weight(2, 4, dtype=torch.float16))
    assert recomputed(gm) == ["_to_copy", "t"]


def test_a_widened_tensor_that_is_returned_lives_anyway(joint_graph: Capture) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x * x).float()
        return wide, wide.sin()

    assert recomputed(joint_graph(function, weight(4, dtype=torch.bfloat16))) == []


def test_a_narrowed_activation_is_kept(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.exp().bfloat16().sin().sum(), weight(4))
    assert recomputed(gm) == []


def test_a_parameter_is_kept_and_not_its_copy(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.bfloat16()).sum()

    inputs = (weight(2, 3, dtype=torch.bfloat16), weight(3, 4))
    assert recomputed(joint_graph(function, *inputs), 0) == ["_to_copy"]  # torch puts what is read first first
    assert recomputed(joint_graph(function, *inputs)) == []  # an activation of an earlier graph may be freed


def test_an_integer_cast_is_left_alone(joint_graph: Capture) -> None:
    tokens = torch.ones(4, dtype=torch.int32)
    gm = joint_graph(lambda x, t: (x * t.float()).sum(), weight(4), tokens)
    assert recomputed(gm, 1) == []


def test_what_a_checkpoint_policy_decided_stays(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x * x).float().sin().sum(), weight(4, dtype=torch.bfloat16))
    (cast,) = [node for node in JointGraph(gm).forward if node.name == "_to_copy"]
    cast.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert recomputed(gm) == []
