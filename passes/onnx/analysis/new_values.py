"""Makes the values that a pass adds to a model: their names, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx.analysis.opsets import opset_of
from ort_dynamo.passes.onnx.analysis.value_names import ValueNames

__all__ = ["NewValues", "add_constant"]

_INITIALIZERS_ALONE = 4
"""The first IR version whose initializers need not be inputs, too."""


def add_constant(model: ir.Model, graph: ir.Graph, name: str, tensor: ir.TensorProtocol, made_by: str) -> ir.Value:
    """Add a constant to a graph: an initializer, or a node in an IR version in which initializers are inputs.

    Args:
        model: the model.
        graph: its main graph or a subgraph.
        name: a name that no value has.
        tensor: the content.
        made_by: the pass, for the metadata of a node.
    """
    if model.ir_version >= _INITIALIZERS_ALONE:
        tensor.name = name
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        graph.register_initializer(value)
        return value
    node = ir.node("Constant", [], {"value": tensor}, version=opset_of(model), metadata_props={PASS: made_by})
    (value,) = node.outputs
    value.name, value.type, value.shape = name, ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    if len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)
    return value


class NewValues:
    """Names and constants for one run of a pass. The model's names are read when the first one is asked for.

    Args:
        model: the model.
        by: the pass.
    """

    def __init__(self, model: ir.Model, by: ir.passes.InPlacePass) -> None:
        self.model = model
        self._made_by = repr(by)
        self._shared: dict[str, ir.Value] = {}

    @cached_property
    def _names(self) -> ValueNames:
        return ValueNames(self.model)

    def name(self, wanted: str) -> str:
        """Return `wanted`, or the first of wanted_2, wanted_3 … that no value of the model has."""
        return self._names.fresh(wanted)

    def constant(self, wanted: str, array: np.ndarray, graph: ir.Graph) -> ir.Value:
        """Add a constant to a graph, with a name like `wanted`."""
        return add_constant(self.model, graph, self.name(wanted), ir.tensor(array), self._made_by)

    def shared_constant(self, wanted: str, array: np.ndarray) -> ir.Value:
        """Return the constant of the main graph whose wanted name describes its content; nodes share it.

        An initializer of this name is taken if it has the same content.
        """
        if wanted not in self._shared:
            graph = self.model.graph
            known = graph.initializers.get(wanted)
            if known is None or not _is_always(known, array):
                known = self.constant(wanted, array, graph)
            self._shared[wanted] = known
        return self._shared[wanted]

    def shape(self, sizes: Sequence[int]) -> ir.Value:
        """Return the shared constant of a shape."""
        return self.shared_constant("shape_" + "x".join(map(str, sizes)), np.array(sizes, np.int64))


def _is_always(value: ir.Value, array: np.ndarray) -> bool:
    """Check whether an initializer always has these elements."""
    tensor = value.const_value
    if value.is_graph_input() or tensor is None or tensor.dtype != ir.DataType.from_numpy(array.dtype):
        return False
    return tuple(tensor.shape) == array.shape and np.array_equal(tensor.numpy(), array)
