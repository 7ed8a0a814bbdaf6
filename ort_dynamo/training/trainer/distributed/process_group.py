"""Answers a training step's questions to the processes that train together; `Together` is for a single process.

ZeRO's first stage is by torch's ZeroRedundancyOptimizer: each process updates some weights, and gives them to all. It
divides whole weights, so that the norms of gradients, and LAMB's of each weight, need nothing from other processes.
FSDP2 splits each weight and its gradient: ZeRO's later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ort_dynamo.training.trainer.training_state import TrainedWeight

__all__ = ["ForwardBackward", "Found", "Together", "ZeroUpdate"]

Found = tuple[Any, Sequence[Tensor | None]]
"""The results of a forward, the loss detached, and each weight's gradient; None for a weight that was not reached."""


@dataclass(frozen=True)
class ForwardBackward:
    """A forward and a backward that a step asks for.

    Attributes:
        called: the forward: gives loss and outputs.
        inputs: its arguments.
        weights: those to give gradients of.
        scale: the loss scale.
        adds: whether the sum gathered since the last update belongs to the gradients.
        reached: names of the weights that have such a sum in this process.
        reduces: whether they are to be averaged over processes.
    """

    called: Callable[..., Any]
    inputs: Sequence[Any]
    weights: Sequence[TrainedWeight]
    scale: float
    adds: bool
    reached: Container[str]
    reduces: bool

    def run(self) -> Found:
        """Run both in this process alone."""
        with torch.enable_grad():
            loss, *outputs = self.called(*self.inputs)
        if not self.weights or not loss.requires_grad:
            return (loss.detach(), *outputs), [None] * len(self.weights)
        parameters = [weight.parameter for weight in self.weights]
        found = torch.autograd.grad(loss, parameters, torch.full_like(loss, self.scale), allow_unused=True)
        return (loss.detach(), *outputs), found


class Together:
    """The processes that train a model: a single one, except in subclasses.

    Attributes:
        postpones: whether gradients are reduced only in steps that update; otherwise in every step.
        shares_layers: whether other processes have parts of this model's layers, or stages of it.
        has_stages: whether other processes have weights of a pipeline, whose gradients count in the total norm.
    """

    postpones: bool = False
    shares_layers: bool = False
    has_stages: bool = False

    def gradients(self, asked: ForwardBackward) -> Found:
        """Run forward and backward, with the communication that they need."""
        return asked.run()

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of all gradients, from that of this process's: the same, unless others have some."""
        return own

    def agree(self, all_finite: bool, device: torch.device) -> bool:
        """Check whether gradients were finite in all processes."""
        return all_finite


_Apply = Callable[[], None]


class ZeroUpdate:
    """Divides the updates of parameters among processes.

    Args:
        parameters: those that are trained, in the same order in all processes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._zero = ZeroRedundancyOptimizer(parameters, _OwnUpdate)
        self.own: set[int] = {id(one) for group in self._zero.optim.param_groups for one in group["params"]}

    def step(self, apply: _Apply = lambda: None) -> None:
        """Update this process's own parameters by `apply`; then all processes get all of them."""
        self._zero.step(apply=apply)


class _OwnUpdate(Optimizer):
    """The optimizer that ZeroRedundancyOptimizer steps, for the parameters of its own process."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Tensor] | None = None, *, apply: _Apply = lambda: None) -> None:  # type: ignore[override]
        apply()
