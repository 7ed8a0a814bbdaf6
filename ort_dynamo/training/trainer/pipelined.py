"""The part of a trainer that runs where processes have stages of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ort_dynamo.training.trainer.combined import CombinedModel
from ort_dynamo.training.trainer.horizontal import LayerReplicas
from ort_dynamo.training.trainer.layer_parts import square_sum_over
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.stages import Stages
from ort_dynamo.training.trainer.together import ForwardBackward, Found

__all__ = ["PipelinedModel", "StageReplicas"]


class PipelinedModel(RunningModel):
    """A model of which this process runs a stage, and trains that stage's weights.

    Args:
        stages: run the model.
        others: as RunningModel takes them.
    """

    def __init__(self, stages: Stages, *others: Any, **named: Any) -> None:
        self.stages = stages
        super().__init__(*others, **named)
        stages.compiles = self._region

    @property
    def own_names(self) -> set[str]:
        """The entries of the model's state_dict that are this stage's."""
        return self.stages.own

    def evaluate(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode; gives the outputs of model_desc in all processes of the pipeline."""
        return self._run_stage(inputs, predicts=False)

    def predict(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode without the label; gives the outputs of model_desc but the loss."""
        return self._run_stage(inputs, predicts=True)

    def _run_stage(self, inputs: Sequence[Tensor], *, predicts: bool) -> list[Tensor]:
        self._set_mode(training=False)
        with self._settings(), torch.no_grad():
            outputs = self.stages.evaluate(inputs, predicts=predicts)
        return outputs[: len(self._description.outputs) - predicts]


class StageReplicas(LayerReplicas):
    """Reduces gradients over the processes that have the same stage, whose forward and backward torch's schedule runs.

    Args:
        combined: model and loss.
        mesh: all processes by "data" and "pipeline".
        stages: run the model.
        outputs: how many outputs model_desc has.
        postpones: whether gradients are reduced in steps that update alone.
    """

    has_stages = True

    def __init__(
        self, combined: CombinedModel, mesh: DeviceMesh, stages: Stages, outputs: int, *, postpones: bool
    ) -> None:
        super().__init__(combined, mesh, postpones=postpones)
        self._stages = stages
        self._outputs = outputs

    def _computed(self, asked: ForwardBackward) -> Found:
        parameters = list(self._combined.parameters())
        for parameter in parameters:
            parameter.grad = None
        try:
            loss, outputs = self._stages.train(asked.inputs)
            found = [weight.parameter.grad for weight in asked.weights]
        finally:
            for parameter in parameters:
                parameter.grad = None
        return (loss, outputs[: self._outputs]), found

    def norm(self, own: Tensor) -> Tensor:
        """The norm of the gradients of all stages."""
        return square_sum_over(own.double(), self._stages.group).sqrt()
