"""Writes the function whose body is the nodes of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.analysis.opsets import ONNX_DOMAINS
from ort_dynamo.passes.onnx.fused_kernels.computed_shapes import measuring
from ort_dynamo.passes.onnx.fused_kernels.group import Group
from ort_dynamo.passes.onnx.fused_kernels.kernel import ColumnSum, Kernel, Store

__all__ = ["body_of", "is_in_parts"]


def body_of(group: Group, kernel: Kernel, domain: str, name: str, opset_imports: Mapping[str, int]) -> ir.Function:
    """Make a function with copies of the nodes of a group, and of those that compute its shapes. Constants are nodes.

    Args:
        group: the group of nodes.
        kernel: the kernel of the group; the function has its partial sums, too.
        domain: the domain of the function.
        name: the name of the function.
        opset_imports: the opset imports of the model.
    """
    values: dict[ir.Value, ir.Value] = {value: ir.Value(name=f"x{n}") for n, value in enumerate(group.inputs)}
    inputs, nodes = list(values.values()), []
    parts = {
        output.producer() for store, output in zip(kernel.stores, group.outputs, strict=True) if is_in_parts(store)
    }
    for number, node in enumerate([*measuring(group.nodes), *group.nodes]):
        read: list[ir.Value | None] = []
        for value in node.inputs:
            if value is not None and value not in values:
                constant = _constant(value, f"c{len(values)}")
                nodes.append(constant)
                values[value] = constant.outputs[0]
            read.append(None if value is None else values[value])
        if node in parts:
            values[node.outputs[0]] = ir.Value(name=f"y{number}_0")
            continue
        copy = ir.Node(node.domain, node.op_type, read, list(node.attributes.values()), num_outputs=len(node.outputs))
        for place, (old, new) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
            new.name, values[old] = f"y{number}_{place}" if old.name else "", new
        nodes.append(copy)
    for store, output in zip(kernel.stores, group.outputs, strict=True):
        if is_in_parts(store):
            nodes += _in_parts(values, output, kernel, store.shape)
    used = {node.domain for node in nodes}
    graph = ir.Graph(
        inputs,
        [values[output] for output in group.outputs],
        nodes=nodes,
        opset_imports={key: version for key, version in opset_imports.items() if key in {*used, *ONNX_DOMAINS}},
    )
    return ir.Function(domain, name, graph=graph, attributes=())


def is_in_parts(store: Store | ColumnSum) -> bool:
    """Check whether a kernel stores the sums of parts in place of an output."""
    return isinstance(store, ColumnSum) and store.in_parts


def _in_parts(
    values: dict[ir.Value, ir.Value], output: ir.Value, kernel: Kernel, shape: Sequence[Size]
) -> list[ir.Node]:
    """Return the nodes of the partial sums that replace the sum: of rows in equal parts, with zeros at the end."""
    producer = output.producer()
    assert producer is not None
    x = producer.inputs[0]
    assert x is not None
    name, nodes = values[output].name, list[ir.Node]()

    def add(op_type: str, *operands: ir.Value, **attributes: ir.Attr | int | ir.TensorProtocol) -> ir.Value:
        node = ir.node(op_type, operands, attributes=attributes)
        nodes.append(node)
        node.outputs[0].name = f"{name}_{len(nodes)}"
        return node.outputs[0]

    def integers(*numbers: int) -> ir.Value:
        return add("Constant", value=ir.tensor(np.array(numbers, np.int64)))

    *several, columns = [-1 if size.symbols else size.factor for size in shape]
    rows, part = values[x], kernel.part if kernel.has_even_parts else None
    if part is None:
        (parts,) = several
        rows = add("Reshape", rows, integers(-1, columns))
        count = add("Gather", add("Shape", rows), integers(0))  # a Shape of a part needs opset 15
        size = add("Div", add("Add", count, integers(parts - 1)), integers(parts))
        left = add("Sub", add("Mul", size, integers(parts)), count)
        rows = add("Pad", rows, add("Concat", integers(0, 0), left, integers(0), axis=0))
    cut = add("Reshape", rows, integers(*several, -1 if part is None else part, columns))
    values[output] = add("ReduceSum", cut, integers(len(several)), keepdims=0)
    return nodes


def _constant(value: ir.Value, name: str) -> ir.Node:
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None, f"{value.name} is an input of the group"
    plain = ir.tensor(tensor.numpy(), dtype=tensor.dtype)
    constant = ir.node("Constant", [], attributes={"value": plain})
    constant.outputs[0].name = name
    return constant
