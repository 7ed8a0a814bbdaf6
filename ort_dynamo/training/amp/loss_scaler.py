"""Loss scalers: they choose the factor of the loss, so that small gradients do not vanish in float16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ort_dynamo.training.requirements import is_number, require

if TYPE_CHECKING:
    from ort_dynamo.training.train_step_info import TrainStepInfo

__all__ = ["DynamicLossScaler", "LossScaler"]


class LossScaler:
    """Base of loss scalers: one of your own has to define update().

    Args:
        loss_scale: the first scale, above zero.

    Raises:
        AssertionError: loss_scale is no number above zero.
    """

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self.loss_scale = loss_scale
        self._initial_loss_scale = self.loss_scale

    @property
    def input_name(self) -> str | None:
        """Name of the graph's input for the scale, if there is one."""
        return self._input_name

    @input_name.setter
    def input_name(self, input_name: str) -> None:
        require(isinstance(input_name, str), "'input_name' must be a string")
        require(len(input_name) > 0, "'input_name' cannot be empty")
        self._input_name = input_name

    @property
    def loss_scale(self) -> float:
        """The scale of the next step."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        require(is_number(loss_scale) and loss_scale > 0, "'loss_scale' must be a positive float")
        self._loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Go back to the first scale."""
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Choose the scale of the next step; the trainer calls this after each update of the weights.

        Args:
            train_step_info: `all_finite` says whether the gradients were; if not, the update was left out.

        Returns:
            The scale.

        Raises:
            NotImplementedError: a subclass has to define it.
        """
        raise NotImplementedError


class DynamicLossScaler(LossScaler):
    """Halves the scale when a gradient overflows, and doubles it after many steps in which none did.

    Args:
        automatic_update: whether the scale changes; without, it is static. (The old docstring said that the default is
            False, its code True.)
        loss_scale: the first scale.
        up_scale_window: after so many updates with finite gradients, one after another, the scale is doubled.
        min_loss_scale: the scale does not fall below this.
        max_loss_scale: the scale does not rise above this.

    Raises:
        AssertionError: loss_scale is no number above zero.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Go back to the first scale, and count anew."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Double, halve or keep the scale.

        Args:
            train_step_info: `all_finite` says whether the gradients were.

        Returns:
            The scale.
        """
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps_count = 0
            return self.loss_scale
        self._stable_steps_count += 1
        if self._stable_steps_count >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._stable_steps_count = 0
        return self.loss_scale
