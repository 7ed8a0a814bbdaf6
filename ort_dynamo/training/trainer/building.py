"""Makes what runs of a model with its loss, as an ORTTrainer's options and optimizer ask for it."""

from __future__ import annotations

import torch

from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.optim.config import _OptimizerConfig
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.trainer.combined import CombinedModel
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.settings import backend_options, fits_one_session, rules_of
from ort_dynamo.training.trainer.training_state import TrainingState

__all__ = ["running_model"]


def running_model(
    combined: CombinedModel,
    description: _ORTTrainerModelDesc,
    config: _OptimizerConfig,
    options: ORTTrainerOptions,
    device: torch.device,
) -> RunningModel:
    """Make what runs.

    Args:
        combined: model and loss, which are moved to the device.
        description: names of inputs, outputs and sizes.
        config: the optimizer's.
        options: all else.
        device: where to train.

    Raises:
        RuntimeError: "... params from 'frozen_weights' not found in the ONNX model."
        InvalidOptionError: an option has a value that the backend cannot take.
    """
    model = combined.to(device).model
    parameters = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    known = {*every, *dict(model.named_buffers())}
    frozen = options.utils.frozen_weights
    if missing := [name for name in frozen if name not in known]:
        raise RuntimeError(f"{missing} params from 'frozen_weights' not found in the ONNX model.")
    for name, parameter in every.items():
        if name in frozen:
            parameter.requires_grad_(False)
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    names = {one: name for name, one in parameters.items()}
    tied = {name: names[one] for name, one in every.items() if names[one] != name}
    rules = rules_of(config, list(trained), known, tied)
    gathers = options.batch.gradient_accumulation_steps
    state = TrainingState(trained, rules, gathers=gathers > 1, tied=tied)
    return RunningModel(
        combined,
        state,
        description,
        backend_options(options, device),
        one_session=fits_one_session(options, config.name, state.elements, device),
        deterministic=options.debug.deterministic_compute,
        clips=options.utils.grad_norm_clip,
        gathers=gathers,
        scales=options.mixed_precision.enabled,
    )
