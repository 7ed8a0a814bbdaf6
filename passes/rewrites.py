"""The changes that passes make to FX graphs, kept for whoever asks which pass has made one wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch.fx import Graph, GraphModule

from ort_dynamo.torch_internals.tracing.lazy_code import graph_module

__all__ = ["Rewrite", "noting_rewrites", "watched_rewrites"]


@dataclass(frozen=True)
class Rewrite:
    """One change of an FX graph.

    Attributes:
        name: the pass that made it, with its parameters.
        before, after: copies of the graph, with equal names of equal nodes.
    """

    name: str
    before: GraphModule
    after: GraphModule


_rewrites: ContextVar[list[Rewrite] | None] = ContextVar("ort_dynamo rewrites", default=None)


@contextmanager
def watched_rewrites() -> Iterator[list[Rewrite]]:
    """List each change that a pass makes to an FX graph in this context, while this is open."""
    rewrites: list[Rewrite] = []
    token = _rewrites.set(rewrites)
    try:
        yield rewrites
    finally:
        _rewrites.reset(token)


def noting_rewrites(graph: Any) -> Callable[[str, bool], None]:
    """Return a function to call after each pass on `graph`, which may be an ONNX model.

    It takes the name of the pass, and whether the pass says that it has changed the graph: a wrong one may say no.
    """
    rewrites = _rewrites.get()
    if rewrites is None or not isinstance(graph, GraphModule):
        return lambda name, modified: None
    last, text = _copied(graph), str(graph.graph)

    def note(name: str, modified: bool) -> None:
        nonlocal last, text
        before, known, text = last, text, str(graph.graph)
        if modified or text != known:
            last = _copied(graph)
            rewrites.append(Rewrite(name, before, last))

    return note


def _copied(gm: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    named = (str(node.target) for op in ("get_attr", "call_module") for node in gm.graph.find_nodes(op=op))
    held = {name: attrgetter(name)(gm) for name in named}
    return graph_module(held, graph)
