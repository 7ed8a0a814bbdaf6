"""Exports a training step as one ONNX model: forward, loss, gradients, clipping and the optimizer's update."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir
from torch import Tensor, nn

from ort_dynamo.embedding import OPSET, PassOptions, at_opset, write_model
from ort_dynamo.errors import InvalidArgumentError, OpsetError, TrainingGraphError
from ort_dynamo.training.model_desc_validation import InputDescription, InputDescriptionTyped, _ORTTrainerModelDesc
from ort_dynamo.training.optim.config import _OptimizerConfig
from ort_dynamo.training.trainer.files import StepFiles
from ort_dynamo.training.trainer.guarded_step import SpelledInputs, misfit
from ort_dynamo.training.trainer.model_with_loss import CombinedModel
from ort_dynamo.training.trainer.settings import rules_of
from ort_dynamo.training.trainer.training_state import TrainingState
from ort_dynamo.training.trainer.whole_step import StepKind

__all__ = ["export_training_graph"]

_Part = Literal["forward", "gradients", "step"]

_CONFIGS = (
    "ort_dynamo.optim.SGDConfig, AdamConfig or LambConfig. An optimizer of torch.optim holds state of its own, and the "
    "state of the exported optimizer is in the model"
)

_LOSSES = "a function of the model's output and the last input, or None if the model gives the loss"

_LOSS_OUTPUT = "one output that is marked as the loss, such as ('loss', [], True)"


def export_training_graph(
    model: nn.Module,
    model_desc: Mapping[str, Any],
    optim_config: _OptimizerConfig,
    inputs: Sequence[Tensor],
    path: str | os.PathLike[str] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    part: _Part = "step",
    gradient_accumulation_steps: int = 1,
    clip_gradient_norm: bool = True,
    loss_scaling: bool = False,
    contrib_ops: bool = False,
    opset_version: int = OPSET,
    state_path: str | os.PathLike[str] | None = None,
) -> onnx.ModelProto:
    """Make an ONNX model of a training step, which any InferenceSession runs.

    Its inputs are those of model_desc; then, each with the value that it has now, so that it need not be given:
    parameters and buffers by their names in `state_dict()`, `learning_rate` and `loss_scale` (float64, scalars),
    `Update_Count` or, for LAMB, `step` (int64, scalar), and for each weight "<name>.Moment_1", "<name>.Moment_2" and,
    with accumulation, "<name>.gathered_gradient". Its outputs are those of model_desc; then "<input>.updated" of all
    that the step changes, and `all_finite` (bool, scalar). To train, feed these back. Dropout uses random numbers of
    the model itself, which differ from torch's.

    Args:
        model: on the CPU, in the mode that is to be exported; it is not changed.
        model_desc: names and shapes of inputs and outputs, as for ORTTrainer; one output is the loss.
        optim_config: optim.SGDConfig, AdamConfig or LambConfig.
        inputs: a batch; only shapes and dtypes matter. Sizes that model_desc names may differ in each run.
        path: where to write the model, with its tensors beside it if they are over 2 GiB. A missing folder is made.
            None writes nothing.
        loss_fn: takes the model's output, and the last input; gives a scalar. None if the model returns the loss.
        part: "forward" for the model and its loss, "gradients" for these with "<weight>.grad", with the weights as
            constants; "step" for all.
        gradient_accumulation_steps: number of batches in an update. The model is the step that updates: it adds its
            gradients to the gathered sum, and divides by this number.
        clip_gradient_norm: whether Adam and LAMB clip the norm of all gradients to their `max_norm_clip`.
        loss_scaling: whether gradients are scaled by `loss_scale`, and an update is skipped if they are not finite.
        contrib_ops: whether the model may have operators that only ONNX Runtime has.
        opset_version: version of ONNX's operators, 12 or newer. All operators of the model must have a form in it.
        state_path: where to write the values that inputs have now, as one .npz. The model has no default values then:
            each run is given all inputs. ONNX Runtime warns of each default value when it opens a model. None keeps
            the values in the model.

    Raises:
        InvalidArgumentError: an argument has a value that it cannot take, `inputs` do not fit `model_desc`, or two
            values of the model would have the same name.
        ValueError: "Invalid model_desc: ...".
        TrainingGraphError: torch cannot trace the model as one graph, or an operator has no form in ONNX, or onnx
            cannot convert it to the opset: the message names each operator, with the reason.
        OSError: the file cannot be written.
    """
    _check("model", model, isinstance(model, nn.Module), "an nn.Module")
    _check("optim_config", optim_config, isinstance(optim_config, _OptimizerConfig), _CONFIGS)
    _check("part", part, part in get_args(_Part), "one of " + ", ".join(map(repr, get_args(_Part))))
    newest = onnx.defs.onnx_opset_version()
    is_opset = isinstance(opset_version, int) and 12 <= opset_version <= newest
    _check("opset_version", opset_version, is_opset, f"an int from 12 to {newest}")
    _check("contrib_ops", contrib_ops, isinstance(contrib_ops, bool), "a bool")
    _check("loss_fn", loss_fn, loss_fn is None or callable(loss_fn), _LOSSES)
    whole = isinstance(gradient_accumulation_steps, int) and gradient_accumulation_steps >= 1
    _check("gradient_accumulation_steps", gradient_accumulation_steps, whole, "an int >= 1")
    description = _ORTTrainerModelDesc(model_desc)
    loss = description.loss_index
    _check("model_desc", model_desc, loss is not None, _LOSS_OUTPUT)
    assert loss is not None
    _check_inputs(inputs, description.inputs)
    names = [one.name for one in description.inputs]
    combined = CombinedModel(model, loss_fn, names, len(description.outputs), loss, None)
    combined.check_inputs(inputs)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    every = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())}
    gathers = gradient_accumulation_steps
    state = TrainingState(trained, rules_of(optim_config, list(trained), every), gathers=gathers > 1)
    kind = StepKind(gathers=gathers, scales=loss_scaling, clips=clip_gradient_norm, stands_alone=True)
    combined.training = model.training
    files = StepFiles(
        combined,
        state,
        description,
        kind,
        PassOptions(),
        contrib_ops=contrib_ops,
        optimizer=optim_config.name,
        function="export_training_graph",
    )
    made = {
        "forward": lambda: files.forward(inputs, training=model.training),
        "gradients": lambda: files.with_gradients(inputs),
        "step": lambda: files.step(inputs, optim_config.lr),
    }[part]()
    try:
        made = at_opset(made, opset_version)
    except OpsetError as error:
        raise TrainingGraphError(reason=str(error)) from error
    if state_path is not None:
        _write_state(made, Path(state_path))
    if path is not None:
        write_model(made, Path(path))
    return ir.to_proto(made)


def _write_state(model: ir.Model, path: Path) -> None:
    """Move the default values of a model's inputs to a file of NumPy's."""
    values: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        name = str(value.name)
        if name in model.graph.initializers and value.const_value is not None:
            dtype = value.const_value.dtype
            expected = f"None, since NumPy has no dtype for the {dtype} of {name!r}"
            _check("state_path", str(path), dtype.numpy().isbuiltin == 1, expected)
            values[name] = value.const_value.numpy()
            del model.graph.initializers[name]
            value.const_value = None
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, **values)  # type: ignore[arg-type]


def _check_inputs(inputs: Sequence[Tensor], described: Sequence[InputDescription | InputDescriptionTyped]) -> None:
    """Raise InvalidArgumentError unless the example inputs are tensors of the described shapes."""
    tensors = not isinstance(inputs, Tensor) and all(isinstance(one, Tensor) for one in inputs)
    _check("inputs", SpelledInputs(inputs), tensors, "a list or tuple of tensors, one for each input of model_desc")
    names = ", ".join(repr(one.name) for one in described)
    expected = f"{len(described)} tensors, for the inputs of model_desc: {names}"
    _check("inputs", SpelledInputs(inputs), len(inputs) == len(described), expected)
    wrong = misfit(inputs, described)
    _check("inputs", SpelledInputs(inputs), wrong is None, wrong or "")


def _check(name: str, value: object, is_right: bool, expected: str) -> None:
    """Raise InvalidArgumentError unless an argument is right."""
    if not is_right:
        raise InvalidArgumentError(function="export_training_graph", name=name, value=value, expected=expected)
