"""The forward saves the mask of a result that the program sees, and not the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import weight
from torch import Tensor
from torch.fx import GraphModule

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, is_number
from ort_dynamo.passes.fx.recompute.compare_in_forward import CompareInForward

Capture = Callable[..., GraphModule]


def saved(gm: GraphModule) -> list[str]:
    """The forward's values that the backward reads."""
    joint = JointGraph(gm)
    read = {value for node in joint.backward for value in node.all_input_nodes}
    return [node.name for node in joint.forward if node in read and not is_number(node)]


def test_the_mask_of_a_maximum_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.sin().amax(1), weight(3, 4))
    assert saved(gm) == ["sin", "amax"]
    assert_fx_rewrites(
        CompareInForward(1),
        """
        primals_1: f32[3, 4]
        tangents_1: f32[3] | backward
        sin = aten.sin.default(primals_1)  # f32[3, 4]
        amax = aten.amax.default(sin, [1])  # f32[3]
        view = aten.view.default(amax, [3, 1])  # f32[3, 1] | backward
        eq = aten.eq.Tensor(view, sin)  # bool[3, 4] | backward
        view_1 = aten.view.default(tangents_1, [3, 1])  # f32[3, 1] | backward
        sum = aten.sum.dim_IntList(eq, [1], True)  # i64[3, 1] | backward
        div = aten.div.Tensor(view_1, sum)  # f32[3, 1] | backward
        mul = aten.mul.Tensor(div, eq)  # f32[3, 4] | backward
        cos = aten.cos.default(primals_1)  # f32[3, 4] | backward
        mul_1 = aten.mul.Tensor(mul, cos)  # f32[3, 4] | backward
        return [amax, mul_1]
        """,
        """
        primals_1: f32[3, 4]
        tangents_1: f32[3] | backward
        sin = aten.sin.default(primals_1)  # f32[3, 4]
        amax = aten.amax.default(sin, [1])  # f32[3]
        view = aten.view.default(amax, [3, 1])  # f32[3, 1]
        eq = aten.eq.Tensor(view, sin)  # bool[3, 4]
        view_1 = aten.view.default(tangents_1, [3, 1])  # f32[3, 1] | backward
        sum = aten.sum.dim_IntList(eq, [1], True)  # i64[3, 1] | backward
        div = aten.div.Tensor(view_1, sum)  # f32[3, 1] | backward
        mul = aten.mul.Tensor(div, eq)  # f32[3, 4] | backward
        cos = aten.cos.default(primals_1)  # f32[3, 4] | backward
        mul_1 = aten.mul.Tensor(mul, cos)  # f32[3, 4] | backward
        return [amax, mul_1]
        """,
        gm,
    )
    assert saved(gm) == ["eq"]


def test_so_are_masks_made_of_several(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.median(), weight(3, 4))
    assert "median" in saved(gm)
    assert_fx_rewrites(
        CompareInForward(1),
        """
        primals_1: f32[3, 4]
        tangents_1: f32[] | backward
        median = aten.median.default(primals_1)  # f32[]
        isnan = aten.isnan.default(primals_1)  # bool[3, 4] | backward
        isnan_1 = aten.isnan.default(median)  # bool[] | backward
        logical_and = aten.logical_and.default(isnan, isnan_1)  # bool[3, 4] | backward
        eq = aten.eq.Tensor(primals_1, median)  # bool[3, 4] | backward
        logical_or = aten.logical_or.default(eq, logical_and)  # bool[3, 4] | backward
        sum = aten.sum.default(logical_or)  # i64[] | backward
        div = aten.div.Tensor(tangents_1, sum)  # f32[] | backward
        mul = aten.mul.Tensor(logical_or, div)  # f32[3, 4] | backward
        return [median, mul]
        """,
        """
        primals_1: f32[3, 4]
        tangents_1: f32[] | backward
        median = aten.median.default(primals_1)  # f32[]
        isnan = aten.isnan.default(primals_1)  # bool[3, 4]
        isnan_1 = aten.isnan.default(median)  # bool[]
        logical_and = aten.logical_and.default(isnan, isnan_1)  # bool[3, 4]
        eq = aten.eq.Tensor(primals_1, median)  # bool[3, 4]
        logical_or = aten.logical_or.default(eq, logical_and)  # bool[3, 4]
        sum = aten.sum.default(logical_or)  # i64[] | backward
        div = aten.div.Tensor(tangents_1, sum)  # f32[] | backward
        mul = aten.mul.Tensor(logical_or, div)  # f32[3, 4] | backward
        return [median, mul]
        """,
        gm,
    )
    kept = set(saved(gm))
    assert {node.meta["val"].dtype for node in gm.graph.nodes if node.name in kept} == {torch.bool}


def test_one_mask_of_several_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.sin().min(), weight(3, 4))
    assert_fx_rewrites(
        CompareInForward(1),
        """
        primals_1: f32[3, 4]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_1)  # f32[3, 4]
        min = aten.min.default(sin)  # f32[]
        isnan = aten.isnan.default(sin)  # bool[3, 4] | backward
        isnan_1 = aten.isnan.default(min)  # bool[] | backward
        logical_and = aten.logical_and.default(isnan, isnan_1)  # bool[3, 4] | backward
        eq = aten.eq.Tensor(sin, min)  # bool[3, 4] | backward
        logical_or = aten.logical_or.default(eq, logical_and)  # bool[3, 4] | backward
        sum = aten.sum.default(logical_or)  # i64[] | backward
        div = aten.div.Tensor(tangents_1, sum)  # f32[] | backward
        mul = aten.mul.Tensor(logical_or, div)  # f32[3, 4] | backward
        cos = aten.cos.default(primals_1)  # f32[3, 4] | backward
        mul_1 = aten.mul.Tensor(mul, cos)  # f32[3, 4] | backward
        return [min, mul_1]
        """,
        """
        primals_1: f32[3, 4]
        tangents_1: f32[] | backward
        sin = aten.sin.default(primals_1)  # f32[3, 4]
        min = aten.min.default(sin)  # f32[]
        isnan = aten.isnan.default(sin)  # bool[3, 4]
        isnan_1 = aten.isnan.default(min)  # bool[]
        logical_and = aten.logical_and.default(isnan, isnan_1)  # bool[3, 4]
        eq = aten.eq.Tensor(sin, min)  # bool[3, 4]
        logical_or = aten.logical_or.default(eq, logical_and)  # bool[3, 4]
        sum = aten.sum.default(logical_or)  # i64[] | backward
        div = aten.div.Tensor(tangents_1, sum)  # f32[] | backward
        mul = aten.mul.Tensor(logical_or, div)  # f32[3, 4] | backward
        cos = aten.cos.default(primals_1)  # f32[3, 4] | backward
        mul_1 = aten.mul.Tensor(mul, cos)  # f32[3, 4] | backward
        return [min, mul_1]
        """,
        gm,
    )
    assert saved(gm) == ["logical_or"]


def test_a_mask_larger_than_the_tensors_that_it_frees_is_not_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x.amax(1), x.sin()), weight(3, 4))  # the gradient of the sine keeps x anyway
    assert saved(gm) == ["amax"]
    assert_fx_untouched(CompareInForward(2), gm)


def read_beside(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.exp().amax(1, keepdim=True)
    return found, (x * found).sum()


@pytest.mark.parametrize(
    ("function", "outputs"),
    [
        pytest.param(lambda x: x.sin().amax(1).sum(), 1, id="the program does not see it"),
        pytest.param(lambda x: x.exp(), 1, id="the gradient is a product with it"),
        pytest.param(read_beside, 2, id="it is a factor as well"),
        pytest.param(lambda x: F.relu(x), 1, id="the gradient compares it in an operator of its own"),
    ],
)
def test_other_results_stay(joint_graph: Capture, function: Callable[..., object], outputs: int) -> None:
    gm = joint_graph(function, weight(3, 4))
    assert_fx_untouched(CompareInForward(outputs), gm)
