"""Data parallelism: torch's DistributedDataParallel around the compiled forward and backward of a trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ort_dynamo.training.trainer.adasum import adasum_hook
from ort_dynamo.training.trainer.together import ForwardBackward, Found, Together

__all__ = ["Replicas", "agree_on"]


class Replicas(Together):
    """Has a model's gradients reduced over all processes, each of which has the whole model.

    Made, it has given all of them rank 0's weights and buffers. Before each forward buffers are rank 0's again.

    Args:
        combined: model and loss.
        postpones: whether gradients are reduced in steps that update alone; otherwise each step's are.
        adasum: whether they are reduced by Adasum; otherwise they are averaged.
    """

    def __init__(self, combined: nn.Module, *, postpones: bool, adasum: bool) -> None:
        self.postpones = postpones
        self._called = _Called(combined)
        # The forward is compiled, so looking for parameters that a loss does not depend on walks over few nodes.
        self._ddp = DistributedDataParallel(self._called, find_unused_parameters=True)
        if adasum:
            self._ddp.register_comm_hook(None, adasum_hook)

    def gradients(self, asked: ForwardBackward) -> Found:
        """Run forward and backward, in which DistributedDataParallel adds to each parameter's `grad` and reduces it."""
        for weight in asked.weights:
            before = weight.gathered if asked.adds else None
            weight.parameter.grad = None if before is None else before.to(weight.parameter.dtype, copy=True)
        with torch.enable_grad():
            loss, outputs = self._run(asked)
        torch.autograd.backward(loss, torch.full_like(loss, asked.scale))
        reduced = [weight.parameter.grad for weight in asked.weights]
        for weight in asked.weights:
            weight.parameter.grad = None
        return (loss.detach(), *outputs[1:]), reduced

    def _run(self, asked: ForwardBackward) -> tuple[Tensor, Any]:
        """Run a forward that gives the loss first; gives the loss to call `backward` of, and all that it gave."""
        self._called.call = asked.called
        with nullcontext() if asked.reduces else self._ddp.no_sync(), warnings.catch_warnings():
            # torch says once that all were reached: which a later step may not do.
            warnings.filterwarnings("ignore", message="(?s).*find_unused_parameters=True was specified")
            try:
                loss = self._ddp(*asked.inputs)
                outputs = self._called.outputs
            finally:
                self._called.outputs = None
        return loss, outputs

    def agree(self, all_finite: bool, device: torch.device) -> bool:
        """Whether gradients were finite in all processes."""
        return agree_on(all_finite, device)


def agree_on(holds: bool, device: torch.device) -> bool:
    """Whether something holds in all processes."""
    found = torch.tensor(int(holds), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MIN)
    return bool(found)


class _Called(nn.Module):
    """Calls a function that runs a module; only the loss goes through DistributedDataParallel, which copies results."""

    def __init__(self, combined: nn.Module) -> None:
        super().__init__()
        self.combined = combined
        self.call: Callable[..., Any] = combined
        self.outputs: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "call":
            object.__setattr__(self, name, value)  # no second place for the model
        else:
            super().__setattr__(name, value)

    def forward(self, *inputs: Any) -> Tensor:
        self.outputs = self.call(*inputs)
        loss: Tensor = self.outputs[0]
        return loss
