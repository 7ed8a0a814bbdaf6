"""Tests of the saved tensors, with and without the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.graph.marks import HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, is_number
from ort_dynamo.passes.fx.merge_views import MergeViews
from ort_dynamo.passes.fx.recompute.recreate_views import RecreateViews

aten = torch.ops.aten
Capture = Callable[..., GraphModule]


def saved(gm: GraphModule) -> list[str]:
    """List the values of the forward and inputs of the graph that the backward reads."""
    later = JointGraph(gm).backward
    read = {value for node in later for value in node.all_input_nodes}
    return [n.name for n in gm.graph.nodes if n in read and n not in later and "tangents" not in n.name]


def numbers(gm: GraphModule) -> set[str]:
    """Give the sizes among the saved values."""
    return {n.name for n in gm.graph.nodes if is_number(n)} & set(saved(gm))


def test_a_transposed_weight_is_saved_as_it_is(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.linear(x, w).exp().sum(), weight(5, 3), weight(4, 3))
    assert saved(gm) == ["primals_1", "t", "exp"]
    assert_fx_rewrites(
        RecreateViews(),
        """
        primals_1: f32[5, 3]
        primals_2: f32[4, 3]
        tangents_1: f32[] | backward
        t = aten.t.default(primals_2)  # f32[3, 4] strides (1, 3)
        mm = aten.mm.default(primals_1, t)  # f32[5, 4]
        exp = aten.exp.default(mm)  # f32[5, 4]
        sum = aten.sum.default(exp)  # f32[]
        expand = aten.expand.default(tangents_1, [5, 4])  # f32[5, 4] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[5, 4] | backward
        t_1 = aten.t.default(mul)  # f32[4, 5] strides (1, 4) | backward
        mm_1 = aten.mm.default(t_1, primals_1)  # f32[4, 3] | backward
        t_2 = aten.t.default(mm_1)  # f32[3, 4] strides (1, 3) | backward
        t_3 = aten.t.default(t)  # f32[4, 3] | backward
        mm_2 = aten.mm.default(mul, t_3)  # f32[5, 3] | backward
        t_4 = aten.t.default(t_2)  # f32[4, 3] | backward
        return [sum, mm_2, t_4]
        """,
        """
        primals_1: f32[5, 3]
        primals_2: f32[4, 3]
        tangents_1: f32[] | backward
        t = aten.t.default(primals_2)  # f32[3, 4] strides (1, 3)
        mm = aten.mm.default(primals_1, t)  # f32[5, 4]
        exp = aten.exp.default(mm)  # f32[5, 4]
        sum = aten.sum.default(exp)  # f32[]
        expand = aten.expand.default(tangents_1, [5, 4])  # f32[5, 4] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[5, 4] | backward
        t_1 = aten.t.default(mul)  # f32[4, 5] strides (1, 4) | backward
        mm_1 = aten.mm.default(t_1, primals_1)  # f32[4, 3] | backward
        t_2 = aten.t.default(mm_1)  # f32[3, 4] strides (1, 3) | backward
        t_3 = aten.t.default(primals_2)  # f32[3, 4] strides (1, 3) | backward
        t_4 = aten.t.default(t_3)  # f32[4, 3] | backward
        mm_2 = aten.mm.default(mul, t_4)  # f32[5, 3] | backward
        t_5 = aten.t.default(t_2)  # f32[4, 3] | backward
        return [sum, mm_2, t_5]
        """,
        gm,
    )
    assert saved(gm) == ["primals_1", "primals_2", "exp"]


def test_an_expanded_index_is_saved_as_it_was(joint_graph: Capture) -> None:
    def rows(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(0, index.abs()[:, None].expand(-1, 3)).exp().sum()

    gm = joint_graph(rows, weight(5, 3), torch.tensor([1, 4, 1, 0]))
    assert saved(gm) == ["expand", "exp"]
    RecreateViews()(gm)
    assert saved(gm) == ["abs_1", "exp"]


def test_three_views_of_one_tensor_are_one_saved_tensor(joint_graph: Capture) -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = x.sin()
        a, b, c = (F.linear(x, one) for one in (q, k, v))
        return (a.exp() + b.exp() + c.exp()).sum()

    gm = joint_graph(attention, weight(2, 5, 3), *(weight(3, 3) for _ in range(3)))
    MergeViews()(gm)
    assert_fx_rewrites(
        RecreateViews(),
        """
        primals_1: f32[2, 5, 3]
        primals_2: f32[3, 3]
        primals_3: f32[3, 3]
        primals_4: f32[3, 3]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_1)  # f32[2, 5, 3]
        t = aten.t.default(primals_2)  # f32[3, 3] strides (1, 3)
        view = aten.view.default(sin, [10, 3])  # f32[10, 3]
        mm = aten.mm.default(view, t)  # f32[10, 3]
        _unsafe_view = aten._unsafe_view.default(mm, [2, 5, 3])  # f32[2, 5, 3]
        t_1 = aten.t.default(primals_3)  # f32[3, 3] strides (1, 3)
        mm_1 = aten.mm.default(view, t_1)  # f32[10, 3]
        _unsafe_view_1 = aten._unsafe_view.default(mm_1, [2, 5, 3])  # f32[2, 5, 3]
        t_2 = aten.t.default(primals_4)  # f32[3, 3] strides (1, 3)
        mm_2 = aten.mm.default(view, t_2)  # f32[10, 3]
        _unsafe_view_2 = aten._unsafe_view.default(mm_2, [2, 5, 3])  # f32[2, 5, 3]
        exp = aten.exp.default(_unsafe_view)  # f32[2, 5, 3]
        exp_1 = aten.exp.default(_unsafe_view_1)  # f32[2, 5, 3]
        add = aten.add.Tensor(exp, exp_1)  # f32[2, 5, 3]
        exp_2 = aten.exp.default(_unsafe_view_2)  # f32[2, 5, 3]
        add_1 = aten.add.Tensor(add, exp_2)  # f32[2, 5, 3]
        sum = aten.sum.default(add_1)  # f32[]
        expand = aten.expand.default(tangents_1, [2, 5, 3])  # f32[2, 5, 3] strides (0, 0, 0) | backward
        mul = aten.mul.Tensor(expand, exp_2)  # f32[2, 5, 3] | backward
        mul_1 = aten.mul.Tensor(expand, exp_1)  # f32[2, 5, 3] | backward
        mul_2 = aten.mul.Tensor(expand, exp)  # f32[2, 5, 3] | backward
        view_1 = aten.view.default(mul, [10, 3])  # f32[10, 3] | backward
        t_3 = aten.t.default(view_1)  # f32[3, 10] strides (1, 3) | backward
        mm_3 = aten.mm.default(t_3, view)  # f32[3, 3] | backward
        mm_4 = aten.mm.default(view_1, primals_4)  # f32[10, 3] | backward
        view_2 = aten.view.default(mm_4, [2, 5, 3])  # f32[2, 5, 3] | backward
        view_3 = aten.view.default(mul_1, [10, 3])  # f32[10, 3] | backward
        t_4 = aten.t.default(view_3)  # f32[3, 10] strides (1, 3) | backward
        mm_5 = aten.mm.default(t_4, view)  # f32[3, 3] | backward
        mm_6 = aten.mm.default(view_3, primals_3)  # f32[10, 3] | backward
        view_4 = aten.view.default(mm_6, [2, 5, 3])  # f32[2, 5, 3] | backward
        add_2 = aten.add.Tensor(view_2, view_4)  # f32[2, 5, 3] | backward
        view_5 = aten.view.default(mul_2, [10, 3])  # f32[10, 3] | backward
        t_5 = aten.t.default(view_5)  # f32[3, 10] strides (1, 3) | backward
        mm_7 = aten.mm.default(t_5, view)  # f32[3, 3] | backward
        mm_8 = aten.mm.default(view_5, primals_2)  # f32[10, 3] | backward
        view_6 = aten.view.default(mm_8, [2, 5, 3])  # f32[2, 5, 3] | backward
        add_3 = aten.add.Tensor(add_2, view_6)  # f32[2, 5, 3] | backward
        cos = aten.cos.default(primals_1)  # f32[2, 5, 3] | backward
        mul_3 = aten.mul.Tensor(add_3, cos)  # f32[2, 5, 3] | backward
        return [sum, mul_3, mm_7, mm_5, mm_3]
        """,
        """
        primals_1: f32[2, 5, 3]
        primals_2: f32[3, 3]
        primals_3: f32[3, 3]
        primals_4: f32[3, 3]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_1)  # f32[2, 5, 3]
        t = aten.t.default(primals_2)  # f32[3, 3] strides (1, 3)
        view = aten.view.default(sin, [10, 3])  # f32[10, 3]
        mm = aten.mm.default(view, t)  # f32[10, 3]
        _unsafe_view = aten._unsafe_view.default(mm, [2, 5, 3])  # f32[2, 5, 3]
        t_1 = aten.t.default(primals_3)  # f32[3, 3] strides (1, 3)
        mm_1 = aten.mm.default(view, t_1)  # f32[10, 3]
        _unsafe_view_1 = aten._unsafe_view.default(mm_1, [2, 5, 3])  # f32[2, 5, 3]
        t_2 = aten.t.default(primals_4)  # f32[3, 3] strides (1, 3)
        mm_2 = aten.mm.default(view, t_2)  # f32[10, 3]
        _unsafe_view_2 = aten._unsafe_view.default(mm_2, [2, 5, 3])  # f32[2, 5, 3]
        exp = aten.exp.default(_unsafe_view)  # f32[2, 5, 3]
        exp_1 = aten.exp.default(_unsafe_view_1)  # f32[2, 5, 3]
        add = aten.add.Tensor(exp, exp_1)  # f32[2, 5, 3]
        exp_2 = aten.exp.default(_unsafe_view_2)  # f32[2, 5, 3]
        add_1 = aten.add.Tensor(add, exp_2)  # f32[2, 5, 3]
        sum = aten.sum.default(add_1)  # f32[]
        expand = aten.expand.default(tangents_1, [2, 5, 3])  # f32[2, 5, 3] strides (0, 0, 0) | backward
        mul = aten.mul.Tensor(expand, exp_2)  # f32[2, 5, 3] | backward
        mul_1 = aten.mul.Tensor(expand, exp_1)  # f32[2, 5, 3] | backward
        mul_2 = aten.mul.Tensor(expand, exp)  # f32[2, 5, 3] | backward
        view_1 = aten.view.default(mul, [10, 3])  # f32[10, 3] | backward
        t_3 = aten.t.default(view_1)  # f32[3, 10] strides (1, 3) | backward
        view_2 = aten.view.default(sin, [10, 3])  # f32[10, 3] | backward
        mm_3 = aten.mm.default(t_3, view_2)  # f32[3, 3] | backward
        mm_4 = aten.mm.default(view_1, primals_4)  # f32[10, 3] | backward
        view_3 = aten.view.default(mm_4, [2, 5, 3])  # f32[2, 5, 3] | backward
        view_4 = aten.view.default(mul_1, [10, 3])  # f32[10, 3] | backward
        t_4 = aten.t.default(view_4)  # f32[3, 10] strides (1, 3) | backward
        mm_5 = aten.mm.default(t_4, view_2)  # f32[3, 3] | backward
        mm_6 = aten.mm.default(view_4, primals_3)  # f32[10, 3] | backward
        view_5 = aten.view.default(mm_6, [2, 5, 3])  # f32[2, 5, 3] | backward
        add_2 = aten.add.Tensor(view_3, view_5)  # f32[2, 5, 3] | backward
        view_6 = aten.view.default(mul_2, [10, 3])  # f32[10, 3] | backward
        t_5 = aten.t.default(view_6)  # f32[3, 10] strides (1, 3) | backward
        mm_7 = aten.mm.default(t_5, view_2)  # f32[3, 3] | backward
        mm_8 = aten.mm.default(view_6, primals_2)  # f32[10, 3] | backward
        view_7 = aten.view.default(mm_8, [2, 5, 3])  # f32[2, 5, 3] | backward
        add_3 = aten.add.Tensor(add_2, view_7)  # f32[2, 5, 3] | backward
        cos = aten.cos.default(primals_1)  # f32[2, 5, 3] | backward
        mul_3 = aten.mul.Tensor(add_3, cos)  # f32[2, 5, 3] | backward
        return [sum, mul_3, mm_7, mm_5, mm_3]
        """,
        gm,
    )
    assert [name for name in saved(gm) if name.startswith(("sin", "view", "t"))] == ["sin"]
    again = [n for n in gm.graph.nodes if n.meta.get(HALF) == "is_backward" and n.target is aten.view.default]
    assert sum(n.args[0].name == "sin" for n in again) == 1


def test_a_chain_of_views_begins_at_the_saved_tensor(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (x.sin().transpose(0, 1).view(-1, 6) @ w).exp().sum(), weight(2, 1, 6), weight(6, 2))
    assert_fx_rewrites(
        RecreateViews(),
        """
        primals_1: f32[2, 1, 6]
        primals_2: f32[6, 2]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_1)  # f32[2, 1, 6]
        transpose = aten.transpose.int(sin, 0, 1)  # f32[1, 2, 6]
        view = aten.view.default(transpose, [-1, 6])  # f32[2, 6]
        mm = aten.mm.default(view, primals_2)  # f32[2, 2]
        exp = aten.exp.default(mm)  # f32[2, 2]
        sum = aten.sum.default(exp)  # f32[]
        expand = aten.expand.default(tangents_1, [2, 2])  # f32[2, 2] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[2, 2] | backward
        t = aten.t.default(view)  # f32[6, 2] strides (1, 6) | backward
        mm_1 = aten.mm.default(t, mul)  # f32[6, 2] | backward
        t_1 = aten.t.default(primals_2)  # f32[2, 6] strides (1, 2) | backward
        mm_2 = aten.mm.default(mul, t_1)  # f32[2, 6] | backward
        view_1 = aten.view.default(mm_2, [1, 2, 6])  # f32[1, 2, 6] | backward
        transpose_1 = aten.transpose.int(view_1, 0, 1)  # f32[2, 1, 6] | backward
        cos = aten.cos.default(primals_1)  # f32[2, 1, 6] | backward
        mul_1 = aten.mul.Tensor(transpose_1, cos)  # f32[2, 1, 6] | backward
        return [sum, mul_1, mm_1]
        """,
        """
        primals_1: f32[2, 1, 6]
        primals_2: f32[6, 2]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_1)  # f32[2, 1, 6]
        transpose = aten.transpose.int(sin, 0, 1)  # f32[1, 2, 6]
        view = aten.view.default(transpose, [-1, 6])  # f32[2, 6]
        mm = aten.mm.default(view, primals_2)  # f32[2, 2]
        exp = aten.exp.default(mm)  # f32[2, 2]
        sum = aten.sum.default(exp)  # f32[]
        expand = aten.expand.default(tangents_1, [2, 2])  # f32[2, 2] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[2, 2] | backward
        transpose_1 = aten.transpose.int(sin, 0, 1)  # f32[1, 2, 6] | backward
        view_1 = aten.view.default(transpose_1, [-1, 6])  # f32[2, 6] | backward
        t = aten.t.default(view_1)  # f32[6, 2] strides (1, 6) | backward
        mm_1 = aten.mm.default(t, mul)  # f32[6, 2] | backward
        t_1 = aten.t.default(primals_2)  # f32[2, 6] strides (1, 2) | backward
        mm_2 = aten.mm.default(mul, t_1)  # f32[2, 6] | backward
        view_2 = aten.view.default(mm_2, [1, 2, 6])  # f32[1, 2, 6] | backward
        transpose_2 = aten.transpose.int(view_2, 0, 1)  # f32[2, 1, 6] | backward
        cos = aten.cos.default(primals_1)  # f32[2, 1, 6] | backward
        mul_1 = aten.mul.Tensor(transpose_2, cos)  # f32[2, 1, 6] | backward
        return [sum, mul_1, mm_1]
        """,
        gm,
    )
    assert not {"transpose", "view", "permute"} & {name.rstrip("_0123456789") for name in saved(gm)}


def test_the_numbers_of_a_symbolic_view_are_ones_that_the_backward_reads(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin().view(x.shape[0] * x.shape[1], 3) @ w).exp().sum()

    gm = joint_graph(function, weight(2, 5, 3), weight(3, 3), dynamic=True)
    before = numbers(gm)
    assert_fx_rewrites(
        RecreateViews(),
        """
        primals_1: s0
        primals_2: s1
        primals_3: f32[s0, s1, 3]
        primals_4: f32[3, 3]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_3)  # f32[s0, s1, 3]
        mul = mul(primals_1, primals_2)  # s1*s0
        view = aten.view.default(sin, [mul, 3])  # f32[s1*s0, 3]
        mm = aten.mm.default(view, primals_4)  # f32[s1*s0, 3]
        exp = aten.exp.default(mm)  # f32[s1*s0, 3]
        sum = aten.sum.default(exp)  # f32[]
        expand = aten.expand.default(tangents_1, [mul, 3])  # f32[s1*s0, 3] strides (0, 0) | backward
        mul_1 = aten.mul.Tensor(expand, exp)  # f32[s1*s0, 3] | backward
        t = aten.t.default(view)  # f32[3, s1*s0] strides (1, 3) | backward
        mm_1 = aten.mm.default(t, mul_1)  # f32[3, 3] | backward
        t_1 = aten.t.default(primals_4)  # f32[3, 3] strides (1, 3) | backward
        mm_2 = aten.mm.default(mul_1, t_1)  # f32[s1*s0, 3] | backward
        view_1 = aten.view.default(mm_2, [primals_1, primals_2, 3])  # f32[s0, s1, 3] | backward
        cos = aten.cos.default(primals_3)  # f32[s0, s1, 3] | backward
        mul_2 = aten.mul.Tensor(view_1, cos)  # f32[s0, s1, 3] | backward
        return [sum, None, None, mul_2, mm_1]
        """,
        """
        primals_1: s0
        primals_2: s1
        primals_3: f32[s0, s1, 3]
        primals_4: f32[3, 3]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_3)  # f32[s0, s1, 3]
        mul = mul(primals_1, primals_2)  # s1*s0
        view = aten.view.default(sin, [mul, 3])  # f32[s1*s0, 3]
        mm = aten.mm.default(view, primals_4)  # f32[s1*s0, 3]
        exp = aten.exp.default(mm)  # f32[s1*s0, 3]
        sum = aten.sum.default(exp)  # f32[]
        expand = aten.expand.default(tangents_1, [mul, 3])  # f32[s1*s0, 3] strides (0, 0) | backward
        mul_1 = aten.mul.Tensor(expand, exp)  # f32[s1*s0, 3] | backward
        view_1 = aten.view.default(sin, [mul, 3])  # f32[s1*s0, 3] | backward
        t = aten.t.default(view_1)  # f32[3, s1*s0] strides (1, 3) | backward
        mm_1 = aten.mm.default(t, mul_1)  # f32[3, 3] | backward
        t_1 = aten.t.default(primals_4)  # f32[3, 3] strides (1, 3) | backward
        mm_2 = aten.mm.default(mul_1, t_1)  # f32[s1*s0, 3] | backward
        view_2 = aten.view.default(mm_2, [primals_1, primals_2, 3])  # f32[s0, s1, 3] | backward
        cos = aten.cos.default(primals_3)  # f32[s0, s1, 3] | backward
        mul_2 = aten.mul.Tensor(view_2, cos)  # f32[s0, s1, 3] | backward
        return [sum, None, None, mul_2, mm_1]
        """,
        gm,
        run=False,
    )
    assert numbers(gm) == before
    assert "view" not in saved(gm)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x.sin()[1:] * w).exp().sum(),
        lambda x, w: (x.sin().split(1)[1] * w).exp().sum(),
    ],
    ids=["slice", "split"],
)
def test_parts_cross_as_they_are(function: Callable[..., Any], joint_graph: Capture) -> None:
    gm = joint_graph(function, weight(2, 3), weight(1, 3))
    assert_fx_untouched(RecreateViews(), gm)


def test_views_of_recomputed_tensors_are_left_to_the_partitioner(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.linear(x, w.sin()).exp().sum(), weight(5, 3), weight(4, 3))
    (view,) = (n for n in JointGraph(gm).forward if n.target is aten.t.default)
    (reader,) = (user for user in view.users if JointGraph(gm).is_forward(user))
    for node in (*view.all_input_nodes, view, reader):
        node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
        assert_fx_untouched(RecreateViews(), gm)
        del node.meta[RECOMPUTE]
    assert run_twice(RecreateViews(), gm)


def test_a_view_of_an_input_that_is_written_to_is_saved_itself(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.linear(x, w).exp().sum(), weight(5, 3), weight(4, 3))
    _, written = (n for n in gm.graph.find_nodes(op="placeholder") if "primals" in n.name)
    with gm.graph.inserting_before(JointGraph(gm).forward[-1]):
        copied = gm.graph.call_function(aten.copy_.default, (written, written))
    copied.meta = {**JointGraph(gm).forward[-1].meta, "val": written.meta["val"]}
    assert_fx_untouched(RecreateViews(), gm)
    gm.graph.erase_node(copied)
    assert run_twice(RecreateViews(), gm)
