"""A training step, its gradients or its forward as an ONNX model that any InferenceSession runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
from torch import Tensor
from torch.fx import Node

from ort_dynamo.embedding import PassOptions, export_graph, onnx_dtype, onnx_tensor
from ort_dynamo.errors import TrainingGraphError
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.trainer.captured_step import CapturedStep

__all__ = ["compute_size", "step_model"]


def step_model(
    step: CapturedStep,
    description: _ORTTrainerModelDesc,
    options: PassOptions,
    *,
    contrib_ops: bool,
    may_be_fed: bool,
    parameters: Collection[str],
    optimizer: str = "Optimizer",
) -> ir.Model:
    """Make an ONNX model of a captured step.

    Its inputs are those of model_desc, then the state as it is now, which need not be given: the tensors are in the
    file, and one that is given takes their place. Its outputs are those of model_desc, then the new state, each value
    by the name of its input and ".updated", or ".grad".

    Args:
        step: the captured step.
        description: the names of inputs and outputs, and which sizes may change.
        options: by which passes run.
        contrib_ops: whether it may have operators that are ONNX Runtime's own.
        parameters: names of the model's parameters, which are marked as torch.onnx marks them.
        may_be_fed: whether the state is an input of the model; otherwise it is constant.
        optimizer: the optimizer's name, by which the nodes of the update are called.

    Raises:
        TrainingGraphError: a node has no form in ONNX.
    """
    _keep_outputs(step)
    outputs = [name for name in step.outputs if name is not None]
    scopes = partial(_scopes, outputs=outputs, prefix=_PREFIX, optimizer=optimizer)
    model = export_graph(step.graph, step.program, options, outputs, contrib_ops=contrib_ops, scopes=scopes)
    graph = model.graph
    values = {str(value.name): value for value in graph.inputs}
    given = {str(value.name): value for value in graph.outputs}
    symbols = _symbols(description, values)
    _set_inputs(graph, values, step.state, description, step.inputs, may_be_fed)
    for name in step.state.keys() & values.keys():
        values[name].metadata_props[_KIND] = "PARAMETER" if name in parameters else "BUFFER"
    _set_outputs(graph, values, given, step.repeated, description)
    _call_symbols(graph, symbols)
    return model


_PREFIX = "model."

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The key under which torch.onnx writes an initializer's kind; OnnxModule reads it."""


def _keep_outputs(step: CapturedStep) -> None:
    (output,) = step.graph.graph.find_nodes(op="output")
    kept = tuple(node for node, name in zip(output.args[0], step.outputs, strict=True) if name is not None)
    output.meta.pop("desc", None)
    output.args = (kept,)
    step.graph.graph.eliminate_dead_code()
    step.graph.recompile()


def _scopes(paths: Mapping[Node, str], outputs: Sequence[str], prefix: str, optimizer: str) -> dict[Node, str]:
    """Assign each node to a part: a module, the gradient of one, or the update of a weight."""
    returned: Any = next(node.args[0] for node in paths if node.op == "output")
    results: dict[str, Node] = dict(zip(outputs, returned, strict=True))
    weights = {name: node for name, node in results.items() if _is_of_update(name)}
    forward = _ancestors([node for name, node in results.items() if name not in weights and not name.endswith(".grad")])
    readers = {node: set[str]() for node in paths if node.op == "call_function" and node not in forward}
    for name, node in weights.items():
        for one in _ancestors([node]) & readers.keys():
            readers[one].add(name.partition(".Moment_")[0].removesuffix(".updated"))
    found: dict[Node, str] = {}
    for node, path in paths.items():
        found[node] = path.removeprefix(prefix).removeprefix(prefix.rstrip(".")) or "Loss"
        if node in readers:
            whose = readers[node]
            alone = len(whose) == 1 and not _has_later_gradient(node, readers)
            found[node] = f"{optimizer}/{next(iter(whose))}" if weights and alone else f"{found[node]}_Grad"
    return found


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that some nodes are computed from, themselves included."""
    found, wanted = set(nodes), list(nodes)
    while wanted:
        for argument in wanted.pop().all_input_nodes:
            if argument not in found:
                found.add(argument)
                wanted.append(argument)
    return found


def _is_of_update(name: str) -> bool:
    return name.endswith(".updated") or name == "all_finite"


def _has_later_gradient(node: Node, readers: Mapping[Node, set[str]]) -> bool:
    return any(user in readers and len(readers[user]) > 1 for user in node.users)


def _symbols(description: _ORTTrainerModelDesc, values: Mapping[str, ir.Value]) -> dict[str, str]:
    """Symbol of a size, as torch calls it -> its name in model_desc."""
    found: dict[str, str] = {}
    for described in description.inputs:
        value = values.get(described.name)
        shape = value.shape if value is not None and value.shape is not None else ()
        for size, name in zip(shape, described.shape, strict=False):
            if isinstance(name, str) and not isinstance(size, int):
                found.setdefault(str(size), name)
    return found


def _set_inputs(
    graph: ir.Graph,
    values: Mapping[str, ir.Value],
    state: Mapping[str, Tensor],
    description: _ORTTrainerModelDesc,
    examples: Sequence[Tensor],
    may_be_fed: bool,
) -> None:
    of_model = [described.name for described in description.inputs]
    sources = {name: values[name] for name in of_model if name in values}
    graph.inputs.clear()
    for described, example in zip(description.inputs, examples, strict=True):
        graph.inputs.append(sources.get(described.name) or _unread(described.name, described.shape, example))
    for name, value in values.items():
        if name in of_model or (name in state and not value.uses() and not value.is_graph_output()):
            continue
        if name not in state:
            if value.uses() and not compute_size(graph, value, sources):
                raise TrainingGraphError(reason=f"no node computes {name}")
            continue
        value.const_value = onnx_tensor(state[name], name)
        graph.register_initializer(value)
        if may_be_fed:
            graph.inputs.append(value)


def compute_size(graph: ir.Graph, value: ir.Value, inputs: Mapping[str, ir.Value]) -> bool:
    """Replace an input that is a size by the Shape of the input that has this size; return whether there is one.

    AOTAutograd passes symbolic sizes as integer inputs.

    Args:
        graph: the graph of the model.
        value: the input that is the size, named "<input>.size.<axis>".
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


def _unread(name: str, shape: Sequence[int | str], example: Tensor) -> ir.Value:
    """Return an input that the graph does not read: programs give it all the same."""
    sizes = [size if isinstance(size, str) else own for size, own in zip(shape, example.shape, strict=False)]
    sizes += example.shape[len(sizes) :]
    return ir.Value(name=name, type=ir.TensorType(onnx_dtype(example.dtype)), shape=ir.Shape(sizes))


def _set_outputs(
    graph: ir.Graph,
    values: Mapping[str, ir.Value],
    given: Mapping[str, ir.Value],
    repeated: Mapping[str, str],
    description: _ORTTrainerModelDesc,
) -> None:
    made = dict(given)
    for name, source in repeated.items():
        value = given.get(source) or values[source]
        node = ir.node("Identity", [value], name=name)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
        graph.append(node)
        made[name] = node.outputs[0]
    order = [described.name for described in description.outputs]
    graph.outputs.clear()
    graph.outputs.extend([made[name] for name in order])
    graph.outputs.extend([value for name, value in made.items() if name not in order])


def _call_symbols(graph: ir.Graph, symbols: Mapping[str, str]) -> None:
    for value in (*graph.inputs, *graph.outputs, *(one for node in graph.all_nodes() for one in node.outputs)):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([symbols.get(str(size), size) for size in value.shape])
