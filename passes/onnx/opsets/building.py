"""Build the nodes that replace one node in an older opset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of

__all__ = ["Builder", "InexpressibleError"]


class InexpressibleError(Exception):
    """A node has no form in the older opset; the message is the reason, as the end of "<node>: ..."."""


class Builder:
    """Makes nodes that are in no graph yet.

    Args:
        node: the node that they replace: they get its metadata, and names that begin with its name.
        fresh: gives a name that no value and no node has.
        metadata: more metadata for them.
    """

    def __init__(self, node: ir.Node, fresh: Callable[[str], str], metadata: dict[str, str]) -> None:
        self._node = node
        self._fresh = fresh
        self._metadata = {**node.metadata_props, **metadata}
        self._prefix = node.name or next((value.name for value in node.outputs if value.name), node.op_type)
        self.nodes: list[ir.Node] = []

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        dtype: ir.DataType | None = None,
        outputs: int = 1,
        **attributes: Any,
    ) -> ir.Value:
        """Return the first output of a new node of ai.onnx."""
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs)
        for value in node.outputs:
            value.type = ir.TensorType(dtype) if dtype is not None else None
        self.take(node, op_type)
        return node.outputs[0]

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """Return a 1-D int64 constant."""
        tensor = ir.tensor(list(numbers), dtype=ir.DataType.INT64)
        value = self.op("Constant", value=tensor, dtype=ir.DataType.INT64)
        value.shape = ir.Shape([len(numbers)])
        return value

    def take(self, node: ir.Node, name: str) -> None:
        """Add a node, which no graph has, and name it and its outputs."""
        node.name = self._fresh(f"{self._prefix}/{name}")
        for index, value in enumerate(node.outputs):
            if value.name != "":  # one that is left out
                value.name = self._fresh(f"{node.name}/{index}") if index else node.name
        node.metadata_props.update(self._metadata)
        self.nodes.append(node)

    def name_inside(self, node: ir.Node) -> None:
        """Name the values of the graphs in a node, which are no graphs of the model: no value may hide another."""
        for graph in subgraphs_of(node):
            made = (value for inner in graph for value in inner.outputs)
            for value in (*graph.inputs, *graph.initializers.values(), *made):
                if value.name:
                    value.name = self._fresh(f"{node.name}/{value.name}")
            for inner in graph:
                self.name_inside(inner)

    def discard(self) -> None:
        """Forget the nodes, so that they read nothing."""
        for node in self.nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        self.nodes.clear()
