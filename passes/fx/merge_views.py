"""Merge equal views of one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.aliases import seen_by_outputs
from ort_dynamo.passes.fx.analysis.mutation import mutated_storages
from ort_dynamo.passes.fx.analysis.saved_tensors import is_tensor, tagged_alike
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.promotion import is_contiguous
from ort_dynamo.torch_internals.kernels.view_operators import ALIASES, RESHAPES, VIEWS
from ort_dynamo.torch_internals.sizes.symbols import given_expression

__all__ = ["MergeViews"]


@ordering(gives=[Condition.VIEWS_MERGED], ends=[Condition.VIEWS_AS_TRACED])
@dataclass(frozen=True)
class MergeViews(PassBase):
    """Replace a view by an earlier view with the same elements, or by the tensor that it leads back to.

    1. A view of x with the sizes, strides and offset of x, or of an earlier view of x, becomes that one. So `t(t(x))`
       becomes x (the gradient of a linear layer's weight is such a pair), and the views that queries, keys and values
       take of one tensor become one.
    2. `view(view(x))` becomes a view of x, where x is contiguous.

    A view that is an output stays, where the merged node is an output, too, or is an input's memory: AOTAutograd has
    promised which outputs alias. So do a `detach` and its views, if one of them is an output: it requires no gradient.
    So do views of an input that is written to, as FSDP gives its parameters other memory
    in the graph, and views that are recomputed where the other is not.
    """

    name: str = "merge_views"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite `graph_module` in place."""
        if modified := _Merger(graph_module).run():
            graph_module.recompile()
        return PassResult(graph_module, modified)


class _Merger:
    def __init__(self, gm: GraphModule) -> None:
        self._graph = gm.graph
        self._outputs = set(gm.graph.output_node().all_input_nodes)
        self._mutated = mutated_storages(gm)
        self._shown: dict[tuple[Any, ...], Node] = {}

    def run(self) -> bool:
        """Rewrite the graph; whether anything changed."""
        roots: dict[Node, Node] = {}
        seen = seen_by_outputs(self._graph)
        modified = False
        for node in list(self._graph.nodes):
            if node.op != "call_function" or node.target not in VIEWS:
                continue
            source: Any = node.args[0]
            if node.target in ALIASES and node in seen:
                roots[node] = node  # its views that are outputs belong to no graph of autograd
                continue
            root = roots[node] = roots.get(source, source)
            if not _shares_memory(node, root) or storage_of(root) in self._mutated:
                continue
            same = self._same(node, root)
            if same is not node:
                node.replace_all_uses_with(same)
                modified = True
            elif _is_reshaped_twice(node, source):
                node.replace_input_with(source, source.args[0])
                modified = True
        if modified:
            _erase_unread(self._graph, roots)
        return modified

    def _same(self, node: Node, root: Node) -> Node:
        """Find `root` or an earlier view of it with the elements and memory layout of `node`; else give `node`."""
        self._shown.setdefault(_layout(root, root), root)
        same = self._shown.setdefault(_layout(root, node), node)
        promised = node in self._outputs and (same in self._outputs or root.op != "call_function")
        return same if _stands_for(same, node) and not promised else node


def _is_reshaped_twice(node: Node, source: Any) -> bool:
    """Check whether `node`, a reshape of the reshape `source`, can be a view of the tensor that `source` views."""
    if node.target not in RESHAPES or source.target not in RESHAPES:
        return False
    viewed = source.args[0]
    return is_contiguous(viewed.meta["val"]) and _stands_for(viewed, source) and tagged_alike(source, node)


def _stands_for(node: Node, view: Node) -> bool:
    """Check whether readers of a view may read `node`: it is an input, or it is recomputed where the view is."""
    return node.op != "call_function" or tagged_alike(node, view)


def _shares_memory(node: Node, root: Node) -> bool:
    """Check whether `node` is a strided alias of `root`: both are strided tensors in one storage."""
    return is_tensor(node) and is_tensor(root) and storage_of(node) == storage_of(root)


def _layout(root: Node, node: Node) -> tuple[Any, ...]:
    """Give the key of a view: it is equal for two views that show the same elements of `root` in the same layout."""
    fake = node.meta["val"]
    numbers = (*fake.shape, *fake.stride(), fake.storage_offset())
    return (root, len(fake.shape), fake.is_neg(), *map(given_expression, numbers))


def _erase_unread(graph: Graph, views: Iterable[Node]) -> None:
    for view in reversed(list(views)):
        if not view.users:
            graph.erase_node(view)
