"""A backward in sections, from torch.compile: its gradients, and the memory that it frees on the way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from ort_dynamo.compilation import cut
from ort_dynamo.errors import InvalidOptionError
from ort_dynamo.options.groups import parse_options
from ort_dynamo.report.record import RECORDS, GraphRecord
from ort_dynamo.runtime import compiled_graph
from ort_dynamo.saving.one_model import join_models
from ort_dynamo.testing import patch_facts


class Layers(nn.Module):
    """Six layers, each of which saves two tensors of 64 KiB for every 256 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def _small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_facts(monkeypatch, section_bytes=32 << 10)


def trained(
    rows: tuple[int, ...] = (256,), dynamic: bool | None = None, **options: Any
) -> tuple[list[Tensor], GraphRecord]:
    """The gradients of a step for each number of rows, and the last compile's backward."""
    torch.manual_seed(0)
    model = Layers()
    compiled = torch.compile(model, backend="ort_train", dynamic=dynamic, options=options)
    for count in rows:
        compiled(torch.randn(count, 64)).backward()
    (graph,) = (graph for graph in [*RECORDS][-1].graphs if graph.role == "backward")
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], graph


def test_sections_give_the_same_gradients_and_equal_layers_share_a_session() -> None:
    whole, alone = trained(backward_sections=1)
    cut_up, graph = trained()
    assert (len(alone.islands), len(graph.islands)) == (1, 6)
    assert len({island.name for island in graph.islands}) <= 3
    torch.testing.assert_close(cut_up, whole, rtol=0, atol=0)


def test_there_are_no_more_sections_than_asked_for() -> None:
    _, graph = trained(backward_sections=2)
    assert len(graph.islands) == 2


def test_section_frees_its_last_read_tensors_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[weakref.ref[Tensor]] = []  # by the section before
    left: list[int] = []
    session_code = compiled_graph.session_code

    def watched(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        run = session_code(*args, **kwargs)

        def counted(*values: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # in a backward
                left.append(sum(one.numel() == 256 * 64 for ref in read if (one := ref()) is not None))
                read[:] = map(weakref.ref, values)
            return run(*values)

        return counted

    monkeypatch.setattr(compiled_graph, "session_code", watched)
    trained()
    assert left == [0] * 6


def test_a_backward_that_is_saved_is_whole_unless_sections_are_asked_for(tmp_path: Path) -> None:
    _, graph = trained(save_onnx=str(tmp_path / "whole"))
    assert len(graph.islands) == 1
    _, graph = trained(save_onnx=str(tmp_path / "cut"), backward_sections=3)
    assert len(graph.islands) == 3
    (described,) = (tmp_path / "cut").glob("*.json")
    joined = join_models(described, "rewritten")
    onnx.checker.check_model(ir.to_proto(joined), full_check=True)
    assert sum(node.op_type in ("MatMul", "Gemm") for node in joined.graph) == 6 * 3 - 1  # no gradient of x


def test_a_symbolic_batch_is_cut_by_its_example() -> None:
    whole, _ = trained(rows=(256, 512, 128), dynamic=True, backward_sections=1)
    cut_up, graph = trained(rows=(256, 512, 128), dynamic=True)
    assert len(graph.islands) == 6
    torch.testing.assert_close(cut_up, whole, rtol=0, atol=0)


def test_ranks_that_compare_do_not_cut_by_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "group_store", object)
    _, graph = trained()
    assert len(graph.islands) == 6
    _, graph = trained(dynamic=True)
    assert len(graph.islands) == 1
    _, graph = trained(dynamic=True, debug={"compare_ranks": False})
    assert len(graph.islands) == 6


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "8"])
def test_invalid_number_of_sections_is_refused(given: Any) -> None:
    with pytest.raises(InvalidOptionError, match="backward_sections"):
        parse_options(None, {"backward_sections": given})
