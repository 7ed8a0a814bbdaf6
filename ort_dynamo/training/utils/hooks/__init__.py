"""Hooks that look at activations while a model runs, also inside an ORTModule."""

from __future__ import annotations

import torch

from ort_dynamo.training.utils.hooks.statistics_subscriber import StatisticsSubscriber, observe
from ort_dynamo.training.utils.hooks.subscriber import RuntimeStates, SubscriberBase
from ort_dynamo.training.utils.hooks.subscriber_manager import GlobalSubscriberManager, SubscriberManager

__all__ = [
    "GlobalSubscriberManager",
    "RuntimeStates",
    "StatisticsSubscriber",
    "SubscriberBase",
    "SubscriberManager",
    "inspect_activation",
]


def inspect_activation(activation_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Summarize a tensor and its gradient by the registered StatisticsSubscriber, anywhere in a model's code.

    Args:
        activation_name: how the files are called.
        tensor: the tensor; the returned tensor takes its place.

    Raises:
        RuntimeError: no StatisticsSubscriber is registered with GlobalSubscriberManager.
    """
    subscriber = GlobalSubscriberManager.find(StatisticsSubscriber)
    if subscriber is None:
        raise RuntimeError("StatisticsSubscriber is not registered, cannot inspect activation.")
    return observe(tensor, activation_name, -1, subscriber)
