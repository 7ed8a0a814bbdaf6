"""Values whose statistics cannot be computed: the step goes on without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ort_dynamo import collect_statistics
from ort_dynamo.runtime import compiled_graph
from ort_dynamo.runtime.observe import observed_run
from ort_dynamo.statistics import collect
from ort_dynamo.statistics.summarize import Numbers, summarize


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def test_a_value_whose_summary_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(value: Tensor) -> Numbers:
        if value.shape == (5, 16):
            raise RuntimeError("no memory")
        return summarize(value)

    monkeypatch.setattr(collect, "summarize", fails)
    model, x = mlp().eval(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="ort_train")
    with torch.no_grad(), collect_statistics() as run:
        result = compiled(x)
        compiled(x)
    assert torch.equal(result, compiled(x))
    assert [one.shape for one in run.statistics if one.overload != "input"] == [(5, 4)] * 2
    (record,) = (one for one in caplog.records if one.name == observed_run.__name__)
    assert record.levelname == "WARNING"
    assert "The value of addmm was not observed" in record.message
    assert record.exc_info is not None
    assert "no memory" in str(record.exc_info[1])


def test_values_inside_an_island_are_left_out_if_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(compiled_graph, "show_values", fails)
    compiled = torch.compile(mlp().eval(), backend="ort_train")
    with torch.no_grad(), collect_statistics() as run:
        compiled(torch.randn(4, 8))
    assert [one.overload for one in run.statistics if one.overload != "input"] == ["aten.addmm.default"]
    (record,) = (one for one in caplog.records if one.name == observed_run.__name__)
    assert "The values inside of" in record.message
