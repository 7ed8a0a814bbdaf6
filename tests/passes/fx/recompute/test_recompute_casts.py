"""Casts across the boundary between forward and backward: a joint graph in, tags out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint_graphs import assert_tags, saved_bytes, weight
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.fx_testing import assert_fx_untouched
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.recompute.recompute_casts import RecomputeCasts

Capture = Callable[..., GraphModule]


def test_the_narrow_side_of_a_widening_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x * x).float().exp().sin().sum(), weight(4, 4, dtype=torch.bfloat16))
    before = saved_bytes(gm)
    # exp's gradient reads its result, sin's its input: neither reads the cast.
    assert_fx_untouched(RecomputeCasts(()), gm)
    gm = joint_graph(lambda x: (x * x).float().sin().sum(), weight(4, 4, dtype=torch.bfloat16))
    before = saved_bytes(gm)
    assert_tags(
        RecomputeCasts(()),
        gm,
        """
        mul = aten.mul.Tensor(primals_1, primals_1)  # bf16[4, 4]
        _to_copy = aten._to_copy.default(mul, dtype=f32)  # f32[4, 4] | MUST_RECOMPUTE
        sin = aten.sin.default(_to_copy)  # f32[4, 4]
        sum = aten.sum.default(sin)  # f32[]
        """,
    )
    assert (before, saved_bytes(gm)) == (4 * 16, 2 * 16)


def test_views_of_the_widened_tensor_are_recomputed_with_it(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x * x).float().t().sin().sum(), weight(2, 4, dtype=torch.float16))
    assert_tags(
        RecomputeCasts(()),
        gm,
        """
        mul = aten.mul.Tensor(primals_1, primals_1)  # f16[2, 4]
        _to_copy = aten._to_copy.default(mul, dtype=f32)  # f32[2, 4] | MUST_RECOMPUTE
        t = aten.t.default(_to_copy)  # f32[4, 2] strides (1, 4) | MUST_RECOMPUTE
        sin = aten.sin.default(t)  # f32[4, 2] strides (1, 4)
        sum = aten.sum.default(sin)  # f32[]
        """,
    )


def test_a_widened_tensor_that_is_returned_lives_anyway(joint_graph: Capture) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x * x).float()
        return wide, wide.sin()

    assert_fx_untouched(RecomputeCasts(()), joint_graph(function, weight(4, dtype=torch.bfloat16)))


def test_a_narrowed_activation_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.exp().bfloat16().sin().sum(), weight(4))
    assert_fx_untouched(RecomputeCasts(()), gm)


def test_a_parameter_is_saved_and_not_its_cast(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.bfloat16()).sum()

    inputs = (weight(2, 3, dtype=torch.bfloat16), weight(3, 4))
    assert_fx_untouched(RecomputeCasts(()), joint_graph(function, *inputs))  # an activation may be freed
    gm = joint_graph(function, *inputs)  # torch orders inputs by their first reader
    assert_tags(
        RecomputeCasts((0,)),
        gm,
        """
        _to_copy = aten._to_copy.default(primals_1, dtype=bf16)  # bf16[3, 4] | MUST_RECOMPUTE
        mm = aten.mm.default(primals_2, _to_copy)  # bf16[2, 4]
        sum = aten.sum.default(mm)  # bf16[]
        """,
    )


def test_an_integer_cast_is_left_alone(joint_graph: Capture) -> None:
    tokens = torch.ones(4, dtype=torch.int32)
    gm = joint_graph(lambda x, t: (x * t.float()).sum(), weight(4), tokens)
    assert_fx_untouched(RecomputeCasts((1,)), gm)


def test_a_number_that_vmap_casts_is_left_alone(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: torch.vmap(torch.vmap(lambda row: row.sin() * 2))(x).sum(), weight(3, 4))
    assert any(node.args[0] == 2 for node in JointGraph(gm).forward if node.name.startswith("_to_copy"))
    assert_fx_untouched(RecomputeCasts(()), gm)


def test_tags_of_a_checkpoint_policy_stay(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x * x).float().sin().sum(), weight(4, dtype=torch.bfloat16))
    (cast,) = [node for node in JointGraph(gm).forward if node.name == "_to_copy"]
    cast.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert_fx_untouched(RecomputeCasts(()), gm)
