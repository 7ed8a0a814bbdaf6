"""Captures a step as one FX graph, for files, with the names of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ort_dynamo.embedding import Program, capture_whole, read_program
from ort_dynamo.errors import OrtDynamoError, TrainingGraphError
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.torch_internals import (
    breaks_graph,
    compile_region,
    held_weakly,
    may_be_dynamic,
    optimization_hint,
    raised_by_backend,
    spell_outputs,
)
from ort_dynamo.training.trainer.file_names import step_inputs, step_results
from ort_dynamo.training.trainer.training_state import TrainingState, UpdateGroup
from ort_dynamo.training.trainer.whole_step import StepKind, WholeStepModule

__all__ = ["CapturedStep", "capture"]

_INPUTS = "inputs"
"""Name of the captured function's parameter `*inputs`."""


@dataclass(frozen=True)
class CapturedStep:
    """A step as one functional graph.

    Attributes:
        graph: the graph.
        program: the names of its inputs.
        outputs: for each output of the graph, its name: one of model_desc, "<weight>.updated" and the like,
            "<buffer>.updated", "<weight>.grad", or None if it is not needed.
        repeated: names of model_desc for outputs that have another name in the graph, or that are inputs.
        state: the initial values of the inputs that are not the model's, by name.
        inputs: the inputs of the model, as given.
    """

    graph: GraphModule
    program: Program
    outputs: tuple[str | None, ...]
    repeated: dict[str, str]
    state: dict[str, Tensor]
    inputs: tuple[Tensor, ...]


def capture(
    called: Callable[..., Any],
    prefix: str,
    inputs: Sequence[Tensor],
    description: _ORTTrainerModelDesc,
    state: TrainingState,
    kind: StepKind | None,
    lr: float,
    *,
    recurrent: bool = False,
) -> CapturedStep:
    """Capture a step of a model, or its forward.

    Args:
        called: gives the loss and the outputs of the model; the loss alone of them has a gradient.
        prefix: the beginning of parameters' names in it, before their names in the state.
        inputs: of the model.
        description: the names of inputs and outputs, and which sizes may change.
        state: the trained state.
        kind: the tasks of the step; None: its forward alone, without gradients.
        lr: the learning rate that the file begins with.
        recurrent: whether the model has recurrent layers to trace.

    Raises:
        TrainingGraphError: the model cannot be traced as one graph, or an output is no tensor of it.
    """
    seen = _Capture(prefix, description, state, kind, lr)
    given = [_marked(tensor, one.shape) for tensor, one in zip(inputs, description.inputs, strict=True)]
    region = compile_region(called, held_weakly(seen.__call__), dynamic=None, whole=True, recurrent=recurrent)
    try:
        with torch.set_grad_enabled(kind is not None):
            _, outputs = region(*given)
    except OrtDynamoError:
        raise
    except Exception as error:
        raised = raised_by_backend(error)
        if isinstance(raised, OrtDynamoError):
            raise raised from error
        if raised is not None:
            raise TrainingGraphError(reason=f"torch cannot trace its gradients: {raised}") from error
        if breaks_graph(error):
            called(*given)  # raises the program's own errors
            raise TrainingGraphError(reason=f"torch cannot trace it as one graph: {error}") from error
        raise
    return seen.captured(outputs, given)


def _marked(tensor: Tensor, shape: Sequence[int | str]) -> Tensor:
    """Return a copy whose named sizes are symbols; torch takes a size of one for a constant, so that is doubled."""
    copy = tensor.detach().clone()
    for axis, size in enumerate(shape[: tensor.dim()]):
        if isinstance(size, str):
            copy = torch.cat([copy, copy], axis) if copy.shape[axis] == 1 else copy
            may_be_dynamic(copy, axis)
    return copy


class _Capture:
    """A backend that traces a step, keeps the graph, and gives placeholders for results."""

    def __init__(
        self,
        prefix: str,
        description: _ORTTrainerModelDesc,
        state: TrainingState,
        kind: StepKind | None,
        lr: float,
    ) -> None:
        self._prefix = prefix
        self._description = description
        self._state = state
        self._kind = kind
        self._lr = lr
        self._graph: GraphModule | None = None

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        program = read_program(gm, example_inputs)
        names = [self._name(name) for name in program.inputs]
        groups = self._state.groups_of(names) if self._kind is not None else []
        weights = [weight for group in groups for weight in group.weights]
        kind = self._kind
        extra = [] if kind is None else step_inputs(groups, kind, self._lr)
        self._state_inputs = dict(extra)
        self._called = [*names, *self._state_inputs]
        self._program = Program(program.name, tuple(self._called), program.compile_id)
        self._results = [] if kind is None else step_results(groups, kind)
        self._examples = dict(zip(names, example_inputs, strict=True))
        places = [names.index(weight.name) for weight in weights]
        around = partial(self._around, groups=groups, places=places)
        self._graph = capture_whole(gm, example_inputs, around, [one for _, one in extra])
        (output,) = gm.graph.find_nodes(op="output")
        self._given = [_stand_in(node) for node in output.args[0]]
        return lambda *_: tuple(self._given)

    def _name(self, name: str) -> str:
        """Name an input of Dynamo's graph: a parameter as in the model, the model's input as described."""
        ahead, _, rest = name.partition(".")
        place, _, ending = rest.partition(".")
        if ahead != _INPUTS or not place.isdecimal():
            return self._state.name_of(name.removeprefix(self._prefix))
        described = self._description.inputs[int(place)].name
        return f"{described}.{ending}" if ending else described

    def _around(self, gm: GraphModule, groups: Sequence[UpdateGroup], places: Sequence[int]) -> Any:
        if self._kind is None:
            return gm
        return WholeStepModule(gm, groups, places, self._kind)

    def captured(self, outputs: Sequence[Any], given: Sequence[Tensor]) -> CapturedStep:
        """Describe the capture of a call that gave `outputs` for the model's inputs `given`."""
        graph = self._graph
        if graph is None:
            raise TrainingGraphError(reason="it computes nothing")
        spelled = spell_outputs(graph.graph.output_node(), self._called)
        at = {id(one): f"output_{index}" for index, one in enumerate(self._given)}
        at |= {id(one): described.name for one, described in zip(given, self._description.inputs, strict=True)}
        names: dict[str, str] = {f"output_{len(self._given) + i}": one for i, one in enumerate(self._results)}
        repeated: dict[str, str] = {}
        for described, one in zip(self._description.outputs, outputs, strict=True):
            source = at.get(id(one))
            if source is None:
                raise TrainingGraphError(
                    reason=f"the output {described.name!r} is not a tensor that the graph computes"
                )
            if source in names or not source.startswith("output_"):
                repeated[described.name] = names.get(source, source)
            else:
                names[source] = described.name
        found = tuple(one if one is not None and one.endswith(".updated") else names.get(one or "") for one in spelled)
        state = {**self._own_tensors(), **self._state_inputs}
        return CapturedStep(graph, self._program, found, repeated, state, tuple(given))

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers: inputs of Dynamo's graph that are none of the model's."""
        of_model = {described.name for described in self._description.inputs}
        return {
            name: one.detach()
            for name, one in self._examples.items()
            if isinstance(one, Tensor) and name not in of_model
        }


def _stand_in(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    value = node.meta["example_value"]
    if not isinstance(value, Tensor):
        return optimization_hint(value)
    return torch.empty([optimization_hint(size) for size in value.shape], dtype=value.dtype, device=value.device)
