"""The loss scaler of the first ORTTrainer, that of onnxruntime.capi.ort_trainer."""

from __future__ import annotations

from torch import Tensor

__all__ = ["LossScaler"]


class LossScaler:
    """Chooses the factor of the loss, for the first ORTTrainer.

    Args:
        loss_scale_input_name: the trainer's `loss_scale_input_name`.
        is_dynamic_scale: whether the scale changes: it is halved when gradients are not finite, and doubled after many
            updates in which they were.
        loss_scale: the first scale.
        up_scale_window: after so many updates with finite gradients, one after another, the scale is doubled.
        min_loss_scale: the scale does not fall below this.
        max_loss_scale: the scale does not rise above this.

    Attributes:
        loss_scale_: the scale of the next step.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        self.loss_scale_input_name_ = loss_scale_input_name
        self.is_dynamic_scale_ = is_dynamic_scale
        self.initial_loss_scale_ = loss_scale
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_ = min_loss_scale
        self.max_loss_scale_ = max_loss_scale
        self.loss_scale_: float = loss_scale
        self.stable_steps_: int = 0

    def update_loss_scale(self, is_all_finite: bool | Tensor) -> None:
        """Double, halve or keep the scale, as all gradients of an update were finite or not."""
        if not self.is_dynamic_scale_:
            return
        self.stable_steps_ = self.stable_steps_ + 1 if is_all_finite else 0
        if not is_all_finite:
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
        elif self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Go back to the first scale, and count anew."""
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0
