"""Graph before, graph after: which casts and counts become one call, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.marks import CHOSEN
from ort_dynamo.passes.fx import call_foreach
from ort_dynamo.passes.fx.call_foreach import CallForeach, add_to_all, cast_all
from ort_dynamo.passes.fx.torch_graph.foreach import FOREACH
from ort_dynamo.passes.fx.torch_graph.place_foreach import PlaceForeach
from ort_dynamo.torch_internals.operators import aten


def rewritten(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """The graph after both passes, which has computed the same."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    run_twice(PlaceForeach(), gm)
    run_twice(CallForeach(), gm)
    torch.testing.assert_close(gm(*inputs), function(*inputs), rtol=0, atol=0)
    return gm


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def calls(gm: GraphModule, function: Callable[..., Any]) -> list[int]:
    """How many tensors each call of a function computes."""
    return [len(node.args[0]) for node in gm.graph.find_nodes(op="call_function", target=function)]


WEIGHTS = [torch.randn(size, size + 1) for size in (3, 4, 5, 6)]


def products(*weights: Tensor) -> list[Tensor]:
    return [one @ one.t() for one in (weight.bfloat16() for weight in weights)]


def test_casts_of_weights_are_one_call_before_the_first_product() -> None:
    gm = rewritten(products, *WEIGHTS)
    assert calls(gm, cast_all) == [4]
    assert targets(gm)[0] is cast_all
    assert not gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)


def test_few_casts_stay() -> None:
    assert not calls(rewritten(products, *WEIGHTS[:3]), cast_all)


def test_a_cast_that_a_kernel_reads_is_part_of_it() -> None:
    gm = rewritten(lambda *w: [one.bfloat16() * 2 for one in w], *WEIGHTS)
    assert not any(CHOSEN in node.meta for node in gm.graph.nodes)


def test_casts_of_gradients_are_one_call_after_the_last_product() -> None:
    halves = [one.bfloat16() for one in WEIGHTS]
    gm = rewritten(lambda *w: [(one @ one.t()).float() for one in w], *halves)
    assert calls(gm, cast_all) == [4]
    assert targets(gm).index(cast_all) > max(n for n, target in enumerate(targets(gm)) if target is aten.mm.default)


def test_a_call_has_a_bounded_size(monkeypatch: Any) -> None:
    monkeypatch.setattr(call_foreach, "_MOST_BYTES", 2 * (3 * 4 + 4 * 5))
    assert calls(rewritten(products, *WEIGHTS), cast_all) == [2]  # and two that are too large for any company


def test_a_cast_that_needs_the_result_of_another_is_of_a_later_call() -> None:
    def function(*weights: Tensor) -> list[Tensor]:
        half = [one.bfloat16() for one in weights]
        first = half[0] @ half[0].t()
        return [first.float(), *((one @ one.t()).float() for one in half[1:])]

    gm = rewritten(function, *WEIGHTS)
    assert calls(gm, cast_all) == [4, 4]


def test_counts_of_batches_are_one_call() -> None:
    counts = [torch.tensor(number) for number in range(5)]
    gm = rewritten(lambda *c: [one + 1 for one in c], *counts)
    assert calls(gm, add_to_all) == [5]
    assert [node.meta[CHOSEN] for node in gm.graph.find_nodes(op="call_function", target=add_to_all)] == [FOREACH]


def test_results_keep_strides() -> None:
    weights = [one.t() for one in WEIGHTS]
    gm = rewritten(products, *weights)
    assert calls(gm, cast_all) == [4]
    assert [one.stride() for one in cast_all(weights, torch.bfloat16)] == [one.stride() for one in weights]
