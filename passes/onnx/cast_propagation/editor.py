"""Edits a model for cast propagation: merge casts, cancel them, make a region of nodes narrow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx.analysis.new_values import add_constant
from ort_dynamo.passes.onnx.analysis.opsets import opset_of
from ort_dynamo.passes.onnx.analysis.value_names import ValueNames
from ort_dynamo.passes.onnx.cast_propagation.regions import Region, foldable, is_cast, origin

__all__ = ["CastEditor"]

_WIDE = ir.DataType.FLOAT


class CastEditor:
    """Edits one model. New values have names of their own, made from the values they are copies of."""

    def __init__(self, model: ir.Model, made_by: str) -> None:
        """`made_by` is the pass, for the metadata of new nodes."""
        self._model = model
        self._made_by = made_by
        self._version = opset_of(model)
        self._names = ValueNames(model)
        self._constants: dict[tuple[ir.Value, ir.DataType, ir.Graph], ir.Value] = {}

    def reduce(self, graph: ir.Graph, dtype: ir.DataType) -> bool:
        """Remove the casts of a graph that do nothing, repeat an earlier one or take a widening back.

        Returns:
            Whether anything changed.
        """
        seen: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        changed = False
        for node in list(graph):
            value = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
            if value is None or value.dtype not in (_WIDE, dtype):
                continue
            to, result = ir.DataType(node.attributes.get_int("to")), node.outputs[0]
            if to not in (_WIDE, dtype):
                continue
            if to == value.dtype:
                keep = value
            elif to == dtype and origin(value, dtype) is not value:
                keep = origin(value, dtype)
            else:
                keep = seen.setdefault((value, to), result)
                if keep is result or (keep.is_graph_output() and result.is_graph_output()):
                    continue  # the first of its kind, or a second output: replacing it by an Identity gains nothing
            self._replace(node, keep)
            changed = True
        return changed

    def narrow(self, region: Region, dtype: ir.DataType) -> None:
        """Make the nodes of a region compute in `dtype`, with casts where it ends and none inside."""
        for node, operands in region.nodes.items():
            for index in operands.inputs:
                value = node.inputs[index]
                assert value is not None
                value = origin(value, dtype)
                node.replace_input_with(index, value if value.dtype == dtype else self._narrowed(value, node, dtype))
            for index in operands.outputs:
                self._make_narrow(node.outputs[index], region, dtype)

    def remove_unused(self, dtype: ir.DataType) -> bool:
        """Remove the casts whose result nothing reads, and the constants that were folded and are not read any more.

        Returns:
            Whether there were any.
        """
        changed = False
        for graph in [*reversed(list(self._model.graph.subgraphs())), self._model.graph]:
            for node in reversed(graph):
                between = is_cast(node, _WIDE, dtype) or is_cast(node, dtype, _WIDE)
                if between and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                    graph.remove(node, safe=True)
                    changed = True
        for value, _, _ in self._constants:
            if value.uses() or value.is_graph_output() or value.graph is None:
                continue
            if (producer := value.producer()) is not None:
                value.graph.remove(producer, safe=True)
            elif value.is_initializer():
                del value.graph.initializers[str(value.name)]
        return changed

    def _narrowed(self, value: ir.Value, reader: ir.Node, dtype: ir.DataType) -> ir.Value:
        """Give `value` in the narrow dtype for `reader`, by an earlier cast if there is one."""
        graph = reader.graph
        assert isinstance(graph, ir.Graph)
        casts = [use.node for use in value.uses() if is_cast(use.node, dtype) and use.node.graph is graph]
        if casts:
            graph.remove(casts[0])
            self._insert(casts[0], value, graph)
            return casts[0].outputs[0]
        if (tensor := foldable(value)) is None:
            return self._cast(value, dtype, graph)
        if (value, dtype, graph) not in self._constants:
            name = self._names.fresh(f"{value.name}_{dtype.name.lower()}")
            with np.errstate(over="ignore"):  # a cast at run time overflows silently as well
                array = tensor.numpy().astype(dtype.numpy())
            folded = add_constant(self._model, graph, name, ir.tensor(array, dtype=dtype), self._made_by)
            self._constants[value, dtype, graph] = folded
        return self._constants[value, dtype, graph]

    def _make_narrow(self, value: ir.Value, region: Region, dtype: ir.DataType) -> None:
        """Give an output of a node of the region the narrow type."""
        uses = list(value.uses())
        rounded = [use.node for use in uses if is_cast(use.node, dtype)]
        wide = [
            use
            for use in uses
            if use.node not in rounded and not (use.node in region.nodes and use.idx in region.nodes[use.node].inputs)
        ]
        producer = value.producer()
        assert producer is not None
        graph = producer.graph
        assert isinstance(graph, ir.Graph)
        value.type = ir.TensorType(dtype)
        if value.is_graph_output():
            name, shape = value.name, value.shape
            value.name = self._names.fresh(f"{name}_{dtype.name.lower()}")
            widened = self._cast(value, _WIDE, graph)
            self._take_name(widened, name, shape)
            for index, output in enumerate(graph.outputs):
                if output is value:
                    graph.outputs[index] = widened
        elif wide:
            widened = self._cast(value, _WIDE, graph)
        for use in wide:
            use.node.replace_input_with(use.idx, widened)
        for node in rounded:
            self._replace(node, value)

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        """Remove a cast whose result is `value`; a graph output keeps its name and gets a value of its own."""
        graph, old = node.graph, node.outputs[0]
        assert isinstance(graph, ir.Graph)
        producer = value.producer()
        if old.is_graph_output() and (producer is None or producer.graph is not graph or value.is_graph_output()):
            copy = self._make("Identity", value, ir.TensorType(value.dtype or _WIDE))
            graph.insert_before(node, copy)
            value = copy.outputs[0]
        was_output, name, shape = old.is_graph_output(), old.name, old.shape
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        if was_output:
            self._take_name(value, name, shape)

    def _take_name(self, value: ir.Value, name: str | None, shape: ir.Shape | None) -> None:
        value.name, value.shape = name, shape or value.shape

    def _cast(self, value: ir.Value, dtype: ir.DataType, graph: ir.Graph) -> ir.Value:
        node = self._make("Cast", value, ir.TensorType(dtype), to=dtype)
        node.outputs[0].name = self._names.fresh(f"{value.name}_{_suffix(dtype)}")
        self._insert(node, value, graph)
        return node.outputs[0]

    def _make(self, op_type: str, value: ir.Value, type_: ir.TensorType, **attributes: ir.DataType) -> ir.Node:
        metadata = {PASS: self._made_by}
        node = ir.node(op_type, [value], dict(attributes), version=self._version, metadata_props=metadata)
        node.outputs[0].type, node.outputs[0].shape = type_, value.shape
        return node

    @staticmethod
    def _insert(node: ir.Node, after: ir.Value, graph: ir.Graph) -> None:
        """Insert a node right after the producer of `after`, or first if that is outside the graph."""
        producer = after.producer()
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, node)
        elif len(graph):
            graph.insert_before(graph[0], node)
        else:
            graph.append(node)


def _suffix(dtype: ir.DataType) -> str:
    return "float32" if dtype == _WIDE else dtype.name.lower()
