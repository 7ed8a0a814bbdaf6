"""Collectives and islands: in which order they run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.segment.segment import Segmented, segment

if not distributed.is_available():
    pytest.skip("torch has no torch.distributed here", allow_module_level=True)

import torch.distributed._functional_collectives  # registers fake tensors of collectives

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone, so that the graphs run."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def start(value: torch.Tensor) -> torch.Tensor:
    return c10d.all_reduce(value, "sum", "0")


wait = c10d.wait_tensor


def cut(function: Callable[..., Any], *args: torch.Tensor, eager: tuple[Any, ...] = ()) -> Segmented:
    """Cut the graph of `function` into islands, run them, and compare with eager."""
    args = args or tuple(torch.randn(4, 4) for _ in range(2))
    gm = make_fx(function, tracing_mode="fake")(*args)

    def refuse(node: Node) -> str | None:
        return "on the list" if node.target in eager else None

    segmented = segment(gm, refuse, CPU)
    mine, theirs = (tuple(value.clone() for value in args) for _ in range(2))
    torch.testing.assert_close(segmented.gm(*mine), function(*theirs))
    torch.testing.assert_close(mine, theirs)
    return segmented


def outer(segmented: Segmented) -> list[str]:
    """List the calls of the outer graph, in order; an island is the list of its operators."""
    found = []
    for node in segmented.gm.graph.nodes:
        if node.op == "call_module":
            found.append(" ".join(_short(n) for n in segmented.islands[node.target].graph.nodes if _calls(n)))
        elif _calls(node):
            found.append(_short(node))
    return found


def _calls(node: Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _short(node: Node) -> str:
    return str(node.target).split(".")[1]


def test_operators_that_a_collective_does_not_need_run_during_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sent = start(x @ w)
        return wait(sent).exp(), w @ x

    assert outer(cut(function)) == ["mm", "all_reduce", "mm", "wait_tensor", "exp"]


def test_operators_too_small_for_a_session_run_before_the_collective() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sent = start(x @ w)
        return wait(sent).exp(), w * x

    assert outer(cut(function)) == ["mm mul", "all_reduce", "wait_tensor", "exp"]


def test_an_island_is_cut_after_the_part_that_a_collective_needs() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shared = x.sin()
        sent = start(shared @ w)
        return wait(sent).exp(), (shared.mT @ x).cos()

    assert outer(cut(function)) == ["sin mm", "all_reduce", "transpose mm cos", "wait_tensor", "exp"]


def test_starts_of_a_level_come_before_the_waits() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = wait(start(x.sin()))
        b = wait(start(w.cos()))
        return a * b

    assert outer(cut(function)) == ["sin cos", "all_reduce", "all_reduce", "wait_tensor", "wait_tensor", "mul"]


def test_a_start_that_needs_a_wait_follows_it_and_so_do_later_ones() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = wait(start(x.sin()))
        second = wait(start(first))
        third = wait(start(w.cos()))
        return second.exp(), third

    expected = ["all_reduce", "wait_tensor", "all_reduce", "all_reduce", "wait_tensor", "exp", "wait_tensor"]
    assert outer(cut(function)) == ["sin cos", *expected]


def test_a_wait_comes_right_before_the_island_that_reads_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        early = wait(start(x))
        late = (w @ w).sinh()  # on the list
        return (late @ w).tanh().sinh() @ early

    calls = outer(cut(function, eager=(aten.sinh.default,)))
    assert calls == ["all_reduce", "mm", "sinh", "mm tanh", "sinh", "wait_tensor", "mm"]


def test_a_wait_for_an_output_comes_last() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = wait(start(x.sin()))
        return gradient.view(16), (x @ w).sinh().exp()

    calls = outer(cut(function, eager=(aten.sinh.default,)))
    assert calls == ["sin", "all_reduce", "mm", "sinh", "exp", "wait_tensor", "view"]


def test_no_wait_passes_a_write() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sent = wait(start(x))
        x.copy_(w.sin())
        return sent

    assert outer(cut(function)) == ["all_reduce", "sin", "wait_tensor", "copy_"]


def test_starts_keep_their_order_where_a_later_one_could_go_first() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return wait(start(x @ w)), wait(start(w))

    segmented = cut(function)
    assert outer(segmented) == ["mm", "all_reduce", "all_reduce", "wait_tensor", "wait_tensor"]
    first, second = (n for n in segmented.gm.graph.nodes if n.target is c10d.all_reduce.default)
    assert first.args[0].op == "call_function"
    assert second.args[0].op == "placeholder"


def test_a_random_operator_before_a_collective_stays_before_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.ops.aten.bernoulli.default(torch.ones_like(x))
        return wait(start(x.sin())), noise * w, w @ x

    calls = outer(cut(function, eager=(aten.bernoulli.default,)))
    assert calls.index("bernoulli") < calls.index("all_reduce")


def test_several_results_of_one_operator_stay_together() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = torch.ops.aten.max.dim(x @ w, 1)
        return wait(start(values)), places, w @ x

    assert outer(cut(function)) == ["mm max", "all_reduce", "mm", "wait_tensor"]


def test_collectives_alone_need_no_island() -> None:
    assert outer(cut(lambda x, w: wait(start(x)))) == ["all_reduce", "wait_tensor"]
