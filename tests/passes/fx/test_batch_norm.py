"""BatchNorm's running statistics are saved before the forward overwrites them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint_graphs import assert_tags
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.drop_running_statistics import DropRunningStatistics
from ort_dynamo.passes.fx.merge_statistics import MergeStatistics
from ort_dynamo.passes.fx.recompute.save_reads_of_mutated import SaveReadsOfMutated
from ort_dynamo.passes.fx.split_statistics import SplitStatistics

Capture = Callable[..., GraphModule]


def text(gm: GraphModule, target: str) -> list[str]:
    nodes = (node for node in gm.graph.nodes if target in str(node.target))
    return [f"{node.name}({', '.join(str(argument) for argument in node.args)})" for node in nodes]


def tags(gm: GraphModule) -> dict[str, str]:
    return {n.name: n.meta["recompute"].name for n in gm.graph.nodes if "recompute" in n.meta}


def normalized(joint_graph: Capture, training: bool = True) -> GraphModule:
    norm = nn.BatchNorm1d(4, affine=False).train(training)
    return joint_graph(lambda x: norm(x).exp().sum(), torch.randn(3, 4, requires_grad=True))


def test_the_gradient_in_training_reads_no_running_statistics(joint_graph: Capture) -> None:
    gm = normalized(joint_graph)  # the fixture has run the pass
    (gradient,) = text(gm, "native_batch_norm_backward")
    assert "primals_1, None, None, None, getitem_1, getitem_2, True" in gradient
    assert_fx_untouched(DropRunningStatistics(), gm)


def test_the_gradient_in_evaluation_reads_them(joint_graph: Capture) -> None:
    (gradient,) = text(normalized(joint_graph, training=False), "native_batch_norm_backward")
    assert "None, primals_" in gradient


def test_a_recomputed_batch_norm_has_no_running_statistics(joint_graph: Capture) -> None:
    gm = normalized(joint_graph)
    assert_fx_untouched(MergeStatistics(), gm)  # none is recomputed
    assert_fx_untouched(SplitStatistics(), gm)
    for node in JointGraph(gm).forward:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert_fx_rewrites(
        SplitStatistics(),
        """
        primals_1: f32[3, 4]
        primals_2: i64[]
        primals_3: f32[4]
        primals_4: f32[4]
        tangents_1: f32[] | backward
        add = aten.add.Tensor(primals_2, 1)  # i64[] | MUST_RECOMPUTE
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            primals_1, None, None, primals_3, primals_4, True, 0.1, 1e-05)
            # MUST_RECOMPUTE
        getitem = _native_batch_norm_legit_functional[0]  # f32[3, 4] | MUST_RECOMPUTE
        getitem_1 = _native_batch_norm_legit_functional[1]  # f32[4] | MUST_RECOMPUTE
        getitem_2 = _native_batch_norm_legit_functional[2]  # f32[4] | MUST_RECOMPUTE
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[4] | MUST_RECOMPUTE
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[4] | MUST_RECOMPUTE
        exp = aten.exp.default(getitem)  # f32[3, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(exp)  # f32[] | MUST_RECOMPUTE
        expand = aten.expand.default(tangents_1, [3, 4])  # f32[3, 4] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[3, 4] | backward
        native_batch_norm_backward = aten.native_batch_norm_backward.default(
            mul, primals_1, None, None, None, getitem_1, getitem_2, True, 1e-05, [True, False, False])
            # backward
        getitem_5 = native_batch_norm_backward[0]  # f32[3, 4] | backward
        return [add, getitem_3, getitem_4, sum, getitem_5, None, None, None]
        """,
        """
        primals_1: f32[3, 4]
        primals_2: i64[]
        primals_3: f32[4]
        primals_4: f32[4]
        tangents_1: f32[] | backward
        add = aten.add.Tensor(primals_2, 1)  # i64[] | MUST_RECOMPUTE
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            primals_1, None, None, primals_3, primals_4, True, 0.1, 1e-05)
        _native_batch_norm_legit = aten._native_batch_norm_legit.no_stats(primals_1, None, None, True, 0.1, 1e-05)
            # MUST_RECOMPUTE | with_running_statistics='_native_batch_norm_legit_functional'
        getitem = _native_batch_norm_legit[0]  # f32[3, 4] | MUST_RECOMPUTE
        getitem_1 = _native_batch_norm_legit[1]  # f32[4] | MUST_RECOMPUTE
        getitem_2 = _native_batch_norm_legit[2]  # f32[4] | MUST_RECOMPUTE
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[4]
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[4]
        exp = aten.exp.default(getitem)  # f32[3, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(exp)  # f32[] | MUST_RECOMPUTE
        expand = aten.expand.default(tangents_1, [3, 4])  # f32[3, 4] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[3, 4] | backward
        native_batch_norm_backward = aten.native_batch_norm_backward.default(
            mul, primals_1, None, None, None, getitem_1, getitem_2, True, 1e-05, [True, False, False])
            # backward
        getitem_5 = native_batch_norm_backward[0]  # f32[3, 4] | backward
        return [add, getitem_3, getitem_4, sum, getitem_5, None, None, None]
        """,
        gm,
    )
    assert_fx_rewrites(
        MergeStatistics(),
        """
        primals_1: f32[3, 4]
        primals_2: i64[]
        primals_3: f32[4]
        primals_4: f32[4]
        tangents_1: f32[] | backward
        add = aten.add.Tensor(primals_2, 1)  # i64[] | MUST_RECOMPUTE
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            primals_1, None, None, primals_3, primals_4, True, 0.1, 1e-05)
        _native_batch_norm_legit = aten._native_batch_norm_legit.no_stats(primals_1, None, None, True, 0.1, 1e-05)
            # MUST_RECOMPUTE | with_running_statistics='_native_batch_norm_legit_functional'
        getitem = _native_batch_norm_legit[0]  # f32[3, 4] | MUST_RECOMPUTE
        getitem_1 = _native_batch_norm_legit[1]  # f32[4] | MUST_RECOMPUTE
        getitem_2 = _native_batch_norm_legit[2]  # f32[4] | MUST_RECOMPUTE
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[4]
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[4]
        exp = aten.exp.default(getitem)  # f32[3, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(exp)  # f32[] | MUST_RECOMPUTE
        expand = aten.expand.default(tangents_1, [3, 4])  # f32[3, 4] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[3, 4] | backward
        native_batch_norm_backward = aten.native_batch_norm_backward.default(
            mul, primals_1, None, None, None, getitem_1, getitem_2, True, 1e-05, [True, False, False])
            # backward
        getitem_5 = native_batch_norm_backward[0]  # f32[3, 4] | backward
        return [add, getitem_3, getitem_4, sum, getitem_5, None, None, None]
        """,
        """
        primals_1: f32[3, 4]
        primals_2: i64[]
        primals_3: f32[4]
        primals_4: f32[4]
        tangents_1: f32[] | backward
        add = aten.add.Tensor(primals_2, 1)  # i64[] | MUST_RECOMPUTE
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            primals_1, None, None, primals_3, primals_4, True, 0.1, 1e-05)
        getitem = _native_batch_norm_legit_functional[0]  # f32[3, 4] | MUST_RECOMPUTE
        getitem_1 = _native_batch_norm_legit_functional[1]  # f32[4] | MUST_RECOMPUTE
        getitem_2 = _native_batch_norm_legit_functional[2]  # f32[4] | MUST_RECOMPUTE
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[4]
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[4]
        exp = aten.exp.default(getitem)  # f32[3, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(exp)  # f32[] | MUST_RECOMPUTE
        expand = aten.expand.default(tangents_1, [3, 4])  # f32[3, 4] strides (0, 0) | backward
        mul = aten.mul.Tensor(expand, exp)  # f32[3, 4] | backward
        native_batch_norm_backward = aten.native_batch_norm_backward.default(
            mul, primals_1, None, None, None, getitem_1, getitem_2, True, 1e-05, [True, False, False])
            # backward
        getitem_5 = native_batch_norm_backward[0]  # f32[3, 4] | backward
        return [add, getitem_3, getitem_4, sum, getitem_5, None, None, None]
        """,
        gm,
    )


def test_a_batch_norm_in_evaluation_stays_one_operator(joint_graph: Capture) -> None:
    gm = normalized(joint_graph, training=False)
    for node in JointGraph(gm).forward:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert_fx_untouched(SplitStatistics(), gm)


def test_result_of_a_mutated_buffer_is_saved(joint_graph: Capture) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("written", torch.ones(4))
            self.register_buffer("only_read", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.written.view(1, 4).cos() * self.only_read.sin()
            self.written.add_(1)
            return y.sum()

    gm = joint_graph(Buffers(), torch.randn(3, 4, requires_grad=True))
    assert_tags(
        SaveReadsOfMutated(),
        gm,
        """
        view = aten.view.default(primals_1, [1, 4])  # f32[1, 4]
        cos = aten.cos.default(view)  # f32[1, 4] | MUST_SAVE
        mul = aten.mul.Tensor(primals_2, cos)  # f32[3, 4]
        sin = aten.sin.default(primals_3)  # f32[4]
        mul_1 = aten.mul.Tensor(mul, sin)  # f32[3, 4]
        add = aten.add.Tensor(primals_1, 1)  # f32[4] | MUST_SAVE
        sum = aten.sum.default(mul_1)  # f32[]
        """,
    )


def test_running_statistics_do_not_keep_a_batch_norm_from_being_recomputed(joint_graph: Capture) -> None:
    gm = normalized(joint_graph)
    SaveReadsOfMutated()(gm)
    assert tags(gm) == {"add": "MUST_SAVE"}  # the number of batches, which the gradients do not read
    (counter,) = (node for node in gm.graph.nodes if node.name == "add")
    assert all(isinstance(user, Node) and user.op == "output" for user in counter.users)
