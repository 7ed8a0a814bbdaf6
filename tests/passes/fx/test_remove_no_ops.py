"""Copies and aliases that only computations read are removed; those that the program can see stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.analysis.storage import storages_of
from ort_dynamo.passes.fx.remove_no_ops import RemoveNoOps
from ort_dynamo.torch_internals.kernels.view_operators import ALIASES

X = torch.ones(2, 3)


def test_a_clone_that_is_only_computed_with_goes() -> None:
    assert_fx_rewrites(
        RemoveNoOps(),
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        clone = aten.clone.default(add)  # f32[2, 3]
        view = aten.view.default(clone, [3, 2])  # f32[3, 2]
        mul = aten.mul.Tensor(view, 2)  # f32[3, 2]
        return mul
        """,
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        view = aten.view.default(add, [3, 2])  # f32[3, 2]
        mul = aten.mul.Tensor(view, 2)  # f32[3, 2]
        return mul
        """,
    )


@pytest.mark.parametrize("alias", ["alias", "detach"])
def test_a_detach_that_is_only_computed_with_goes(alias: str) -> None:
    assert_fx_rewrites(
        RemoveNoOps(),
        f"""
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        {alias} = aten.{alias}.default(add)  # f32[2, 3]
        view = aten.view.default({alias}, [3, 2])  # f32[3, 2]
        mul = aten.mul.Tensor(view, 2)  # f32[3, 2]
        return mul
        """,
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        view = aten.view.default(add, [3, 2])  # f32[3, 2]
        mul = aten.mul.Tensor(view, 2)  # f32[3, 2]
        return mul
        """,
    )


def test_a_gradient_reads_its_operators_result_under_one_name(joint_graph: Callable[..., GraphModule]) -> None:
    # The fixture has run the pass.
    gm = joint_graph(lambda x: (x.tanh() * 2).exp().sum(), torch.randn(4, requires_grad=True))
    assert [n.name for n in JointGraph(gm).read_by_backward] == ["tanh", "exp"]
    assert not any(n.target in ALIASES for n in gm.graph.nodes)


def test_views_of_the_copy_are_then_views_of_the_original() -> None:
    gm = assert_fx_rewrites(
        RemoveNoOps(),
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        clone = aten.clone.default(add)  # f32[2, 3]
        t = aten.t.default(clone)  # f32[3, 2] strides (1, 3)
        split = aten.split.Tensor(t, 2)
        getitem = split[0]  # f32[2, 2] strides (1, 3)
        getitem_1 = split[1]  # f32[1, 2] strides (1, 3)
        exp = aten.exp.default(getitem)  # f32[2, 2] strides (1, 2)
        mul = aten.mul.Tensor(exp, 2)  # f32[2, 2] strides (1, 2)
        return mul
        """,
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        t = aten.t.default(add)  # f32[3, 2] strides (1, 3)
        split = aten.split.Tensor(t, 2)
        getitem = split[0]  # f32[2, 2] strides (1, 3)
        getitem_1 = split[1]  # f32[1, 2] strides (1, 3)
        exp = aten.exp.default(getitem)  # f32[2, 2] strides (1, 2)
        mul = aten.mul.Tensor(exp, 2)  # f32[2, 2] strides (1, 2)
        return mul
        """,
    )
    values = {node.name: node for node in gm.graph.nodes}
    for view in ("t_default", "split_tensor", "getitem"):
        assert storages_of(values[view]) == storages_of(values["add_tensor"])
    assert storages_of(values["exp_default"]).isdisjoint(storages_of(values["add_tensor"]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).clone(),
        lambda x: (x + 1).clone().t()[0],
        lambda x: (x + 1).t().clone(memory_format=torch.contiguous_format) * 2,
        lambda x: (x + 1).clone().split(1),
        lambda x: x.clone() * 2,
        lambda x: x.t().clone() * 2,
        lambda x: (x + 1).detach(),
        lambda x: (x + 1).detach().t()[0],
        lambda x: x.detach() * 2,
    ],
    ids=[
        "the output",
        "a view is the output",
        "other strides",
        "pieces",
        "of an input",
        "of a view of an input",
        "the output, detached",
        "a view is the output, detached",
        "of an input, detached",
    ],
)
def test_the_nearest_other_clones_and_detaches_stay(function: Callable[..., Any]) -> None:
    gm = assert_fx_untouched(RemoveNoOps(), make_fx(function, tracing_mode="fake")(X))
    assert sum(n.target in {*ALIASES, torch.ops.aten.clone.default} for n in gm.graph.nodes) == 1
