"""Learning rate and loss scale as the first ORTTrainer was given them, for today's: a scheduler and a scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ort_dynamo.training import amp
from ort_dynamo.training.optim import _LRScheduler
from ort_dynamo.training.train_step_info import TrainStepInfo

__all__ = ["Scaler", "StepRate", "StepScale"]


class Scaler(Protocol):
    """What the first ORTTrainer needs of a loss scaler."""

    loss_scale_: float

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Take note of an update."""


class StepRate(_LRScheduler):
    """Gives the learning rate of a step: by the number of updates so far, or what the step was given.

    Args:
        by_step: gives it by that number; None: `given` is it.
    """

    def __init__(self, by_step: Callable[[int], float] | None) -> None:
        super().__init__()
        self.given = 0.0
        self._by_step = by_step

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Give the learning rate of a step, as a list of one."""
        return [self.given if self._by_step is None else float(self._by_step(train_step_info.optimization_step))]


class StepScale(amp.LossScaler):
    """Gives the loss scale that was assigned, and tells the program's scaler of each update.

    Args:
        scaler: the program's; None: there is none.
    """

    def __init__(self, scaler: Scaler | None) -> None:
        super().__init__(1.0)
        self._scaler = scaler

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Tell the program's scaler whether gradients were finite."""
        if self._scaler is not None:
            self._scaler.update_loss_scale(train_step_info.all_finite)
        return self.loss_scale
