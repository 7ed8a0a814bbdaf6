"""Learning rates that rise from zero in a warm-up and then stay or fall, as those of Hugging Face's transformers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ort_dynamo.training.requirements import require

if TYPE_CHECKING:
    from ort_dynamo.training.train_step_info import TrainStepInfo

__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "_LRScheduler",
]


class _LRScheduler:
    """Base of the schedulers: one of your own has to define get_lr().

    An ORTTrainer asks its scheduler in every step, before the weights are updated.
    """

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Give the learning rate of a step.

        Args:
            train_step_info: `optimization_step` is the number of updates before this one, `optimizer_config.lr` the
                learning rate that the schedule scales.

        Returns:
            The learning rate of all weights, as a list of one.

        Raises:
            NotImplementedError: a subclass has to define it.
        """
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Give the learning rate of the last step, as get_lr() did; empty before the first."""
        return self._last_lr

    def _step(self, train_step_info: TrainStepInfo) -> list[float]:
        self._last_lr = self.get_lr(train_step_info)
        return self._last_lr


class _WarmupLRScheduler(_LRScheduler):
    """Multiplies the learning rate by s/W in the first W updates, and by a subclass's factor after them."""

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        require(isinstance(total_steps, int) and total_steps > 0, "total_steps must be a strict positive number")
        require(isinstance(warmup, float) and 0 <= warmup < 1, "warmup must be a float between (0, 1]")
        require(total_steps > warmup, "total_steps must be greater than warmup")
        self.total_steps = total_steps
        self.warmup = warmup
        self._num_warmup_steps = warmup * total_steps

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Give the learning rate of a step, as a list of one.

        Args:
            train_step_info: `optimization_step` is the number of updates before this one, `optimizer_config.lr` the
                learning rate that the schedule scales.
        """
        lr, step = train_step_info.optimizer_config.lr, train_step_info.optimization_step
        self._check(lr)
        if step < self._num_warmup_steps:
            return [lr * (step / max(1.0, self._num_warmup_steps))]
        return [lr * self._decay(step, lr)]

    def _check(self, lr: float) -> None:
        """Refuse a learning rate that the schedule cannot scale."""

    def _decay(self, step: int, lr: float) -> float:
        """Return the factor in the update `step`, counted from 0, after the warm-up."""
        raise NotImplementedError

    def _rest(self) -> float:
        return max(1.0, self.total_steps - self._num_warmup_steps)


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """A constant learning rate after the warm-up.

    With T = total_steps, W = warmup * T and s updates done, the configured rate is multiplied by s / max(1, W) for
    s < W, then by 1.

    Args:
        total_steps: T, above 0.
        warmup: the fraction of T that is warm-up, a float, at least 0 and below 1.

    Raises:
        AssertionError: an argument is out of its range.
    """

    def _decay(self, step: int, lr: float) -> float:
        return 1.0


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """After the warm-up the learning rate falls to 0 along a line.

    With T = total_steps, W = warmup * T and s updates done, the configured rate is multiplied by s / max(1, W) where
    s < W, and by max(0, (T - s) / max(1, T - W)) from there on.

    Args:
        total_steps: T, above 0.
        warmup: the fraction of T that is warm-up, a float, at least 0 and below 1.

    Raises:
        AssertionError: an argument is out of its range.
    """

    def _decay(self, step: int, lr: float) -> float:
        return max(0.0, (self.total_steps - step) / self._rest())


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """After the warm-up the learning rate falls as a cosine does.

    With T = total_steps, W = warmup * T and s updates done, the configured rate is multiplied by s / max(1, W) where
    s < W, and by max(0, (1 + cos(2 pi cycles p)) / 2) from there on, with p = (s - W) / max(1, T - W).

    Args:
        total_steps: T, above 0.
        cycles: number of waves, a float above 0; half a wave falls from the configured rate to 0. It comes before
            warmup, unlike in the other schedulers.
        warmup: the fraction of T that is warm-up, a float, at least 0 and below 1.

    Raises:
        AssertionError: an argument is out of its range.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        require(isinstance(cycles, float) and cycles > 0, "cycles must be a positive float")
        self.cycles = cycles

    def _decay(self, step: int, lr: float) -> float:
        progress = (step - self._num_warmup_steps) / self._rest()
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * progress)))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """After the warm-up the learning rate falls to lr_end as a polynomial does.

    With T = total_steps, W = warmup * T, s updates done and the configured rate lr, the rate is lr * s / max(1, W)
    where s < W, then (lr - lr_end) * (1 - (s - W) / (T - W)) ** power + lr_end, and lr_end where s > T.

    Args:
        total_steps: T, above 0.
        lr_end: the last learning rate, a float, at least 0. It and power come before warmup.
        power: the power of the polynomial, a float, at least 0.
        warmup: the fraction of T that is warm-up, a float, at least 0 and below 1.

    Raises:
        AssertionError: an argument is out of its range; or, in a step, the configured rate is not above lr_end.
    """

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        require(isinstance(lr_end, float) and lr_end >= 0, "lr_end must be a positive float")
        require(isinstance(power, float) and power >= 0, "power must be a positive float")
        self.lr_end = lr_end
        self.power = power

    def _check(self, lr: float) -> None:
        require(lr > self.lr_end, f"lr_end ({self.lr_end}) must be smaller than initial lr ({lr})")

    def _decay(self, step: int, lr: float) -> float:
        if step > self.total_steps:
            return self.lr_end / lr
        left = 1 - (step - self._num_warmup_steps) / (self.total_steps - self._num_warmup_steps)
        return float((lr - self.lr_end) * left**self.power + self.lr_end) / lr
