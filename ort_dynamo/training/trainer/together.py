"""What a training step asks of the processes that train together, and what one says that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ort_dynamo.training.trainer.training_state import TrainedWeight

__all__ = ["Alone", "Together", "gradients_of"]


class Together(Protocol):
    """The processes that train a model together."""

    @property
    def postpones(self) -> bool:
        """Whether gradients are reduced in steps that update alone; otherwise each step's are."""
        ...

    @property
    def shares_layers(self) -> bool:
        """Whether other processes have parts of this model's layers, or stages of it."""
        ...

    @property
    def has_stages(self) -> bool:
        """Whether other processes have weights of a pipeline, whose gradients belong to the norm of all."""
        ...

    def gradients(
        self,
        called: Callable[..., Any],
        inputs: Sequence[Any],
        weights: Sequence[TrainedWeight],
        scale: float,
        *,
        adds: bool,
        reduces: bool,
    ) -> tuple[Any, Sequence[Tensor | None]]:
        """Run forward and backward.

        Args:
            called: the forward: gives loss and outputs.
            inputs: its arguments.
            weights: those to give gradients of.
            scale: the loss scale.
            adds: whether what was gathered since the last update belongs to the gradients.
            reduces: whether they are to be averaged over processes.

        Returns:
            What the forward gave, the loss detached, and each weight's gradient; None of one that was not reached.
        """
        ...

    def norm(self, own: Tensor) -> Tensor:
        """The norm of all gradients, from that of this process's."""
        ...

    def agree(self, all_finite: bool, device: torch.device) -> bool:
        """Whether gradients were finite in all processes."""
        ...


class Alone:
    """One process."""

    postpones = shares_layers = has_stages = False

    def gradients(
        self,
        called: Callable[..., Any],
        inputs: Sequence[Any],
        weights: Sequence[TrainedWeight],
        scale: float,
        *,
        adds: bool,
        reduces: bool,
    ) -> tuple[Any, Sequence[Tensor | None]]:
        """Run forward and backward; there is nothing to reduce."""
        return gradients_of(called, inputs, weights, scale)

    def norm(self, own: Tensor) -> Tensor:
        """The norm of this process's gradients."""
        return own

    def agree(self, all_finite: bool, device: torch.device) -> bool:
        """Whether gradients were finite."""
        return all_finite


def gradients_of(
    called: Callable[..., Any], inputs: Sequence[Any], weights: Sequence[TrainedWeight], scale: float
) -> tuple[Any, Sequence[Tensor | None]]:
    """Run forward and backward; what the forward gave, the loss detached, and each weight's gradient."""
    with torch.enable_grad():
        loss, *outputs = called(*inputs)
    parameters = [weight.parameter for weight in weights]
    found = torch.autograd.grad(loss, parameters, torch.full_like(loss, scale), allow_unused=True)
    return (loss.detach(), *outputs), found
