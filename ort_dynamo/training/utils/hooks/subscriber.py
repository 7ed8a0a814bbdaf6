"""The base of subscribers, which are called where modules of a model begin and end."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

__all__ = ["RuntimeStates", "SubscriberBase"]


class _GlobalStates:
    """The state that all subscribers of a model share.

    Attributes:
        execution_step: how many forward passes have ended.
        module_index_to_depth: index of a module -> how deep it is in the model, from 1.
        module_to_module_index: module -> its index, in the order of their definition.
    """

    def __init__(self) -> None:
        self.execution_step = 0
        self.module_index_to_depth: dict[int, int] = {}
        self.module_to_module_index: dict[nn.Module, int] = {}


class RuntimeStates:
    """The facts of the run that a subscriber gets; `global_states` has all of them."""

    def __init__(self) -> None:
        self.global_states: _GlobalStates = _GlobalStates()


class SubscriberBase:
    """Base of subscribers: override a method that ends in `_impl` to look at, or to change, the tensors that pass.

    Args:
        start_step: the first step in which the methods are called; None is 0.
        end_step: the step from which on they are not; None is never.
    """

    def __init__(self, start_step: int | None, end_step: int | None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = sys.maxsize if end_step is None else end_step

    def is_active(self, step: int) -> bool:
        """Check whether the methods are called in a step."""
        return self._start_step <= step < self._end_step

    def pre_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Run before a module's forward, with its arguments; return them, or others."""
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Run before a module's forward with each tensor among its arguments; return it, or another."""
        return tensor

    def post_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """Run after a module's forward with its arguments and results; return both, or others."""
        return args, outputs

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Run after a module's forward with each tensor among its results; return it, or another."""
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """Run after the whole model's forward with its arguments and results; return both, or others."""
        return args, outputs
