"""Makes one ONNX model of a whole FX graph, for files: standard operators, and names that people know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from torch.fx import GraphModule, Node

from ort_dynamo.boundary import inverse
from ort_dynamo.errors import OpsetError, TrainingGraphError
from ort_dynamo.lowering.translate import lower, refusal
from ort_dynamo.options.groups import PassOptions
from ort_dynamo.passes.pipelines import fx_passes, onnx_passes, opset_passes
from ort_dynamo.passes.running import run_passes
from ort_dynamo.runtime.providers import recorded_cpu_targets
from ort_dynamo.saving.program import Program, name_nodes
from ort_dynamo.saving.readable import makers, readable
from ort_dynamo.source_line import user_line
from ort_dynamo.target import OPSET, Target

__all__ = ["ancestors", "at_opset", "file_target", "size_from_shape", "whole_model"]


def file_target(*, contrib_ops: bool) -> Target:
    """Stock ONNX Runtime on the CPU, whatever is installed: gradient kernels are in the training build only.

    Args:
        contrib_ops: whether the model may have ONNX Runtime's own operators; without, any runtime can load it.
    """
    stock = next(target for target in recorded_cpu_targets() if not target.gradient_kernels)
    return dataclasses.replace(stock, contrib_ops=contrib_ops, stands_alone=True)


def whole_model(
    gm: GraphModule,
    program: Program,
    target: Target,
    options: PassOptions,
    name: Callable[[GraphModule], None] = lambda gm: None,
) -> ir.Model:
    """Lower a functional ATen graph as one model.

    Its inputs and outputs are the graph's, in order. Assertions are left out: nothing in ONNX stops a run.

    Args:
        gm: an inference graph of AOTAutograd, which is changed.
        program: what the program calls its inputs.
        target: what to lower for; its models stand alone.
        options: by which passes run.
        name: gives nodes other names (meta READABLE and SCOPE) when they have those of the program.

    Raises:
        TrainingGraphError: a node has no form in ONNX.
    """
    run_passes(fx_passes(options, draws=True), gm)
    _drop_assertions(gm)
    name_nodes(gm, program)
    name(gm)
    _check(gm, target)
    lowered = lower(gm, target)
    run_passes(onnx_passes(options, target), lowered.model)
    model = readable(ir.to_proto(lowered.model).SerializeToString(), gm, makers(lowered.model))
    _unpermute(model.graph, [tuple(inverse(spec.order)) for spec in lowered.outputs])
    for value, spec in zip(tuple(model.graph.inputs), lowered.inputs, strict=True):
        if spec.order:
            _permute_input(model.graph, value, spec.order)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    return model


def _drop_assertions(gm: GraphModule) -> None:
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _check(gm: GraphModule, target: Target) -> None:
    reasons = []
    for node in gm.graph.nodes:
        is_size = isinstance(node.meta.get("val"), (int, torch.SymInt))
        reason = refusal(node, target) if node.op == "call_function" and not is_size else None
        if reason is not None:
            reasons.append(f"\n  {node.target}: {reason}\n    {user_line(node)}")
    if reasons:
        raise TrainingGraphError(reason="these operators have no place in it:" + "".join(reasons))


def _permute_input(graph: ir.Graph, value: ir.Value, order: Sequence[int]) -> None:
    """Have an input with the dimensions that the program knows, where a session would get them in another order."""
    name = str(value.name)
    given = ir.Value(name=name, type=value.type)
    if value.shape is not None:
        given.shape = ir.Shape([value.shape[axis] for axis in inverse(tuple(order))])
    value.name = f"{name}/permuted"
    node = ir.node("Transpose", [given], {"perm": list(order)}, name=value.name)
    node.outputs[0].name = value.name
    graph.inputs[list(graph.inputs).index(value)] = given
    ir.convenience.replace_all_uses_with(value, node.outputs[0])
    graph.insert_before(graph[0], node)


def _unpermute(graph: ir.Graph, orders: Sequence[tuple[int, ...]]) -> None:
    for index, (value, order) in enumerate(zip(tuple(graph.outputs), orders, strict=True)):
        if order:
            name = str(value.name)
            value.name = f"{name}/permuted"
            node = ir.node("Transpose", [value], {"perm": list(order)}, name=name)
            node.outputs[0].name, node.outputs[0].type = name, value.type
            if value.shape is not None:
                node.outputs[0].shape = ir.Shape([value.shape[axis] for axis in order])
            graph.append(node)
            graph.outputs[index] = node.outputs[0]


def size_from_shape(graph: ir.Graph, value: ir.Value, inputs: Mapping[str, ir.Value]) -> bool:
    """Compute a size, which AOTAutograd hands over as a number, from the input that has it; whether one has.

    Args:
        graph: the model's.
        value: the input that is the size, called "<input>.size.<axis>".
        inputs: the model's other inputs, by name.
    """
    owner, _, axis = str(value.name).rpartition(".size.")
    source = inputs.get(owner)
    if source is None:
        return False
    shape = ir.node("Shape", [source], {"start": int(axis), "end": int(axis) + 1}, name=f"{value.name}/vector")
    size = ir.node("Squeeze", shape.outputs, name=str(value.name))
    size.outputs[0].type, size.outputs[0].shape = value.type, ir.Shape([])
    ir.convenience.replace_all_uses_with(value, size.outputs[0])
    graph.insert_before(graph[0], [shape, size])
    return True


def at_opset(model: ir.Model, version: int) -> ir.Model:
    """Convert a model to another version of ONNX's operators: to a newer one with onnx's converter.

    Args:
        model: of opset OPSET. To an older version it is changed in place.
        version: of ai.onnx.

    Raises:
        OpsetError: it cannot be converted; then it is as it was.
    """
    if version <= OPSET:
        run_passes(opset_passes(version), model)
        return model
    try:
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), version))
    except Exception as error:  # onnx's converter raises whatever it meets
        raise OpsetError(version=version, reason=str(error).strip().partition("\n")[0]) from error


def ancestors(nodes: Sequence[Node]) -> set[Node]:
    """The nodes that some nodes are computed from, themselves included."""
    found, wanted = set(nodes), list(nodes)
    while wanted:
        for argument in wanted.pop().all_input_nodes:
            if argument not in found:
                found.add(argument)
                wanted.append(argument)
    return found
