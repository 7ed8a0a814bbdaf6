"""RECORDS has a record of each compile."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo.passes.onnx.cast_propagation.propagate_casts import CastSummary
from ort_dynamo.report.record import RECORDS, CompileRecord, CompileRecords


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="ort_train", **options)


def test_a_training_graph_leaves_one_record_with_forward_backward_and_partition() -> None:
    compiled(model())(torch.ones(3, 4)).sum().backward()
    (record,) = RECORDS
    assert {graph.role for graph in record.graphs} == {"forward", "backward"}
    assert record.partition is not None
    assert record.partition.memory.nbytes > 0
    assert any("RemoveNoOps" in run.name for run in record.partition.passes)
    for graph in record.graphs:
        (island,) = graph.islands
        assert island.name.startswith(graph.role)
        assert not island.was_cached
        assert island.build.nodes > 0
        assert {"lower", "rewrite"} <= island.build.seconds.keys()
        assert 0 < sum(island.build.seconds.values()) <= island.seconds <= graph.seconds <= record.seconds
        assert graph.native.total() > 0
        assert graph.eager == ()
    for graph in record.graphs:
        build = graph.islands[0].build
        assert [run.name.partition("(")[0] for run in build.passes[-2:]] == ["RestoreOrder", "SinkReads"]
        assert "optimize" in build.seconds


def test_inference_has_no_partition_and_says_its_passes() -> None:
    with torch.no_grad():
        compiled(model())(torch.ones(3, 4))
    (record,) = RECORDS
    assert record.partition is None
    (graph,) = record.graphs
    assert graph.role == "inference"
    assert any("RemoveNoOps" in run.name for run in graph.passes)


def test_an_eager_operator_is_recorded_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    del caplog  # takes the warning
    with torch.no_grad():
        compiled(lambda x: torch.linalg.eigvalsh(x).sin())(torch.eye(3))
    (record,) = RECORDS
    (node,) = record.graphs[0].eager
    assert "eigh" in node.target
    assert "no operator" in node.reason


def test_an_island_from_the_cache_has_the_record_of_its_build() -> None:
    for function in (lambda x: x.sin() + 1, lambda other: other.sin() + 1):
        with torch.no_grad():
            compiled(function)(torch.ones(3))
    first, second = (record.graphs[0].islands[0] for record in RECORDS)
    assert (first.was_cached, second.was_cached) == (False, True)
    assert second.build == first.build
    assert second.name == first.name


def test_moved_casts_are_in_the_record() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compiled(model())(torch.ones(3, 4)).sum().backward()
    (record,) = RECORDS
    runs = [run for graph in record.graphs for island in graph.islands for run in island.build.passes]
    summaries = [run.summary for run in runs if isinstance(run.summary, CastSummary)]
    assert len(summaries) == 2
    assert any(summary.before for summary in summaries)


def test_reset_forgets_and_a_compile_that_fails_leaves_nothing() -> None:
    with torch.no_grad():
        compiled(lambda x: x.sin())(torch.ones(3))
    assert len(RECORDS) == 1
    torch._dynamo.reset()
    assert len(RECORDS) == 0
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        compiled(lambda x: torch.linalg.eigvalsh(x), options={"fallback": "error"})(torch.eye(3))
    assert len(RECORDS) == 0


def test_the_oldest_record_goes_first() -> None:
    kept, made = CompileRecords(most=2), [CompileRecord(None, (), float(n)) for n in range(3)]
    for record in made:
        kept.begin()(record)
    assert list(kept) == made[1:]


def test_a_compile_that_began_before_a_reset_leaves_nothing() -> None:
    kept = CompileRecords(most=2)
    keep = kept.begin()
    kept.clear()
    keep(CompileRecord(None, (), 0.0))
    assert len(kept) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_that_read_records() -> None:
    with RECORDS._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.alarm(10)
            os._exit(len(list(RECORDS)) - len(RECORDS))
    assert os.waitpid(child, 0)[1] == 0
