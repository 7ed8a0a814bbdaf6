"""Tests of the records of the partition function for each joint graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from ort_dynamo import memory_plan
from ort_dynamo.capture.trace import trace
from ort_dynamo.compilation import cut
from ort_dynamo.compilation.choose_target import graph_target, placement_threads
from ort_dynamo.compilation.cut import PartitionRecord, partition
from ort_dynamo.errors import PassBrokeGraphError
from ort_dynamo.options.groups import parse_options
from ort_dynamo.passes.fx.recompute.recompute_gelu import RecomputeGelu


def run(gm: GraphModule, _: slice) -> GraphModule:
    return gm


def partitioned(model: nn.Module, *args: Tensor, **options: object) -> list[PartitionRecord]:
    records: list[PartitionRecord] = []

    def cut_in_two(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        parsed = parse_options(None, options)
        target = graph_target(torch.device("cpu"), parsed)
        forward, backward, record = partition(*args, parsed, target, placement_threads(parsed), **kwargs)
        records.append(record)
        return forward, backward

    backend = partial(trace, forward=run, backward=run, inference=run, partition=cut_in_two)
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return records


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(4), nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)))).sum()


def test_a_record_lists_the_passes_in_order_and_the_memory_plan() -> None:
    model, x, options = Network(), torch.randn(3, 4), {"recompute_plan": "gelu", "debug": {"verify": True}}
    (record,) = partitioned(model, x, **options)
    assert [one.name.split("(")[0] for one in record.passes] == [
        *["RemoveNoOps", "DropUnitDims", "DropRunningStatistics", "KeepStatisticsWide"],
        *["MarkGates", "HoistRandom"],
        *["FuseTanhGelu", "PlaceInTorch", "PlaceSlowerOperators", "GiveKernelDtypes", "ConvertToChannelsLast"],
        *["CompareInForward", "SaveReadsOfMutated", "RecomputeCasts", "RecomputeArithmetic", "RecomputeGelu"],
        *["SplitStatistics", "HideSeedless", "MergeViews", "RecreateViews"],
        *["RestoreSeedless", "MergeStatistics"],  # on the forward
        *["RestoreSeedless", "RestoreSeedless"],  # on the backward, and on the joint graph
        "CutIntoSections",  # on the backward
    ]
    changed = {one.name.split("(")[0] for one in record.passes if one.modified}
    assert changed == {"DropUnitDims", "DropRunningStatistics", "SaveReadsOfMutated", "RecomputeGelu", "MergeViews"}
    assert all(one.seconds > 0 for one in record.passes)
    (graph,) = memory_plan(model, x, options=options).graphs
    assert record.memory == graph.record
    assert [one.by for one in record.memory.recomputed] == ["recompute_gelu"]


def test_a_recomputed_batch_norm_and_attention_are_put_back_everywhere() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            q = self.norm(x).exp().view(1, 2, 3, 4)
            return F.scaled_dot_product_attention(q, q, q).exp().sum()

    (record,) = partitioned(
        Recomputed(), torch.randn(6, 4, requires_grad=True), memory_budget=0.0, debug={"verify": True}
    )
    changed = [one.name.split("(")[0] for one in record.passes if one.modified]
    assert changed[-6:] == [
        *["SplitStatistics", "HideSeedless", "RestoreSeedless", "MergeStatistics"],
        *["RestoreSeedless", "RestoreSeedless"],
    ]
    again = {one.operator for one in record.memory.recomputed}
    assert "aten._native_batch_norm_legit.no_stats" in again
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in again


def test_verify_checks_the_graph_after_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RecomputeGelu.call

    def broken(self: RecomputeGelu, graph_module: GraphModule) -> object:
        result = original(self, graph_module)
        (node,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
        del node.meta["val"]
        return result

    monkeypatch.setattr(RecomputeGelu, "call", broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        partitioned(Network(), torch.randn(3, 4), recompute_plan="gelu", debug={"verify": True})
    error = caught.value.inner_exception
    assert isinstance(error, PassBrokeGraphError)
    assert str(error).startswith(f"{RecomputeGelu()!r} left an invalid FX graph")


class Gated(nn.Module):
    """A gated layer: its last layer reads the product of two tensors that gradients read."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 512), nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).sigmoid() * self.up(x)).sum()


def repeated(rows: int, *, dynamic: bool = False, **options: object) -> list[str]:
    """List the passes that make a network's backward recompute."""
    torch._dynamo.reset()
    x = torch.randn(rows, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    (record,) = partitioned(Gated(), x, **options)
    return [one.by for one in record.memory.recomputed]


def test_arithmetic_is_done_again_from_a_mebibyte_on() -> None:
    assert repeated(512) == repeated(512, dynamic=True) == ["recompute_arithmetic"]
    assert repeated(511) == []


def test_ranks_that_compare_do_no_arithmetic_again_by_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "group_store", object)
    assert repeated(512) == ["recompute_arithmetic"]
    assert repeated(512, dynamic=True) == []
    assert repeated(512, dynamic=True, debug={"compare_ranks": False}) == ["recompute_arithmetic"]
