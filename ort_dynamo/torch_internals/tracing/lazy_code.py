"""Graph modules whose Python code is written when they are first called: most are only read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.fx import Graph, GraphModule

from ort_dynamo.torch_internals.lookup import private

__all__ = ["graph_module", "lazily"]

_Lazy = private("torch.fx._lazy_graph_module:_LazyGraphModule", GraphModule)
_use_lazy = private("torch.fx._lazy_graph_module:_use_lazy_graph_module", lambda _: nullcontext())


def graph_module(attributes: Mapping[str, Any], graph: Graph) -> GraphModule:
    """Make a module of a graph, without code where torch can leave it for later."""
    made: GraphModule = _Lazy(dict(attributes), graph)
    return made


def lazily() -> AbstractContextManager[Any]:
    """Make torch create lazy modules while this is open, if it can, as for inductor."""
    context: AbstractContextManager[Any] = _use_lazy(True)
    return context
