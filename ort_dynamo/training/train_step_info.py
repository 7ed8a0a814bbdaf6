"""TrainStepInfo: the facts of a step that schedulers and loss scalers get."""

from __future__ import annotations

import copy

from ort_dynamo.training.optim.config import _OptimizerConfig
from ort_dynamo.training.requirements import require

__all__ = ["TrainStepInfo"]


class TrainStepInfo:
    """The state of an ORTTrainer's last step, for learning-rate schedulers and loss scalers.

    Args:
        optimizer_config: configuration of the optimizer.
        all_finite: whether all gradients of the step were finite.
        fetches: names of the outputs that a step returns; empty for all of them.
        optimization_step: the number of updates of the weights so far, for schedulers.
        step: the number of calls of train_step so far, for gradient accumulation.

    Raises:
        AssertionError: a value has a wrong type, or a count is negative.
    """

    def __init__(
        self,
        optimizer_config: _OptimizerConfig,
        all_finite: bool = True,
        fetches: list[str] = [],  # noqa: B006  # the old default, copied below
        optimization_step: int = 0,
        step: int = 0,
    ) -> None:
        require(isinstance(optimizer_config, _OptimizerConfig), "optimizer_config must be a optim._OptimizerConfig")
        require(isinstance(all_finite, bool), "all_finite must be a bool")
        is_list = isinstance(fetches, list) and all(isinstance(name, str) for name in fetches)
        require(is_list, "fetches must be a list of str")
        is_count = isinstance(optimization_step, int) and optimization_step >= 0
        require(is_count, "optimization_step must be a positive int")
        require(isinstance(step, int) and step >= 0, "step must be a positive int")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches: list[str] = list(fetches)
        self.optimization_step = optimization_step
        self.step = step

    def _copy(self) -> TrainStepInfo:
        """Return a step info of the same configuration, with counts and fetches of its own."""
        other = copy.copy(self)
        other.fetches = list(self.fetches)
        return other
