"""Makes one ONNX model of a whole FX graph, for files: standard operators, and names that people know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from torch.fx import GraphModule, Node

from ort_dynamo.errors import LoweringError, OpsetError, TrainingGraphError, UnsupportedNodeError
from ort_dynamo.graph.boundary import inverse
from ort_dynamo.graph.marks import RANDOM, READABLE, SCOPE
from ort_dynamo.graph.source_line import innermost_module, user_line
from ort_dynamo.lowering.translate import Lowered, lower, refusal
from ort_dynamo.lowering.value_checks import is_number
from ort_dynamo.options.groups import PassOptions
from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames
from ort_dynamo.passes.pipelines import fx_passes, onnx_passes, opset_passes
from ort_dynamo.passes.running import run_passes
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets
from ort_dynamo.saving.program import Program, name_nodes
from ort_dynamo.saving.readable_names import makers, readable
from ort_dynamo.targets.target import OPSET, Target

__all__ = ["Scopes", "at_opset", "export_graph"]


Scopes = Callable[[Mapping[Node, str]], Mapping[Node, str]]
"""(node of a graph, path of its module or "") -> its scope in the file."""


def export_graph(
    gm: GraphModule,
    program: Program,
    options: PassOptions,
    outputs: Sequence[str],
    *,
    random: bool = True,
    contrib_ops: bool = True,
    scopes: Scopes | None = None,
) -> ir.Model:
    """Lower a functional ATen graph as one model for stock ONNX Runtime on the CPU, for any installed runtime.

    Its inputs and outputs are the graph's, in order. Inputs have the names that the program gives them. The model needs
    no torch beside it. It has no assertions, since nothing in ONNX stops a run.

    Args:
        gm: an inference graph or a joint graph of AOTAutograd, which is changed.
        program: the program's names for its inputs.
        options: the options of the passes.
        outputs: the names of the outputs.
        random: whether it may have random operators, which draw other numbers than torch's.
        contrib_ops: whether it may have ONNX Runtime's contrib operators; without them, any runtime can load it.
        scopes: gives the scope of a node, for its name and those of its values.

    Raises:
        TrainingGraphError: a node has no form in ONNX.
    """
    target = _target(contrib_ops)
    run_passes(fx_passes(options, keep_random=random), gm)
    _drop_assertions(gm)
    name_nodes(gm, program)
    if scopes is not None:
        _put(gm, scopes)
    _check(gm, target, random)
    lowered = _lowered(gm, target)
    run_passes(onnx_passes(options, target, 1), lowered.model)
    model = readable(ir.to_proto(lowered.model).SerializeToString(), gm, makers(lowered.model))
    placeholders = gm.graph.find_nodes(op="placeholder")
    _name_ends(model.graph, [str(node.meta[READABLE]) for node in placeholders], outputs)
    _unpermute(model.graph, [tuple(inverse(spec.order)) for spec in lowered.outputs])
    for value, spec in zip(tuple(model.graph.inputs), lowered.inputs, strict=True):
        if spec.order:
            _permute_input(model.graph, value, spec.order)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    return model


def _target(contrib_ops: bool) -> Target:
    """Stock ONNX Runtime on the CPU: gradient kernels are in the training build only."""
    stock = next(target for target in recorded_cpu_targets() if not target.gradient_kernels)
    return dataclasses.replace(stock, contrib_ops=contrib_ops, stands_alone=True)


def _put(gm: GraphModule, scopes: Scopes) -> None:
    unique = UniqueNames()
    for node, scope in scopes({node: (innermost_module(node) or ("",))[0] for node in gm.graph.nodes}).items():
        node.meta[SCOPE] = scope
        if node.op == "call_function":
            node.meta[READABLE] = unique.fresh(f"{scope}/{node.name}")


def _drop_assertions(gm: GraphModule) -> None:
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _check(gm: GraphModule, target: Target, random: bool) -> None:
    reasons = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or is_number(node):
            continue
        is_random = node.meta.get(RANDOM) and not random
        reason = "it generates random numbers" if is_random else refusal(node, target)
        if reason is not None:
            reasons.append(f"\n  {node.target}: {reason}\n    {user_line(node)}")
    if reasons:
        raise TrainingGraphError(reason="these operators cannot be part of it:" + "".join(reasons))


def _lowered(gm: GraphModule, target: Target) -> Lowered:
    """Lower a graph; a size that its inputs do not decide is refused with its line."""
    try:
        return lower(gm, target)
    except LoweringError as error:
        if not isinstance(error.__cause__, UnsupportedNodeError):
            raise
        raise TrainingGraphError(reason=f"{error.__cause__}\n    {error.facts['where']}") from error


def _name_ends(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names, and other values that have one of these another."""
    ends = {**dict(zip(graph.inputs, inputs, strict=True)), **dict(zip(graph.outputs, outputs, strict=True))}
    taken = {*inputs, *outputs}
    unique = UniqueNames(taken)
    made = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.initializers.values(), *made):
        if value not in ends and value.name in taken:
            value.name = unique.fresh(str(value.name))
    for value, name in ends.items():
        value.name = name


def _permute_input(graph: ir.Graph, value: ir.Value, order: Sequence[int]) -> None:
    """Give an input the dimensions of the program, if a session would get them in another order."""
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


def at_opset(model: ir.Model, version: int) -> ir.Model:
    """Convert a model to another ONNX opset; to a newer one with onnx's converter.

    Args:
        model: a model of opset OPSET. For an older opset it is changed in place.
        version: the opset of ai.onnx.

    Raises:
        OpsetError: the model cannot be converted; then it does not change.
    """
    if version <= OPSET:
        run_passes(opset_passes(version), model)
        return model
    try:
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), version))
    except Exception as error:  # onnx's converter passes on any error that it meets
        raise OpsetError(version=version, reason=str(error).strip().partition("\n")[0]) from error
