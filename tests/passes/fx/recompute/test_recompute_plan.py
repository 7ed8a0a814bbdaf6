"""recompute_plan: a joint graph in, tags out; and beside each match its nearest non-match."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import assert_tags, recomputed, weight
from run_twice import run_twice
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.fx_testing import assert_fx_untouched
from ort_dynamo.options.plan_grammar import read_plans
from ort_dynamo.passes.fx.analysis.operator_names import NAMES
from ort_dynamo.passes.fx.analysis.plans import find_candidates, plan_rows
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, must_recompute
from ort_dynamo.passes.fx.recompute.recompute_plan import RecomputePlan

Capture = Callable[..., GraphModule]


def plan(*plans: str) -> RecomputePlan:
    return RecomputePlan(read_plans(plans))


def clusters(gm: GraphModule) -> list[str]:
    return [f"{one.cluster}:{one.type.value}" for one in find_candidates(JointGraph(gm))]


def kept(gm: GraphModule) -> dict[str, int]:
    joint = JointGraph(gm)
    return {one.nodes[0].name: one.nbytes for one in joint.cut([n for n in joint.forward if must_recompute(n)]).saved}


# -- type 1 ------------------------------------------------------------------------------------------------------


def test_a_cluster_holds_the_operators_to_recompute_from_saved_tensors(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) @ w).sum(), weight(2, 3), weight(3, 4))
    assert clusters(gm) == ["Gelu+:1"]
    assert_tags(
        plan("Gelu+:1:-1"),
        gm,
        """
        gelu = aten.gelu.default(primals_1)  # f32[2, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(gelu, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )
    assert kept(gm) == {}


def test_a_longer_cluster_is_not_matched_by_its_end(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: ((F.gelu(x) + 1) @ w).sum(), weight(2, 3), weight(3, 4))
    assert clusters(gm) == ["Gelu+Add+:1"]
    with pytest.warns(UserWarning, match=r"'Add\+:1:-1' matches nothing in a graph that has 'Gelu\+Add\+:1:-1';"):
        assert not RecomputePlan(read_plans("Add+:1:-1"))(gm).modified  # type: ignore[union-attr]
    assert recomputed(gm) == []
    assert_tags(
        plan("Gelu+Add+:1:-1"),
        gm,
        """
        gelu = aten.gelu.default(primals_1)  # f32[2, 3] | MUST_RECOMPUTE
        add = aten.add.Tensor(gelu, 1)  # f32[2, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(add, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )


def test_a_cluster_stops_at_a_saved_tensor(joint_graph: Capture) -> None:
    # Tanh's gradient reads its result: the cluster of the second tensor starts from there.
    gm = joint_graph(lambda x, w: ((torch.tanh(x) * 2).exp() @ w).sum(), weight(2, 3), weight(3, 4))
    assert clusters(gm) == ["Tanh+:1", "Mul+Exp+:1"]
    assert_tags(
        plan("Mul+Exp+:1:-1"),
        gm,
        """
        tanh = aten.tanh.default(primals_1)  # f32[2, 3]
        mul = aten.mul.Tensor(tanh, 2)  # f32[2, 3] | MUST_RECOMPUTE
        exp = aten.exp.default(mul)  # f32[2, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(exp, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )
    assert kept(gm) == {"tanh": 24}


def test_views_have_no_name_and_are_recomputed_with_their_base(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) @ w).sum(), weight(2, 2, 3), weight(3, 4))
    assert clusters(gm) == ["Gelu+:1"]
    assert_tags(
        plan("Gelu+:1:-1"),
        gm,
        """
        gelu = aten.gelu.default(primals_1)  # f32[2, 2, 3] | MUST_RECOMPUTE
        view = aten.view.default(gelu, [4, 3])  # f32[4, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(view, primals_2)  # f32[4, 4]
        _unsafe_view = aten._unsafe_view.default(mm, [2, 2, 4])  # f32[2, 2, 4]
        sum = aten.sum.default(_unsafe_view)  # f32[]
        """,
    )


def test_the_results_of_one_operator_are_one_occurrence(joint_graph: Capture) -> None:
    norm = nn.LayerNorm(4)
    gm = joint_graph(lambda x, w: (norm(x) @ w).sum(), weight(3, 4), weight(4, 2))
    assert clusters(gm) == ["LayerNormalization+:1"]
    assert sorted(kept(gm).values()) == [12, 12, 48]  # mean, reciprocal deviation, result
    assert run_twice(plan("LayerNormalization+:1:-1"), gm)
    assert kept(gm) == {}


def test_a_recomputed_dropout_reads_the_saved_mask(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.dropout(F.gelu(x), 0.5) @ w).sum(), weight(2, 3), weight(3, 4))
    assert clusters(gm) == ["Gelu+Dropout+:1"]
    assert_tags(
        plan("Gelu+Dropout+:1:-1"),
        gm,
        """
        gelu = aten.gelu.default(primals_1)  # f32[2, 3] | MUST_RECOMPUTE
        bernoulli = ort_dynamo.bernoulli.default([2, 3], [3, 1], 0.5)  # bool[2, 3] | MUST_SAVE | random
        _to_copy = aten._to_copy.default(bernoulli, dtype=f32)  # f32[2, 3] | MUST_RECOMPUTE
        div = aten.div.Tensor(_to_copy, 0.5)  # f32[2, 3] | MUST_RECOMPUTE
        mul = aten.mul.Tensor(gelu, div)  # f32[2, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(mul, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )
    assert kept(gm) == {"bernoulli_default": 6}


def test_a_product_with_a_mask_that_is_not_random_is_no_dropout(joint_graph: Capture) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    gm = joint_graph(lambda x, m, w: ((x * (m.float() / 0.5)) @ w).sum(), torch.randn(2, 3), mask, weight(3, 4))
    assert clusters(gm) == ["Cast+Div+Mul+:1"]


def test_a_random_tensor_has_no_cluster(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: ((x * torch.rand_like(x)).exp() @ w).sum(), weight(2, 3), weight(3, 4))
    names = [node.name for node in JointGraph(gm).forward]
    assert "rand_like" in names
    assert "rand_like" in kept(gm)
    assert clusters(gm) == ["Mul+Exp+:1"]


def test_a_tensor_tagged_by_a_checkpoint_policy_is_in_no_cluster(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) @ w).sum(), weight(2, 3), weight(3, 4))
    (gelu,) = (node for node in gm.graph.nodes if node.name == "gelu")
    gelu.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    assert clusters(gm) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_fx_untouched(plan("Gelu+:1:-1"), gm)
    assert gelu.meta["recompute"] is CheckpointPolicy.PREFER_SAVE


# -- counts ------------------------------------------------------------------------------------------------------


def chain(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = F.gelu(x @ w)
    return x.sum()


def chain_graph(joint_graph: Capture) -> GraphModule:
    return joint_graph(chain, weight(2, 3), *(weight(3, 3) for _ in range(4)))


def test_a_count_takes_the_earliest_occurrences(joint_graph: Capture) -> None:
    gm = chain_graph(joint_graph)
    assert clusters(gm) == ["MatMul+:1", "Gelu+:1"] * 3 + ["MatMul+:1"]
    assert_tags(
        plan("Gelu+:1:2"),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 3]
        gelu = aten.gelu.default(mm)  # f32[2, 3] | MUST_RECOMPUTE
        mm_1 = aten.mm.default(gelu, primals_3)  # f32[2, 3]
        gelu_1 = aten.gelu.default(mm_1)  # f32[2, 3] | MUST_RECOMPUTE
        mm_2 = aten.mm.default(gelu_1, primals_4)  # f32[2, 3]
        gelu_2 = aten.gelu.default(mm_2)  # f32[2, 3]
        mm_3 = aten.mm.default(gelu_2, primals_5)  # f32[2, 3]
        gelu_3 = aten.gelu.default(mm_3)  # f32[2, 3]
        sum = aten.sum.default(gelu_3)  # f32[]
        """,
    )


@pytest.mark.parametrize("switched_off", ["Gelu+:1:0", "Gelu+:0:-1", "Exp+:0:3", ""])
def test_a_plan_that_is_switched_off_does_nothing(joint_graph: Capture, switched_off: str) -> None:
    assert_fx_untouched(plan(switched_off), chain_graph(joint_graph))


def test_a_count_above_the_occurrences_takes_all_with_a_warning(joint_graph: Capture) -> None:
    gm = chain_graph(joint_graph)
    with pytest.warns(UserWarning, match=r"recompute_plan 'Gelu\+:1:4': a graph has only 3 of this cluster") as warned:
        RecomputePlan(read_plans("Gelu+:1:4"))(gm)
    assert warned[0].filename == __file__  # and no line of ours or of torch
    assert recomputed(gm) == ["gelu", "gelu_1", "gelu_2"]


def test_plans_go_together_and_do_not_depend_on_one_another(joint_graph: Capture) -> None:
    gm = chain_graph(joint_graph)
    assert_tags(
        plan("MatMul+:1:1", "Gelu+:1:1"),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 3] | MUST_RECOMPUTE
        gelu = aten.gelu.default(mm)  # f32[2, 3] | MUST_RECOMPUTE
        mm_1 = aten.mm.default(gelu, primals_3)  # f32[2, 3]
        gelu_1 = aten.gelu.default(mm_1)  # f32[2, 3]
        mm_2 = aten.mm.default(gelu_1, primals_4)  # f32[2, 3]
        gelu_2 = aten.gelu.default(mm_2)  # f32[2, 3]
        mm_3 = aten.mm.default(gelu_2, primals_5)  # f32[2, 3]
        gelu_3 = aten.gelu.default(mm_3)  # f32[2, 3]
        sum = aten.sum.default(gelu_3)  # f32[]
        """,
    )


def test_the_nearest_existing_cluster_is_named_first(joint_graph: Capture) -> None:
    gm = chain_graph(joint_graph)
    with pytest.warns(
        UserWarning, match=r"'Gelu\+:2:-1', 'Matmul\+:1:1' matches nothing .* has 'Gelu\+:1:-1', 'MatM"
    ) as warned:
        RecomputePlan(read_plans("Gelu+:2:-1,Matmul+:1:1"))(gm)
    assert warned[0].filename == __file__


# -- type 2 ------------------------------------------------------------------------------------------------------


def widened(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A float32 island in a bfloat16 network, as autocast makes them."""
    return (torch.exp((x @ w).float()) @ v).sum()


def test_a_compromise_keeps_the_narrow_side_of_a_cast(joint_graph: Capture) -> None:
    narrow = torch.bfloat16
    gm = joint_graph(widened, weight(4, 3, dtype=narrow), weight(3, 8, dtype=narrow), weight(8, 2))
    assert clusters(gm) == ["MatMul+Cast+Exp+:1", "Cast+Exp+:2"]
    assert kept(gm) == {"exp": 4 * 8 * 4}
    assert_tags(
        plan("Cast+Exp+:2:-1"),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # bf16[4, 8] | MUST_SAVE
        _to_copy = aten._to_copy.default(mm, dtype=f32)  # f32[4, 8] | MUST_RECOMPUTE
        exp = aten.exp.default(_to_copy)  # f32[4, 8] | MUST_RECOMPUTE
        mm_1 = aten.mm.default(exp, primals_3)  # f32[4, 2]
        sum = aten.sum.default(mm_1)  # f32[]
        """,
    )
    assert kept(gm) == {"mm": 4 * 8 * 2}


def test_a_cast_of_an_input_belongs_to_the_cluster(joint_graph: Capture) -> None:
    # The narrow side is an input: it costs nothing, and so the whole of the wide one is saved.
    gm = joint_graph(lambda x, v: (torch.exp(x.float()) @ v).sum(), weight(4, 8, dtype=torch.bfloat16), weight(8, 2))
    assert clusters(gm) == ["Cast+Exp+:1"]


def test_a_cast_to_fewer_bytes_is_no_compromise(joint_graph: Capture) -> None:
    arguments = weight(4, 3), weight(3, 8), weight(8, 2, dtype=torch.bfloat16)
    gm = joint_graph(lambda x, w, v: (torch.exp((x @ w).bfloat16()) @ v).sum(), *arguments)
    assert clusters(gm) == ["MatMul+Cast+Exp+:1"]


def test_the_earlier_plan_decides_where_two_take_the_same_tensors(joint_graph: Capture) -> None:
    narrow = torch.bfloat16
    arguments = weight(4, 3, dtype=narrow), weight(3, 8, dtype=narrow), weight(8, 2)
    gm = joint_graph(widened, *arguments)
    assert run_twice(plan("Cast+Exp+:2:-1", "MatMul+Cast+Exp+:1:-1"), gm)
    assert kept(gm) == {"mm": 4 * 8 * 2}
    torch._dynamo.reset()
    gm = joint_graph(widened, *arguments)
    assert run_twice(plan("MatMul+Cast+Exp+:1:-1", "Cast+Exp+:2:-1"), gm)
    assert kept(gm) == {}


# -- the table ---------------------------------------------------------------------------------------------------


def test_a_row_has_the_bytes_that_its_plan_alone_saves(joint_graph: Capture) -> None:
    gm = chain_graph(joint_graph)
    rows = plan_rows(JointGraph(gm))
    found = [(str(row.plan), row.frequency, row.nbytes) for row in rows]
    assert found == [("MatMul+:1:-1", 4, 96), ("Gelu+:1:-1", 3, 72)]
    assert all(0 < row.time < 1 for row in rows)
    before = sum(kept(gm).values())
    for row in rows:
        torch._dynamo.reset()
        gm = chain_graph(joint_graph)
        assert run_twice(plan(str(row.plan)), gm)
        assert before - sum(kept(gm).values()) == row.nbytes


def test_saved_bytes_are_symbolic_where_shapes_are(joint_graph: Capture) -> None:
    x = torch.randn(6, 3, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    gm = joint_graph(chain, x, weight(3, 3), weight(3, 3))
    (matmul, gelu) = plan_rows(JointGraph(gm))
    assert gelu.nbytes == 6 * 3 * 4
    assert str(gelu.size).startswith("12*s")
    assert matmul.size == 2 * gelu.size


def test_an_aten_operator_has_one_name() -> None:
    listed = [aten_name for aten_names in NAMES.values() for aten_name in aten_names]
    assert len(listed) == len(set(listed))
    for aten_name in listed:
        assert hasattr(torch.ops.aten, aten_name) or hasattr(torch.ops.prims, aten_name), aten_name
