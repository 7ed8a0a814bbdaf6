"""Exports a model, its loss and its gradients as one ONNX model, which any InferenceSession runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ort_dynamo.embedding import (
    OPSET,
    PassOptions,
    Program,
    at_opset,
    capture_gradients,
    export_graph,
    read_program,
    write_model,
)
from ort_dynamo.errors import GradientGraphError, OpsetError, TrainingGraphError
from ort_dynamo.training.torch_internals import may_be_dynamic, raised_by_backend, spell_outputs
from ort_dynamo.training.trainer.file_names import refuse_tensors_named
from ort_dynamo.training.trainer.step_files import compute_size

__all__ = ["export_gradient_graph"]


def export_gradient_graph(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    example_input: Tensor,
    example_labels: Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = OPSET,
) -> None:
    """Write an ONNX model that computes a model's output, its loss and the gradients of its parameters.

    Inputs of the ONNX model are "input", "labels" and every parameter by its name; buffers are constants. Outputs are
    "output", "loss" and, for each parameter that requires a gradient, its name and "_grad". The first dimension of
    "input" and "labels" is "batch_size". It has operators of ONNX and contrib operators of ONNX Runtime, and no random
    ops: put a model with dropout into eval mode. It has no assertions, and no checks of labels and indices.

    Args:
        model: a model with one tensor as input and one as output, on the CPU.
        loss_fn: a function of the model's output and the labels that returns a scalar.
        example_input: a batch of inputs; only its shape and dtype matter.
        example_labels: its labels; only their shape and dtype matter.
        gradient_graph_path: the file to write. A missing folder is made.
        opset_version: the ONNX opset, if onnx can convert to it.

    Raises:
        GradientGraphError: the model cannot be written as one ONNX model.
        InvalidArgumentError: a parameter or buffer has the name of another input or output.
        OSError: the file cannot be written.
    """
    trained = {f"{name}_grad" for name, one in model.named_parameters() if one.requires_grad}
    refuse_tensors_named({"input", "labels", "output", "loss", *trained}, "export_gradient_graph", model)
    capture = _Capture()
    batch, labels = _traceable(example_input, example_labels)

    def step(input: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002  # inputs are called as these
        output = model(input)
        return output.detach(), loss_fn(output, labels)

    torch.compiler.reset()
    try:
        torch.compile(step, backend=capture, fullgraph=True)(batch, labels)
    except Exception as error:
        if not isinstance(raised_by_backend(error), _Captured):
            raise
    finally:
        torch.compiler.reset()
    if not capture.has_scalar_loss:
        raise GradientGraphError(reason="the loss has several elements, and must be a scalar. Give its mean or its sum")
    if capture.joint is None or capture.program is None:
        raise GradientGraphError(reason="no parameter requires a gradient")
    try:
        made = at_opset(_Model(capture.joint, _with_first_names(capture.program, model), model).build(), opset_version)
    except OpsetError as error:
        raise GradientGraphError(reason=str(error)) from error
    except TrainingGraphError as error:
        raise GradientGraphError(reason=error.facts["reason"]) from error
    write_model(made, Path(gradient_graph_path))


def _traceable(*given: Tensor) -> tuple[Tensor, ...]:
    """Copy, with a first dimension of any size; torch takes a size of one for a constant, so that is doubled."""
    batch = given[0].shape[0] if given[0].dim() else None
    copies = []
    for tensor in given:
        copy = tensor.detach().clone()
        if copy.dim() and copy.shape[0] == batch:
            copy = torch.cat([copy, copy]) if batch == 1 else copy
            may_be_dynamic(copy, 0)
        copies.append(copy)
    return tuple(copies)


def _with_first_names(program: Program, model: nn.Module) -> Program:
    """Give a weight or buffer that has several names the first of them, as `named_parameters` does."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(tensor), name)
    return dataclasses.replace(program, inputs=tuple(names.get(name, name) for name in program.inputs))


class _Captured(Exception):  # noqa: N818  # it ends a capture, and is no error
    """The joint graph is there, and nothing has to run."""


class _Capture:
    """A backend that keeps the joint graph of a compile and ends it there.

    Attributes:
        joint: the joint graph.
        program: the program's names for its inputs.
        has_scalar_loss: whether the last output of Dynamo's graph, the loss, has one element; else there is no joint
            graph.
    """

    def __init__(self) -> None:
        self.joint: GraphModule | None = None
        self.program: Program | None = None
        self.has_scalar_loss: bool = False

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.program = read_program(gm, example_inputs)
        (output,) = gm.graph.find_nodes(op="output")
        self.has_scalar_loss = output.args[0][-1].meta["example_value"].numel() == 1
        if self.has_scalar_loss:
            self.joint = capture_gradients(gm, example_inputs)
        raise _Captured


class _Model:
    """Makes the ONNX model of a joint graph.

    Args:
        joint: the graph of forward and backward.
        program: the program's names for its inputs.
        model: has the buffers, and the parameters that nothing reads.
    """

    def __init__(self, joint: GraphModule, program: Program, model: nn.Module) -> None:
        self._joint = joint
        self._program = program
        self._module = model

    def build(self) -> ir.Model:
        """Lower the graph, and make inputs and outputs those that the file has."""
        names = self._keep_outputs()
        made = export_graph(self._joint, self._program, PassOptions(), names, random=False)
        return self._named(made, names)

    def _keep_outputs(self) -> list[str]:
        """Leave the outputs that the file has, and give their names."""
        (output,) = self._joint.graph.find_nodes(op="output")
        kept: dict[str, Node] = {}
        for node, spelled in zip(output.args[0], spell_outputs(output, self._program.inputs), strict=True):
            name = spelled or ""
            called = {"output_0": "output", "output_1": "loss"}.get(name)
            parameter = name.removesuffix(".grad")
            if called is None and name != parameter and self._requires_gradient(parameter):
                called = f"{parameter}_grad"
            if called is not None and isinstance(node, Node):
                kept[called] = node
        output.args = (tuple(kept.values()),)
        output.meta.pop("desc", None)
        self._joint.graph.eliminate_dead_code()
        self._joint.recompile()
        return list(kept)

    def _requires_gradient(self, name: str) -> bool:
        return dict(self._module.named_parameters()).get(name, torch.empty(0)).requires_grad

    def _named(self, model: ir.Model, outputs: Sequence[str]) -> ir.Model:
        graph = model.graph
        by_name = {str(value.name): value for value in graph.inputs}
        graph.inputs.clear()
        buffers = dict(self._module.named_buffers())
        for name in ("input", "labels", *dict(self._module.named_parameters())):
            graph.inputs.append(by_name.pop(name) if name in by_name else self._unread(name))
        for name, value in by_name.items():
            if not value.uses():
                continue
            if name in buffers:
                value.const_value = ir.tensor(buffers[name].detach().numpy(), name=name)
                graph.register_initializer(value)
            elif not compute_size(graph, value, {str(one.name): one for one in graph.inputs}):
                raise GradientGraphError(reason=f"no node computes {name}")
        self._add_unread_gradients(graph, outputs)
        _name_batch(graph)
        return model

    def _unread(self, name: str) -> ir.Value:
        """Return an input for a parameter that the model does not read."""
        parameter = dict(self._module.named_parameters()).get(name)
        if parameter is None:
            raise GradientGraphError(reason=f"the loss does not depend on the {name}")
        dtype = ir.DataType.from_numpy(parameter.detach().numpy().dtype)
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(parameter.shape))

    def _add_unread_gradients(self, graph: ir.Graph, outputs: Sequence[str]) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and f"{name}_grad" not in outputs:
                zeros = ir.tensor(torch.zeros_like(parameter).numpy(), name=f"{name}_zeros")
                typed = ir.TensorType(zeros.dtype)
                shape = ir.Shape(parameter.shape)
                value = ir.Value(name=zeros.name, const_value=zeros, type=typed, shape=shape)
                graph.register_initializer(value)
                node = ir.node("Identity", [value], name=f"{name}_grad")
                node.outputs[0].name = f"{name}_grad"
                node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
                graph.append(node)
                graph.outputs.append(node.outputs[0])


def _name_batch(graph: ir.Graph) -> None:
    """Call the symbol of the batch's size as the old exporter did."""
    symbols: Mapping[str, str] = {
        str(one.shape[0]): "batch_size"
        for one in graph.inputs
        if one.name in ("input", "labels") and one.shape is not None and len(one.shape) and not one.shape.is_static(0)
    }
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([symbols.get(str(size), size) for size in value.shape])
