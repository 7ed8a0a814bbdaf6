"""The Python generated for outer graphs: its text, its results, and when it frees values."""

from __future__ import annotations

import inspect
import math
import operator
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from ort_dynamo.errors import ExecutionError
from ort_dynamo.runtime.boxed import boxed
from ort_dynamo.runtime.generated_code import generate_function
from ort_dynamo.runtime.outer_code import RESERVED, IslandCall, outer_code

aten = torch.ops.aten


class Halt(Exception):  # noqa: N818
    pass


def code(build: Callable[[Graph], Any], run: Callable[..., Any] | None = None, outputs: int = 2) -> Any:
    """The function generated for the graph that `build` builds, with `run` as island_0."""
    graph = Graph()
    graph.output(build(graph))
    gm = GraphModule({"island_0": nn.Module(), "constant": torch.ones(2)}, graph)
    islands = (
        {}
        if run is None
        else {
            "island_0": IslandCall(run, outputs, Halt, lambda halt: ExecutionError(what=str(halt), place="", error=""))
        }
    )
    return generate_function("outer", *outer_code(gm, islands))


def source(function: Any) -> list[str]:
    return [line.strip() for line in inspect.getsource(function).splitlines()]


def test_an_island_between_views_is_a_few_lines() -> None:
    def build(graph: Graph) -> Any:
        x, y = graph.placeholder("x"), graph.placeholder("y")
        call = graph.call_module("island_0", (x, y))
        first, second = (graph.call_function(operator.getitem, (call, index)) for index in range(2))
        return graph.call_function(aten.slice.Tensor, (first, 0, 1, 3)), second

    outer = code(build, lambda x, y: (x + y, x * y))
    assert source(outer) == [
        "def outer(given):",
        "x, y, = given",
        "given.clear()",
        "try:",
        "getitem, getitem_1, = run_island_0(x, y)",
        "except Stopped as stopped:",
        "raise error_of_island_0(stopped) from stopped.__cause__",
        "del x, y",
        "slice_tensor = getitem[1:3]",
        "del getitem",
        "return (slice_tensor, getitem_1,)",
    ]
    x, y = torch.randn(4), torch.randn(4)
    first, second = outer([x, y])
    assert torch.equal(first, (x + y)[1:3])
    assert torch.equal(second, x * y)


def test_results_that_are_not_all_taken_apart_stay_a_tuple() -> None:
    def build(graph: Graph) -> Any:
        call = graph.call_module("island_0", (graph.placeholder("x"),))
        return graph.call_function(operator.getitem, (call, 1))

    outer = code(build, lambda x: (x + 1, x * 3))
    assert "island_0 = run_island_0(x)" in source(outer)
    assert torch.equal(outer([torch.ones(2)]), torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        (aten.detach.default, ()),
        (aten.clone.default, ()),
        (aten.t.default, ()),
        (aten.expand.default, ([2, 3, 4],)),
        (aten.permute.default, ([1, 0],)),
        (aten.select.int, (1, -1)),
        (aten.slice.Tensor, (0, 1, 9223372036854775807)),
        (aten.slice.Tensor, (0, -2, None)),
        (aten.slice.Tensor, (0, 0, 3)),
        (aten.slice.Tensor, (1, 1, 3)),
        (aten.slice.Tensor, (0, 0, 3, 2)),
        (aten.transpose.int, (0, 1)),
        (aten.unsqueeze.default, (-1,)),
        (aten.view.default, ([2, 6],)),
        (aten.view.default, ([-1],)),
        (aten.split.Tensor, (2,)),
        (aten.unbind.int, ()),
        (aten.alias.default, ()),
        (aten.squeeze.dims, ([0],)),
        (aten.mul.Tensor, (math.inf,)),
        (aten.to.dtype, (torch.float64,)),
    ],
    ids=str,
)
def test_a_call_is_the_operators(target: Any, rest: tuple[Any, ...]) -> None:
    x = torch.randn(3, 4)
    got = code(lambda graph: graph.call_function(target, (graph.placeholder("x"), *rest)))([x])
    expected = target(x, *rest)
    for ours, theirs in zip(*((one,) if isinstance(one, Tensor) else one for one in (got, expected)), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
        assert ours.dtype is theirs.dtype
        assert (ours.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (
            theirs.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        )


def test_keywords_constants_and_functions_are_passed() -> None:
    def build(graph: Graph) -> Any:
        x = graph.placeholder("x")
        total = graph.call_function(aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float64})
        return {"total": total, "rest": [graph.call_function(math.floor, (2.5,)), graph.get_attr("constant")]}

    result = code(build)([torch.ones(3, 2)])
    assert result["total"].dtype is torch.float64
    assert result["rest"][0] == 2
    assert result["rest"][1].tolist() == [1, 1]


@pytest.mark.parametrize("name", [*sorted(RESERVED & {"note_run", "outer", "watches", "print"}), "given", "stopped"])
def test_a_value_takes_no_name_of_the_code(name: str) -> None:
    def build(graph: Graph) -> Any:
        x = graph.placeholder("x")
        named = graph.call_function(aten.neg.default, (x,))
        named._rename(name)
        return (named,)

    graph = Graph()
    graph.output(build(graph))
    (result,) = boxed(GraphModule({}, graph))([torch.ones(2)])
    assert result.tolist() == [-1, -1]


def test_a_value_goes_after_its_last_use() -> None:
    alive: list[bool] = []
    seen: list[weakref.ref[Tensor]] = []

    def look(x: Tensor) -> Tensor:
        alive.append(seen[0]() is not None)
        return x + 1

    def build(graph: Graph) -> Any:
        x, unused = graph.placeholder("x"), graph.placeholder("unused")
        del unused
        y = graph.call_function(look, (x,))
        return graph.call_function(look, (y,))

    given = [torch.ones(2), torch.ones(2)]
    seen.append(weakref.ref(given[0]))
    unused = weakref.ref(given[1])
    outer = code(build)
    assert "del unused" in source(outer)
    outer(given)
    assert not given
    assert alive == [True, False]
    assert unused() is None


def test_where_the_runtime_stops_the_error_is_the_islands_and_the_traceback_shows_the_code() -> None:
    def stop(x: Tensor) -> Any:
        raise Halt("no further") from KeyError("cause")

    outer = code(lambda graph: graph.call_module("island_0", (graph.placeholder("x"),)), stop)
    with pytest.raises(ExecutionError, match="no further") as caught:
        outer([torch.ones(2)])
    assert isinstance(caught.value.__cause__, KeyError)
    assert "island_0 = run_island_0(x)" in "".join(traceback.format_exception(caught.value.__context__))
