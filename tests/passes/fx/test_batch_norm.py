"""BatchNorm's running statistics: what reads them, and what must not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.drop_running_statistics import DropRunningStatistics
from ort_dynamo.passes.fx.merge_statistics import MergeStatistics
from ort_dynamo.passes.fx.save_reads_of_mutated import SaveReadsOfMutated
from ort_dynamo.passes.fx.split_statistics import SplitStatistics
from ort_dynamo.passes.running import run_passes

Capture = Callable[..., GraphModule]


def text(gm: GraphModule, target: str) -> list[str]:
    nodes = (node for node in gm.graph.nodes if target in str(node.target))
    return [f"{node.name}({', '.join(str(argument) for argument in node.args)})" for node in nodes]


def tags(gm: GraphModule) -> dict[str, str]:
    return {n.name: n.meta["recompute"].name for n in gm.graph.nodes if "recompute" in n.meta}


def modified(pass_: PassBase, gm: GraphModule) -> bool:
    (record,) = run_passes([pass_], gm, check=True)
    return record.modified


def normalized(joint_graph: Capture, training: bool = True) -> GraphModule:
    norm = nn.BatchNorm1d(4, affine=False).train(training)
    return joint_graph(lambda x: norm(x).exp().sum(), torch.randn(3, 4, requires_grad=True))


def test_the_gradient_in_training_reads_no_running_statistics(joint_graph: Capture) -> None:
    gm = normalized(joint_graph)  # the fixture has run the pass
    (gradient,) = text(gm, "native_batch_norm_backward")
    assert "primals_1, None, None, None, getitem_1, getitem_2, True" in gradient
    result = DropRunningStatistics()(gm)
    assert result is not None
    assert not result.modified


def test_the_gradient_in_evaluation_reads_them(joint_graph: Capture) -> None:
    (gradient,) = text(normalized(joint_graph, training=False), "native_batch_norm_backward")
    assert "None, primals_" in gradient


def test_a_batch_norm_that_is_computed_again_is_one_without_running_statistics(joint_graph: Capture) -> None:
    gm = normalized(joint_graph)
    before = text(gm, "native_batch_norm_legit")
    assert not modified(MergeStatistics(), gm)
    assert not modified(SplitStatistics(), gm)
    assert text(gm, "native_batch_norm_legit") == before, "none is computed again"
    for node in JointGraph(gm).forward:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert modified(SplitStatistics(), gm)
    assert not modified(SplitStatistics(), gm)
    (original,) = before
    arguments = original.partition("(")[2]
    assert text(gm, "native_batch_norm_legit") == [
        original,
        "_native_batch_norm_legit_no_stats(primals_1, None, None, True, 0.1, 1e-05)",
    ]
    assert arguments == "primals_1, None, None, primals_3, primals_4, True, 0.1, 1e-05)"
    sources = {n.name: n.args[0].name for n in gm.graph.nodes if n.name.startswith("getitem") and n.args[1] < 5}
    assert [sources[f"getitem_{i}" if i else "getitem"] for i in range(5)] == [
        *["_native_batch_norm_legit_no_stats"] * 3,
        *["_native_batch_norm_legit_functional"] * 2,
    ]
    assert modified(MergeStatistics(), gm)
    assert not modified(MergeStatistics(), gm)
    assert text(gm, "native_batch_norm_legit") == before


def test_a_batch_norm_in_evaluation_stays_one_operator(joint_graph: Capture) -> None:
    gm = normalized(joint_graph, training=False)
    for node in JointGraph(gm).forward:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert not modified(SplitStatistics(), gm)
    assert "no_stats" not in str(gm.graph)


def test_what_reads_a_buffer_that_is_written_to_is_computed_once(joint_graph: Capture) -> None:
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
    result = SaveReadsOfMutated()(gm)
    assert result is not None
    assert result.modified
    assert tags(gm) == {"cos": "MUST_SAVE", "add": "MUST_SAVE"}
    again = SaveReadsOfMutated()(gm)
    assert again is not None
    assert not again.modified


def test_running_statistics_do_not_keep_a_batch_norm_from_being_computed_again(joint_graph: Capture) -> None:
    gm = normalized(joint_graph)
    SaveReadsOfMutated()(gm)
    assert tags(gm) == {"add": "MUST_SAVE"}  # the number of batches, which the gradients do not read
    (counter,) = (node for node in gm.graph.nodes if node.name == "add")
    assert all(isinstance(user, Node) and user.op == "output" for user in counter.users)
