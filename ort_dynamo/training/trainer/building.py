"""Makes the running model of a model with its loss, as an ORTTrainer's options and optimizer ask for it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ort_dynamo.embedding import warn_program
from ort_dynamo.errors import SeveralProcessesError
from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.optim.config import _OptimizerConfig
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.requirements import require
from ort_dynamo.training.torch_internals import has_hooks
from ort_dynamo.training.trainer.distributed.parallel import (
    LayerReplicas,
    PipelinedModel,
    Replicas,
    StageReplicas,
    divide_layers,
)
from ort_dynamo.training.trainer.distributed.process_group import Together, ZeroUpdate
from ort_dynamo.training.trainer.distributed.stages import Stages, cuts_of, mesh_of_stages
from ort_dynamo.training.trainer.files import StepFiles
from ort_dynamo.training.trainer.model_with_loss import CombinedModel, OnnxCombined, postprocessed
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.settings import (
    backend_options,
    fits_one_session,
    join_processes,
    refuse_what_is_not_there,
    rules_of,
)
from ort_dynamo.training.trainer.traceable_model import patch_mask_checks
from ort_dynamo.training.trainer.training_state import TrainingState

__all__ = ["Parts", "step_files"]


@dataclass(frozen=True)
class Parts:
    """The arguments of a trainer beside its model.

    Attributes:
        description: names of inputs, outputs and sizes.
        config: the optimizer's.
        options: all else.
        device: where to train.
    """

    description: _ORTTrainerModelDesc
    config: _OptimizerConfig
    options: ORTTrainerOptions
    device: torch.device

    def of_onnx(self, model: onnx.ModelProto) -> RunningModel:
        """Make the running model of an ONNX model.

        Raises:
            OnnxModelError: the model is malformed, or has an operator that cannot be trained.
            AssertionError: it lacks names of model_desc.
        """
        model = postprocessed(model, self.options._internal_use.extra_postprocess)
        return self._running(OnnxCombined(OnnxModule(model), self.description, self._narrow), self.device)

    def of_module(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor] | None, inputs: Sequence[Tensor]
    ) -> RunningModel:
        """Make the running model of a copy of a torch model, with its loss; `inputs` are those of the first step."""
        loss = self.description.loss_index
        assert loss is not None
        names = [one.name for one in self.description.inputs]
        _warn_of_hooks(model)
        own = _copied(model)
        patch_mask_checks(own)
        combined = CombinedModel(own, loss_fn, names, len(self.description.outputs), loss, self._narrow)
        if self.options._internal_use.extra_postprocess is not None:
            combined = self._postprocessed(combined, inputs)
        return self._running(combined, self.device, inputs=inputs)

    @property
    def _narrow(self) -> torch.dtype | None:
        return torch.float16 if self.options.mixed_precision.enabled else None

    def _postprocessed(self, combined: CombinedModel, inputs: Sequence[Tensor]) -> OnnxCombined:
        """Apply extra_postprocess to the ONNX models of a torch model: one to train, one to evaluate."""
        given = len(inputs) == len(self.description.inputs)
        require(given, "the first step needs all inputs, for the ONNX model that extra_postprocess is given")
        if not combined.model.training:
            combined.train()
        alone = self._running(combined, torch.device("cpu"), alone=True)
        files = step_files(alone, self.description, self.config, self.options)
        on_cpu = [tensor.cpu() for tensor in inputs]
        made = [
            postprocessed(
                ir.to_proto(files.forward(on_cpu, training=training)), self.options._internal_use.extra_postprocess
            )
            for training in (True, False)
        ]
        return OnnxCombined(OnnxModule(made[0]), self.description, self._narrow, evaluated=OnnxModule(made[1]))

    def _running(
        self,
        combined: CombinedModel,
        device: torch.device,
        *,
        alone: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> RunningModel:
        """Make the running model; `alone`, without other processes, where it only writes files."""
        refuse_what_is_not_there(self.options)
        if self.options.distributed.pipeline_parallel.pipeline_parallel_size > 1:
            if inputs is None:
                raise SeveralProcessesError(
                    reason="pipeline_parallel_size above 1 needs a torch model, not an ONNX model"
                )
            if combined.loss_fn is None:
                reason = "pipeline_parallel_size above 1 needs a loss_fn: labels go into the last stage alone"
                raise SeveralProcessesError(reason=reason)
            if odd := [
                name for name, one in combined.model.named_modules() if getattr(one, "track_running_stats", False)
            ]:
                reason = (
                    f"a pipeline keeps no running statistics, and {', '.join(odd)} have them. Leave one of them out"
                )
                raise SeveralProcessesError(reason=reason)
            cuts_of(self.options, combined.model)  # looked at before processes wait for one another
        several = not alone and join_processes(self.options)
        return _running_model(combined, self.description, self.config, self.options, device, several, inputs)


def _warn_of_hooks(model: nn.Module) -> None:
    """Warn the program of hooks of its parameters, which neither a copy nor a session has; modules keep theirs."""
    hooked = [name for name, one in model.named_parameters() if one.requires_grad and has_hooks(one)]
    if hooked:
        message = (
            "ORTTrainer computes gradients and update in its own step, and calls no hooks of parameters. These have "
            f"some: {', '.join(hooked)}"
        )
        warn_program(message)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the program's model, or, with a warning, the model itself."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # any error that the model's own members raise
        message = (
            "This model cannot be deep copied (or pickled), which is a required step for stateful models to be "
            "properly exported to ONNX. Compute will continue, but unexpected results may occur! "
            f"The model itself is trained, not a copy: {error}"
        )
        warn_program(message)
        return model


def step_files(
    running: RunningModel, description: _ORTTrainerModelDesc, config: _OptimizerConfig, options: ORTTrainerOptions
) -> StepFiles:
    """Make the maker of ONNX files of a running model."""
    internal = options._internal_use
    return StepFiles(
        running.combined,
        running.state,
        description,
        dataclasses.replace(running.kind, stands_alone=True),
        running.options.passes,
        contrib_ops=internal.enable_onnx_contrib_ops,
        optimizer=config.name,
        opset=internal.onnx_opset_version,
        infer_shapes=options.utils.run_symbolic_shape_infer,
    )


def _running_model(
    combined: CombinedModel,
    description: _ORTTrainerModelDesc,
    config: _OptimizerConfig,
    options: ORTTrainerOptions,
    device: torch.device,
    several: bool,
    inputs: Sequence[Tensor] | None,
) -> RunningModel:
    """Make the running model.

    Args:
        combined: model and loss, which are moved to the device.
        description: names of inputs, outputs and sizes.
        config: the optimizer's.
        options: all else.
        device: where to train.
        several: whether the processes of the default group train together.
        inputs: of the first step, on the device; None of an ONNX model.

    Raises:
        RuntimeError: "... params from 'frozen_weights' not found in the ONNX model."
        InvalidOptionError: an option has a value that the backend cannot take.
    """
    model = combined.to(device).model
    asked = options.distributed
    of_file = {name: key for key, name in model.onnx_names.items()} if isinstance(model, OnnxModule) else {}
    frozen = {of_file.get(name, name): name for name in options.utils.frozen_weights}
    if several and not any(one.requires_grad and name not in frozen for name, one in model.named_parameters()):
        reason = "no parameter of the model requires a gradient, so several processes have nothing to train"
        raise SeveralProcessesError(reason=reason)
    mesh = None
    if several and asked.horizontal_parallel_size > 1:
        if inputs is None or len(inputs) < len(description.inputs):
            reason = "horizontal_parallel_size needs a torch model, and a first step with all inputs"
            raise SeveralProcessesError(reason=reason)
        mesh = divide_layers(combined, model, inputs, asked.horizontal_parallel_size)
    parameters = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    known = {*every, *dict(model.named_buffers())}
    if missing := [name for key, name in frozen.items() if key not in known]:
        raise RuntimeError(f"{missing} params from 'frozen_weights' not found in the ONNX model.")
    for name, parameter in every.items():
        if name in frozen:
            parameter.requires_grad_(False)
    stages = None
    if several and asked.pipeline_parallel.pipeline_parallel_size > 1:
        assert inputs is not None
        cuts = cuts_of(options, model)
        mesh = mesh_of_stages(combined, len(cuts) + 1)
        stages = Stages(combined, mesh, cuts, asked.pipeline_parallel.num_pipeline_micro_batches)
        stages.divide(inputs, predicts=len(inputs) < len(description.inputs))
    trained = {
        name: one for name, one in parameters.items() if one.requires_grad and (stages is None or name in stages.own)
    }
    names = {one: name for name, one in parameters.items()}
    tied = {name: names[one] for name, one in every.items() if names[one] != name}
    rules = rules_of(config, list(trained), {*known, *of_file}, {**of_file, **tied})
    gathers = options.batch.gradient_accumulation_steps
    together = Together()
    zero = None
    postpones = asked.allreduce_post_accumulation
    if mesh is not None and stages is not None:
        together = StageReplicas(combined, mesh, stages, len(description.outputs), postpones=postpones)
    elif mesh is not None:
        together = LayerReplicas(combined, mesh, postpones=postpones)
    elif several:  # before masters are copied: all processes get rank 0's weights
        together = Replicas(combined, postpones=postpones, adasum=asked.enable_adasum)
    state = TrainingState(trained, rules, gathers=gathers > 1, tied=tied)
    if several and asked.deepspeed_zero_optimization.stage:
        zero = ZeroUpdate(list(trained.values()))
        state.divide(zero.own)
    make = RunningModel if stages is None else partial(PipelinedModel, stages)
    return make(
        combined,
        state,
        description,
        backend_options(options, device),
        device,
        one_session=not several and fits_one_session(options, config.name, state.elements, device),
        deterministic=options.debug.deterministic_compute,
        clips=options.utils.grad_norm_clip,
        gathers=gathers,
        scales=options.mixed_precision.enabled,
        together=together,
        zero=zero,
    )
