"""Same content, same key; any difference, another key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.graph.graph_key import GraphKey, graph_key
from ort_dynamo.options.groups import SessionOptions

X, Y = torch.ones(2, 3), torch.ones(2, 3)  # two tensors: tracing one tensor twice would make one input


def trace(function: Callable[..., Any], *args: Any, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*(args or (X, Y)))


def key(function: Callable[..., Any], *args: Any, mode: str = "fake", context: tuple[Any, ...] = ()) -> GraphKey:
    made = graph_key(trace(function, *args, mode=mode), *context)
    assert made is not None
    return made


def test_names_do_not_enter() -> None:
    assert key(lambda a, b: a - b) == key(lambda first, second: first - second)


def test_symbol_names_do_not_enter_but_their_places_do() -> None:
    def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    first = key(same, torch.ones(5, 3), torch.ones(5, 3), mode="symbolic")
    assert first == key(same, torch.ones(7, 3), torch.ones(7, 3), mode="symbolic")
    assert first != key(same, torch.ones(5, 3), torch.ones(5, 3))
    assert first != key(same, torch.ones(5, 4), torch.ones(5, 1), mode="symbolic")


def test_graphs_that_differ_in_anything_have_different_keys() -> None:
    keys = [
        key(lambda a, b: a - b),
        key(lambda a, b: b - a),
        key(lambda a, b: a - a),
        key(lambda a, b: a + b),
        key(lambda a, b: a - 3.0),
        key(lambda a, b: a - 4.0),
        key(lambda a, b: a - 3),
        key(lambda a, b: a * 0.0),
        key(lambda a, b: a * -0.0),
        key(lambda a, b: a * float("nan")),
        key(lambda a, b: a * float("inf")),
        key(lambda a, b: (a - b, b)),
        key(lambda a, b: (b, a - b)),
        key(lambda a, b: a - b, X.half(), X.half()),
        key(lambda a, b: a - b, torch.ones(3, 3), torch.ones(3, 3)),
        key(lambda a, b: a - b, torch.ones(3, 2).t(), Y),
        key(lambda a, b: a - b, X, torch.ones(3, 2).t()),
        key(lambda a, b: a.sum(0)),
        key(lambda a, b: a.sum(1)),
        key(lambda a, b: a.sum(0, keepdim=True)),
        key(lambda a, b: a.sum(0, dtype=torch.float64)),
        key(lambda a, b: a - b, context=(SessionOptions(),)),
        key(lambda a, b: a - b, context=(SessionOptions(graph_optimization="basic"),)),
        key(lambda a, b: a - b, context=("cuda:0",)),
        key(lambda a, b: a - b, context=("cuda:1",)),
    ]
    assert len(set(keys)) == len(keys)


def test_keys_are_the_same_in_every_process() -> None:
    # Recorded value of the spelling, without versions: a change here must be on purpose.
    import subprocess
    import sys

    program = (
        "import torch; from torch.fx.experimental.proxy_tensor import make_fx\n"
        "from ort_dynamo.graph.graph_key import graph_key\n"
        "print(graph_key(make_fx(lambda a, b: a - b, tracing_mode='fake')(torch.ones(2, 3), torch.ones(2, 3))))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{key(lambda a, b: a - b)}\n"}


def test_graph_with_an_unknown_value_has_no_key() -> None:
    gm = trace(lambda a, b: a - b)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["val"] = object()
    assert graph_key(gm) is None


def test_an_address_in_the_context_is_refused() -> None:
    with pytest.raises(TypeError, match="spell content"):
        key(lambda a, b: a - b, context=(object(),))
