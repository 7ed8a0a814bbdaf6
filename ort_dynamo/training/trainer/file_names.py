"""Names the values that a file of a training step has beside the model's own, and refuses equal names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.trainer.training_state import TrainedWeight, TrainingState, UpdateGroup
from ort_dynamo.training.trainer.update_rules import LambRule
from ort_dynamo.training.trainer.whole_step import StepKind

__all__ = ["check_names", "refuse_tensors_named", "step_inputs", "step_results"]

_LEARNING_RATE = "learning_rate"
_LOSS_SCALE = "loss_scale"
_MOMENTS = ("Moment_1", "Moment_2")


def check_names(
    function: str, description: _ORTTrainerModelDesc, model: nn.Module, state: TrainingState, kind: StepKind | None
) -> None:
    """Check that the values of a file can all have their names.

    Args:
        function: the public function that model and model_desc were given to.
        description: the names of inputs and outputs.
        model: its parameters and buffers have their names in the file, as in `state_dict()`.
        state: the trained state.
        kind: the tasks of the step; None: the file has the forward alone.

    Raises:
        InvalidArgumentError: two of them have the same name.
    """
    own: set[str] = set()
    if kind is not None:
        inputs = (name for name, _ in step_inputs(state.groups, kind, lr=0.0))
        own = {*inputs, *step_results(state.groups, kind)}
        refuse_tensors_named(own, function, model)
    tensors = _tensor_names(model)
    names = [one.name for one in (*description.inputs, *description.outputs)]
    for name in names:
        if name in own or name in tensors:
            owner = "the training step" if name in own else "a parameter or buffer of the model"
            expected = f"names other than {name!r}, since the file has {owner} under this name"
            raise InvalidArgumentError(
                function=function, name="the names in model_desc", value=names, expected=expected
            )


def refuse_tensors_named(own: set[str], function: str, model: nn.Module) -> None:
    """Raise InvalidArgumentError if a parameter or buffer has a name that a file needs for a value of its own."""
    for name in _tensor_names(model):
        if name in own:
            expected = f"no parameter or buffer called {name!r}, since the file has an input or output of this name"
            raise InvalidArgumentError(function=function, name="model", value=type(model), expected=expected)


def _tensor_names(model: nn.Module) -> list[str]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors]


def step_inputs(groups: Sequence[UpdateGroup], kind: StepKind, lr: float) -> list[tuple[str, Tensor]]:
    """List the inputs of a step beside those of the model, in the order of WholeStepModule's, with their values."""
    scalars = [
        (_LEARNING_RATE, torch.tensor(lr, dtype=torch.float64)),
        (_LOSS_SCALE, torch.ones((), dtype=torch.float64)),
    ]
    counts = [(_count_name(group, index), group.count) for index, group in enumerate(groups)]
    own = [pair for group in groups for weight in group.weights for pair in _state_of(weight, kind)]
    return [*scalars, *counts, *own]


def step_results(groups: Sequence[UpdateGroup], kind: StepKind) -> list[str]:
    """Name WholeStepModule's results after the outputs of the graph."""
    weights = [weight for group in groups for weight in group.weights]
    if not kind.updates:
        return [f"{weight.name}.grad" for weight in weights]
    made = ["all_finite"]
    for weight in weights:
        own = f"{weight.name}.full_precision" if weight.is_narrow else weight.name
        made += [f"{own}.updated"]
        made += [f"{weight.name}.{name}.updated" for name, _ in zip(_MOMENTS, weight.moments, strict=False)]
    counts = [f"{_count_name(group, index)}.updated" for index, group in enumerate(groups)]
    return made + counts * kind.stands_alone


def _state_of(weight: TrainedWeight, kind: StepKind) -> list[tuple[str, Tensor]]:
    """List the tensors of a weight in a step beside its parameter."""
    found: list[tuple[str, Tensor]] = []
    if weight.is_narrow:
        found.append((f"{weight.name}.full_precision", weight.master))
    if kind.updates:
        found += [(f"{weight.name}.{name}", one) for name, one in zip(_MOMENTS, weight.moments, strict=False)]
    if kind.gathers > 1 and weight.gathered is not None:
        found.append((f"{weight.name}.gathered_gradient", weight.gathered))
    return found


def _count_name(group: UpdateGroup, index: int) -> str:
    """Name a group's count of updates: as in a state_dict, numbered after the first."""
    name = "step" if isinstance(group.rule, LambRule) else "Update_Count"
    return f"{name}_{index}" if index else name
