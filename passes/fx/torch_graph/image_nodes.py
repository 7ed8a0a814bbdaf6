"""The nodes of an image: in channels_last, permuted back, and in the traced layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ort_dynamo.graph.boundary import has_strides, inverse, physical_order
from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.analysis.fake_values import add_call, propagate
from ort_dynamo.passes.fx.torch_graph.images import VIEWS, channels_last, origin
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.view_operators import RESHAPES

__all__ = ["ImageNodes"]


class ImageNodes:
    """The images of a graph that is rewritten from its first node to its last, and their nodes.

    An image has channels as axis 1, and any number of other axes. An image in channels_last has an inner node, which is
    contiguous with the channels as its last axis. If a session computes the inner node, the original one is removed.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inner: dict[Node, Node] = {}
        self._gone: set[Node] = set()
        self._moved: dict[Node, Any] = {}  # other node whose strides follow -> its value as traced
        self._converted: dict[Node, torch.Tensor] = {}  # node that is in channels_last itself -> its value as traced
        self._plain: dict[Node, Node] = {}  # view of an image -> its inner node, the same elements in memory order
        self._copied: dict[Node, Node] = {}  # image with an inner node that has gaps -> the same of a contiguous copy
        self._outer: dict[Node, Node] = {}  # image -> the permutation back of its inner node
        self._traced: dict[tuple[Node, Any], Node] = {}  # image, half of its reader or true for results -> a copy

    # -- images ------------------------------------------------------------------------------------------------------

    def _add(self, reader: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call where the graph inserts, which belongs to a node and runs where that does not say."""
        return add_call(self._graph, target, args, kwargs, origin(reader))

    def _value(self, node: Node) -> Any:
        """Return the value of a node as it was traced."""
        return self._moved.get(node, node.meta["val"])

    def _give(self, node: Node, inner: Node) -> None:
        """Make an image's readers find it as `inner`, and remove its node."""
        self._inner[node] = inner
        self._gone.add(node)

    def _note(self, node: Node, traced: torch.Tensor) -> None:
        """Note an image that torch gives in channels_last."""
        with self._graph.inserting_before(node.next):
            self._inner[node] = self._add(node, aten.permute.default, node, [*channels_last(4)])
        self._converted[node] = traced

    def _begin(self, node: Node) -> bool:
        """Note a permutation of a contiguous tensor that gives an image in channels_last."""
        source: Any = node.args[0]
        self._inner[node], self._converted[node] = source, self._value(node)
        return True

    def _image(self, node: Node, reader: Node) -> Node:
        """Return the node of an image in the strides of channels_last."""
        if node not in self._inner:
            if has_strides(node.meta["val"], channels_last(4)):
                return node
            permuted = self._add(reader, aten.permute.default, node, [*channels_last(4)])
            self._inner[node] = self._contiguous(permuted, reader)
        elif not has_strides(self._inner[node].meta["val"], range(4)):
            if node not in self._copied:  # expanded, or a slice
                copied = self._contiguous(self._inner[node], reader)
                self._copied[node] = self._add(reader, aten.permute.default, copied, inverse(channels_last(4)))
            return self._copied[node]
        return node if node in self._converted else self._permuted_back(node)

    def _permuted_back(self, node: Node) -> Node:
        """Return the permutation back of an image's inner node."""
        if node not in self._outer:
            inner = self._inner[node]
            order = inverse(channels_last(inner.meta["val"].dim()))
            with self._graph.inserting_before(inner.next):
                self._outer[node] = self._add(inner, aten.permute.default, inner, order)
        return self._outer[node]

    def _permuted(self, node: Node, reader: Node) -> Node:
        """Return the inner node of an operand with all axes of an image; the operand may be in another layout."""
        if node in self._inner:
            return self._inner[node]
        fake = node.meta["val"]
        order = channels_last(fake.dim())
        if fake.dim() > 2 and list(fake.shape[2:]) == [1] * (fake.dim() - 2) and _is_dense(fake):
            return self._add(reader, aten.view.default, node, [fake.shape[axis] for axis in order])
        return self._add(reader, aten.permute.default, node, [*order])

    def _contiguous(self, node: Node, reader: Node) -> Node:
        return self._add(reader, aten.clone.default, node, memory_format=torch.contiguous_format)

    # -- going back --------------------------------------------------------------------------------------------------

    def _is_changed(self, node: Node) -> bool:
        """Check whether a node is removed, or has other strides than it was traced with."""
        return node in self._gone or node in self._converted

    def _read_as_traced(self, reader: Node) -> None:
        for node in reader.all_input_nodes:
            if self._is_changed(node):
                reader.replace_input_with(node, self._as_traced(node, reader))

    def _return_as_traced(self, output: Node) -> None:
        """Restore the traced strides of results, each where its image is computed."""
        traced = {node: self._value(node) for node in output.all_input_nodes}
        for node in output.all_input_nodes:
            if self._is_changed(node):
                with self._graph.inserting_before(node.next):
                    result = self._as_traced(node, output)
                output.replace_input_with(node, result)
                traced[result] = self._converted.get(node, self._value(node))
        for node in output.all_input_nodes:
            if isinstance(value := traced[node], torch.Tensor):
                with self._graph.inserting_before(node.next):
                    output.replace_input_with(node, self._ordered(node, value, node))

    def _as_traced(self, node: Node, reader: Node) -> Node:
        """Return an image in the strides that it was traced with; of a view, the same view of its base."""
        like = node if reader.op == "output" else reader  # results are computed where their images are
        key = node, reader.op == "output" or like.meta.get(HALF)  # a reader's copy may come too late for a result
        if key not in self._traced:
            is_there = node in self._converted
            source: Any = node.args[0]
            if node in self._gone and node.target in VIEWS:
                base = self._as_traced(source, reader) if self._is_changed(source) else source
                self._traced[key] = self._add(like, node.target, base, *node.args[1:])
            else:
                image = node if is_there else self._permuted_back(node)
                self._traced[key] = self._ordered(image, self._converted[node] if is_there else self._value(node), like)
        return self._traced[key]

    def _ordered(self, image: Node, traced: torch.Tensor, reader: Node) -> Node:
        """Return an image in the order of a fake tensor's axes in memory."""
        order = physical_order(traced) or tuple(range(traced.dim()))
        if has_strides(image.meta["val"], order) or not has_strides(traced, order):
            return image
        if order == tuple(range(traced.dim())):
            return self._contiguous(image, reader)
        permuted = self._add(reader, aten.permute.default, image, [*order])
        return self._add(reader, aten.permute.default, self._contiguous(permuted, reader), inverse(order))

    def _follow(self, node: Node) -> None:
        """Have a node read views of images in memory's order, and give it the strides that follow."""
        plain = [one for one in node.all_input_nodes if one in self._plain]
        for one in plain:
            node.replace_input_with(one, self._plain[one])
        moved = [one for one in node.all_input_nodes if one in self._moved]
        if not plain and not moved:
            return
        for one in moved:
            if node.target in RESHAPES and not has_strides(one.meta["val"], range(one.meta["val"].dim())):
                node.replace_input_with(one, self._contiguous(one, node))  # strides may not allow the view
        before = node.meta["val"]
        propagate([node])
        if node.meta["val"] is not before:
            self._moved[node] = before


def _is_dense(fake: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in fake.shape) and has_strides(fake, range(fake.dim()))
