"""A training step, its gradients or its forward as an ONNX model that any InferenceSession runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import onnx_ir as ir
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ort_dynamo.dtypes import onnx_dtype
from ort_dynamo.errors import TrainingGraphError
from ort_dynamo.marks import READABLE, SCOPE
from ort_dynamo.options.groups import PassOptions
from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames
from ort_dynamo.saving.whole_graph import ancestors, file_target, size_from_shape, whole_model
from ort_dynamo.source_line import innermost_module
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.trainer.captured_step import CapturedStep

__all__ = ["step_model"]


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
    file, and one that is given takes their place. Its outputs are those of model_desc, then what the step computes of
    the state, each by the name of its input and ".updated", or ".grad".

    Args:
        step: what was captured.
        description: what inputs and outputs are called, and which sizes may change.
        options: by which passes run.
        contrib_ops: whether it may have operators that are ONNX Runtime's own.
        parameters: names of the model's parameters, which are marked as torch.onnx marks them.
        may_be_fed: whether the state is an input of the model; otherwise it is constant.
        optimizer: what the nodes of the update are called by.

    Raises:
        TrainingGraphError: a node has no form in ONNX.
    """
    called = partial(_name_parts, outputs=step.outputs, prefix=_PREFIX, optimizer=optimizer)
    _keep_outputs(step)
    outputs = [name for name in step.outputs if name is not None]
    placeholders = list(step.program.inputs)
    model = whole_model(step.graph, step.program, file_target(contrib_ops=contrib_ops), options, called)
    graph = model.graph
    values = dict(zip(placeholders, tuple(graph.inputs), strict=True))
    given = dict(zip(outputs, tuple(graph.outputs), strict=True))
    _set_names(graph, values, given)
    symbols = _symbols(description, values)
    _set_inputs(graph, values, step.state, description, step.inputs, may_be_fed)
    for name in step.state.keys() & values.keys():
        values[name].metadata_props[_KIND] = "PARAMETER" if name in parameters else "BUFFER"
    _set_outputs(graph, values, given, step.repeated, description)
    _call_symbols(graph, symbols)
    return model


_PREFIX = "model."

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Under which torch.onnx says what an initializer is; OnnxModule reads it."""


def _keep_outputs(step: CapturedStep) -> None:
    (output,) = step.graph.graph.find_nodes(op="output")
    kept = tuple(node for node, name in zip(output.args[0], step.outputs, strict=True) if name is not None)
    output.meta.pop("desc", None)
    output.args = (kept,)
    step.graph.graph.eliminate_dead_code()
    step.graph.recompile()


def _name_parts(gm: GraphModule, outputs: Sequence[str | None], prefix: str, optimizer: str) -> None:
    """Name nodes by what they belong to: a module, the gradient of one, or the update of a weight."""
    (output,) = gm.graph.find_nodes(op="output")
    names = [name for name in outputs if name is not None]
    results = dict(zip(names, output.args[0], strict=True))
    weights = {name: node for name, node in results.items() if _is_of_update(name)}
    forward = ancestors([node for name, node in results.items() if name not in weights and not name.endswith(".grad")])
    others = [node for node in gm.graph.nodes if node.op == "call_function" and node not in forward]
    readers = {node: set[str]() for node in others}
    for name, node in weights.items():
        for one in ancestors([node]) & readers.keys():
            readers[one].add(name.partition(".Moment_")[0].removesuffix(".updated"))
    unique = UniqueNames()
    for node in gm.graph.nodes:
        scope = _scope(node, prefix)
        if node in readers:
            whose = readers[node]
            alone = len(whose) == 1 and not _has_later_gradient(node, readers)
            scope = f"{optimizer}/{next(iter(whose))}" if weights and alone else f"{scope}_Grad"
        node.meta[SCOPE] = scope
        if node.op == "call_function":
            node.meta[READABLE] = unique.fresh(f"{scope}/{node.name}")


def _is_of_update(name: str) -> bool:
    return name.endswith(".updated") or name == "all_finite"


def _has_later_gradient(node: Node, readers: Mapping[Node, set[str]]) -> bool:
    return any(user in readers and len(readers[user]) > 1 for user in node.users)


def _scope(node: Node, prefix: str) -> str:
    path = (innermost_module(node) or ("",))[0]
    return path.removeprefix(prefix).removeprefix(prefix.rstrip(".")) or "Loss"


def _set_names(graph: ir.Graph, values: Mapping[str, ir.Value], given: Mapping[str, ir.Value]) -> None:
    """Give inputs and outputs their names, and others that have one of these another."""
    own = {*values.values(), *given.values()}
    wanted = {**{value: name for name, value in values.items()}, **{value: name for name, value in given.items()}}
    unique = UniqueNames([*values, *given])
    for node in graph.all_nodes():
        for value in node.outputs:
            if value not in own and value.name in unique._taken:
                value.name = unique.fresh(str(value.name))
    for value, name in wanted.items():
        value.name = name


def _symbols(description: _ORTTrainerModelDesc, values: Mapping[str, ir.Value]) -> dict[str, str]:
    """Symbol of a size, as torch calls it -> what model_desc calls it."""
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
            if value.uses() and not size_from_shape(graph, value, sources):
                raise TrainingGraphError(reason=f"nothing gives {name}")
            continue
        value.const_value = _tensor(state[name], name)
        graph.register_initializer(value)
        if may_be_fed:
            graph.inputs.append(value)


def _unread(name: str, shape: Sequence[int | str], example: Tensor) -> ir.Value:
    """An input that the graph does not read: programs give it all the same."""
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


def _tensor(tensor: Tensor, name: str) -> ir.TensorProtocol:
    own = tensor.detach().cpu().contiguous()
    if own.dtype is torch.bfloat16:
        return ir.tensor(own.view(torch.uint16).numpy().view(ir.DataType.BFLOAT16.numpy()), name=name)
    return ir.tensor(own.numpy().copy(), dtype=onnx_dtype(own.dtype), name=name)


Namer = Callable[[GraphModule], None]
