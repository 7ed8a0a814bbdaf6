"""Writes nodes into an ONNX graph by calling operators as methods: lowerings are written with it.

onnxscript has such a builder, too. Importing it imports all of onnxscript and onnx's reference evaluator, 20 MB that no
training step needs (docs/internals/decisions/0001-builder-hooks.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

__all__ = ["GraphBuilder", "OpBuilder"]


class OpBuilder:
    """The operators of one domain, each a method: `op.Add(x, 1)` adds a node and returns its output.

    Inputs are positional, with None for an omitted one; attributes are keywords. Four keywords are not attributes.
    `_outputs` is the number of outputs (default 1), or their names, or values; a value without a name is an omitted
    output. Several outputs are returned as a sequence. `_name` is the node's name. `_domain` and `_version` replace
    those of this builder.
    """

    def __init__(self, builder: GraphBuilder, domain: str, version: int) -> None:
        self.builder = builder
        self.domain = domain
        self.version = version

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("__"):
            raise AttributeError(op_type)  # Python asks for special methods of this object

        def call(
            *inputs: Any,
            _outputs: int | Sequence[str | ir.Value] = 1,
            _name: str | None = None,
            _domain: str | None = None,
            _version: int | None = None,
            **attributes: Any,
        ) -> Any:
            domain = self.domain if _domain is None else _domain
            version = self.version if _version is None else _version
            return self.builder.call_op(op_type, inputs, attributes, domain, version, _outputs, _name)

        return call

    def initializer(self, tensor: ir.TensorProtocol, name: str | None = None) -> ir.Value:
        """Add a constant to the graph, by the tensor's own name unless another is given."""
        name = name or tensor.name
        if not name:
            raise ValueError("a constant needs a name")
        return self.builder.initializer(tensor, name)


class GraphBuilder(ABC):
    """Appends nodes to a graph; a name is the operator with an index.

    Attributes:
        graph: the graph of the nodes and initializers.
        op: the operators of the default domain, in the version that the graph imports.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.op: OpBuilder = self.opset("", graph.opset_imports[""])
        self._modules: list[str] = []

    def opset(self, domain: str, version: int) -> OpBuilder:
        """Return the operators of another domain."""
        return OpBuilder(self, domain, version)

    def push_module(self, name: str) -> None:
        """Add `name` to the prefix of all later names, after the names of modules pushed before."""
        self._modules.append(name)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str | None]) -> ir.Value:
        """Add an input to the graph."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def initializer(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """Add a constant to the graph."""
        name = ".".join([*self._modules, name])
        shape = ir.Shape(tensor.shape)  # type: ignore[arg-type]  # onnx_ir takes the shape of any tensor
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def add_node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any],
        domain: str,
        version: int,
        outputs: int | Sequence[str | ir.Value],
        name: str | None,
    ) -> Any:
        """Append one node, of inputs that are values, and return its output, or a sequence of several."""
        count = self.graph.num_nodes()
        if isinstance(outputs, int):
            place = f"{op_type}_{count}"
            outputs = [place] if outputs == 1 else [f"{place}_{index}" for index in range(outputs)]
        before = f"v_{'.'.join(self._modules)}." if self._modules else "v_"
        node = ir.Node(
            domain,
            op_type,
            inputs,
            attributes=ir.convenience.convert_attributes(attributes) if attributes else (),
            outputs=[output if isinstance(output, ir.Value) else ir.Value(name=before + output) for output in outputs],
            version=version,
            name="/".join([*self._modules, f"{op_type}_node_{count}"]) if name is None else name,
        )
        self.append(node)
        return node.outputs[0] if len(node.outputs) == 1 else node.outputs

    def cast_inputs(self, schema: onnx.defs.OpSchema | None, inputs: Sequence[Any]) -> Sequence[ir.Value | None]:
        """Make values of Python scalars, typed like the values that share their type variable.

        Raises:
            ValueError: there are more inputs than the operator has, and one is a scalar.
        """
        if all(value is None or isinstance(value, ir.Value) for value in inputs):
            return inputs  # as most are: there is no need to look through the schema
        variables = [_variable_of(schema, index) for index in range(len(inputs))]
        like: dict[str, ir.Value] = {}
        for variable, value in zip(variables, inputs, strict=True):
            if isinstance(value, ir.Value) and variable and "(" not in variable:
                like.setdefault(variable, value)
        return [
            value if value is None or isinstance(value, ir.Value) else self._as_value(value, like.get(variable))
            for variable, value in zip(variables, inputs, strict=True)
        ]

    def _as_value(self, value: Any, like: ir.Value | None) -> ir.Value:
        if like is None:
            return self.promote(value, None)
        if like.dtype is not None:
            return self.promote(value, like.dtype)
        cast: ir.Value = self.op.CastLike(self.promote(value, None), like)
        return cast

    # -- decisions of a builder of a kind ------------------------------------------------------------------------

    @abstractmethod
    def call_op(
        self,
        op_type: str,
        inputs: Sequence[Any],
        attributes: dict[str, Any],
        domain: str,
        version: int,
        outputs: int | Sequence[str | ir.Value],
        name: str | None,
    ) -> Any:
        """Add nodes that compute one operator, whose inputs may be Python scalars; return the result of `add_node`."""

    @abstractmethod
    def append(self, node: ir.Node) -> None:
        """Append a node unchanged."""

    @abstractmethod
    def promote(self, value: Any, dtype: ir.DataType | None) -> ir.Value:
        """Make a constant of a Python value; None leaves the dtype to the value."""


def _variable_of(schema: onnx.defs.OpSchema | None, index: int) -> str:
    """Return the type variable of input `index`; "" where its type is its own, or not known."""
    if schema is None:
        return ""
    if index < len(schema.inputs):
        return str(schema.inputs[index].type_str)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    if not schema.inputs or schema.inputs[-1].option != variadic:
        raise ValueError(f"{schema.name} has {len(schema.inputs)} inputs, not {index + 1}")
    last = schema.inputs[-1]
    return str(last.type_str) if last.is_homogeneous else ""
