"""Groups of nodes become one kernel each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.graph.fused_op import DOMAIN, FusedOp, Size
from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.opsets import is_older
from ort_dynamo.passes.onnx.analysis.shapes import RESHAPES, behind
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.fused_kernels.arithmetic import needs_kernel
from ort_dynamo.passes.onnx.fused_kernels.bodies import body_of, is_in_parts
from ort_dynamo.passes.onnx.fused_kernels.computed_shapes import measuring
from ort_dynamo.passes.onnx.fused_kernels.group import MOVES, Group
from ort_dynamo.passes.onnx.fused_kernels.group_kernel import kernel_of
from ort_dynamo.passes.onnx.fused_kernels.groups import find_groups
from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel, product
from ort_dynamo.passes.onnx.fused_kernels.made import KERNEL, fused_kernels
from ort_dynamo.passes.onnx.fused_kernels.sizes import ValueSizes, dimension_of
from ort_dynamo.passes.onnx.fused_kernels.triton_source import fused_op
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import OPSET

__all__ = ["FuseKernels", "fused_kernels", "fused_ops", "lacks_kernel"]

_OPSET = 13
"""Softmax and LogSoftmax of older opsets normalize several axes, from axis 1 on, and ReduceSum has no second input."""


def fused_ops(model: ir.Model) -> tuple[FusedOp, ...]:
    """Return the operators of these kernels, as sessions compile and launch them."""
    return tuple(fused_op(kernel, name) for name, kernel in fused_kernels(model).items())


def lacks_kernel(model: ir.Model) -> str | None:
    """Give the reason why a node that needs a fused kernel would not get one; None if all get one.

    The groups are those that FuseKernels makes, so a node that this lets pass has its kernel in any graph.
    """
    nodes = [node for node in model.graph.all_nodes() if needs_kernel(node)]
    if not nodes:
        return None
    infer_missing_types(model, shapes=True)
    made = {node for group in find_groups(model.graph, ValueSizes()) for node in group.nodes}
    left = next((node for node in nodes if node not in made), None)
    if left is None:
        return None
    shapes = [value.shape for value in (*left.inputs, *left.outputs) if value is not None and value.shape is not None]
    if any(0 in shape.dims for shape in shapes):
        return f"a fused {left.op_type} takes no tensor without elements"
    return f"no fused kernel computes its {left.op_type}"


@ordering(needs=[Condition.CASTS_MOVED, Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class FuseKernels(ir.passes.InPlacePass):
    """Fuse pointwise operators, reductions of rows and data movement between them into nodes of our own domain.

    Each such node is a custom operator, which a session with the library runs in one launch. It is also a function of
    the model whose body has the original nodes, for all other sessions. `fused_kernels` gives the kernels.
    A model of opset 12 or older does not change.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph."""
        if is_older(model, _OPSET):
            return ir.passes.PassResult(model, False)
        infer_missing_types(model, shapes=True)
        new, sizes = NewValues(model, self), ValueSizes()
        groups = find_groups(model.graph, sizes)
        kernels = [kernel_of(group, sizes) for group in groups]
        late = _readers_of_parts(groups, kernels)
        finishing: list[list[ir.Node]] = []
        early = [pair for pair in zip(groups, kernels, strict=True) if pair[0] not in late]
        self._put(new, early, finishing)
        if finishing:
            model.graph.sort()
            sizes = ValueSizes()
            groups = find_groups(model.graph, sizes, finishing)
            self._put(new, [(group, kernel_of(group, sizes, in_parts=False)) for group in groups], finishing)
        if early:
            model.graph.opset_imports[DOMAIN] = 1
            model.graph.sort()
        return ir.passes.PassResult(model, bool(early))

    def _put(self, new: NewValues, groups: Sequence[tuple[Group, Kernel]], finishing: list[list[ir.Node]]) -> None:
        """Replace groups by kernels, and add the nodes that sum up partial sums."""
        graph = new.model.graph
        made = [self._kernel_node(new, group, kernel) for group, kernel in groups]  # while all values are there
        for (group, _), node in zip(groups, made, strict=True):
            graph.insert_after(group.nodes[-1], node)
        for (group, _), node in zip(groups, made, strict=True):
            self._put_in(new, group, node, finishing)
        _remove_unread(graph, {node for group, _ in groups for node in (*measuring(group.nodes), *group.nodes)})

    def _kernel_node(self, names: NewValues, group: Group, kernel: Kernel) -> ir.Node:
        """Return the node of a group; its function is the model's, which equal groups share.

        Equal kernels may have other bodies: a kernel traverses tensors in memory, and a body has their shapes.
        """
        model = names.model
        function = body_of(group, kernel, DOMAIN, "", model.graph.opset_imports)
        body = ir.to_proto(function).SerializeToString(deterministic=True)
        digest = hashlib.sha256(repr(kernel).encode() + body).hexdigest()
        name = function.name = f"{_words(group)}_{digest[:12]}"
        if (DOMAIN, name, "") not in model.functions:
            function.meta[KERNEL] = kernel
            model.functions[function.identifier()] = function
        node = ir.node(name, list(group.inputs), domain=DOMAIN, num_outputs=len(group.outputs))
        node.name, node.metadata_props[PASS] = f"{name}_{group.outputs[0].name}", repr(self)
        for new, old, store in zip(node.outputs, group.outputs, kernel.stores, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            if is_in_parts(store):
                dims = [dimension_of(size, kernel.symbols, group.inputs) for size in store.shape]
                new.name, new.shape = names.name(f"{old.name}_parts"), ir.Shape(dims)
        return node

    def _put_in(self, names: NewValues, group: Group, node: ir.Node, finishing: list[list[ir.Node]]) -> None:
        in_parts = [pair for pair in zip(group.outputs, node.outputs, strict=True) if pair[0].name != pair[1].name]
        finished = _finished(names, node, in_parts, finishing) if in_parts else {}
        for old, new in zip(group.outputs, node.outputs, strict=True):
            new = finished.get(old, new)
            new.name, new.type, new.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _readers_of_parts(groups: Sequence[Group], kernels: Sequence[Kernel]) -> set[Group]:
    """Return the groups whose inputs are only sums over rows, and whose partial sums other groups compute.

    They can be part of the groups that add the partial sums.
    """
    sums: dict[ir.Value, int] = {}
    for group, kernel in zip(groups, kernels, strict=True):
        for store, output in zip(kernel.stores, group.outputs, strict=True):
            if is_in_parts(store):
                sums[output] = product(kernel.column_loops).factor
    found = set()
    for group, kernel in zip(groups, kernels, strict=True):
        read = [sums[source] for value in group.inputs if (source := behind(value, RESHAPES)) in sums]
        if read and not kernel.columns and all(kernel.count == Size(width) for width in read):
            found.add(group)
    return found


def _finished(
    new: NewValues, after: ir.Node, sums: Sequence[tuple[ir.Value, ir.Value]], finishing: list[list[ir.Node]]
) -> dict[ir.Value, ir.Value]:
    """Add the nodes that sum up partial sums, for each group of rows; give the value of each sum.

    Args:
        new: the new values of the model.
        after: the node that computes the partial sums.
        sums: each value to be replaced, with its partial sums, which have equal shapes.
        finishing: a list that gets the new nodes.
    """
    tape = ir.tape.Tape()
    found, added = {}, []
    for total, parts in sums:
        assert parts.shape is not None
        assert total.shape is not None
        *before, _, width = parts.shape
        summed = tape.op("ReduceSum", [parts, new.shape([len(before)])], {"keepdims": 0}, version=OPSET)
        summed.name, summed.type = new.name(f"{total.name}_flat"), total.type
        summed.shape = ir.Shape([*before, width])
        node = summed.producer()
        assert node is not None
        added.append(node)
        sizes = [dim if isinstance(dim, int) else -1 for dim in total.shape]
        is_flat = len(sizes) == len(summed.shape)
        found[total] = summed if is_flat else tape.op("Reshape", [summed, new.shape(sizes)], version=OPSET)
    new.model.graph.insert_after(after, tape.nodes)
    finishing.append(added)
    return found


def _remove_unread(graph: ir.Graph, nodes: set[ir.Node]) -> None:
    """Remove dead nodes among these, which are in the order of the graph."""
    for node in [node for node in reversed(graph) if node in nodes]:
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def _words(group: Group) -> str:
    """Return the first operators of a group that compute, for whoever reads a profile."""
    words = dict.fromkeys(node.op_type.lower() for node in group.nodes if node.op_type not in (*MOVES, "Cast"))
    return "_".join(list(words)[:4]) or "cast"
