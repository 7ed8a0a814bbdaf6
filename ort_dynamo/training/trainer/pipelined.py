"""The part of a trainer that runs where processes have stages of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.split_step import SplitStep
from ort_dynamo.training.trainer.stages import Stages
from ort_dynamo.training.trainer.whole_step import StepKind

__all__ = ["PipelinedModel"]


class PipelinedModel(RunningModel):
    """A model of which this process runs a stage, and trains that stage's weights.

    Args:
        stages: run the model.
        others: as RunningModel takes them.
    """

    def __init__(self, stages: Stages, *others: Any, **named: Any) -> None:
        self.stages = stages
        super().__init__(*others, **named)

    @property
    def own_names(self) -> set[str]:
        """The entries of the model's state_dict that are this stage's."""
        return self.stages.own

    def _made_step(self) -> SplitStep:
        return _StagedStep(self)

    def evaluate(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode; gives the outputs of model_desc in all processes of the pipeline."""
        return self._run_stage(inputs, predicts=False)

    def predict(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode without the label; gives the outputs of model_desc but the loss."""
        return self._run_stage(inputs, predicts=True)

    def _run_stage(self, inputs: Sequence[Tensor], *, predicts: bool) -> list[Tensor]:
        self._set_mode(training=False)
        with self._settings(), torch.no_grad():
            outputs = self.stages.evaluate(inputs, self._region, predicts=predicts)
        return outputs[: len(self._description.outputs) - predicts]


class _StagedStep(SplitStep):
    """A step whose forward and backward go through stages."""

    def __init__(self, running: PipelinedModel) -> None:
        super().__init__(running.combined, running.state, running.options, running._replicas)
        self._running = running

    def _gradients(self, inputs: Sequence[Any], scale: float, kind: StepKind) -> tuple[Any, Sequence[Tensor | None]]:
        running = self._running
        parameters = list(running.combined.parameters())
        for parameter in parameters:
            parameter.grad = None
        try:
            run = lambda *given: running.stages.train(given, running._region)  # noqa: E731
            loss, outputs = self._replicas.run(run, inputs)  # type: ignore[union-attr, call-arg]
            found = [weight.parameter.grad for weight in running.state.weights]
        finally:
            for parameter in parameters:
                parameter.grad = None
        return (loss, outputs[: len(running._description.outputs)]), found
