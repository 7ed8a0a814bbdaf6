"""Registers subscribers with the modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ort_dynamo.training.ortmodule.wrapper import ORTModule
from ort_dynamo.training.torch_internals import tree_map
from ort_dynamo.training.utils.hooks.statistics_subscriber import StatisticsSubscriber, observe
from ort_dynamo.training.utils.hooks.subscriber import RuntimeStates, SubscriberBase

__all__ = ["GlobalSubscriberManager", "SubscriberManager"]

_Subscriber = TypeVar("_Subscriber", bound=SubscriberBase)


class SubscriberManager:
    """Calls subscribers where modules of a model begin and end.

    Statistics are operators of the traced graph. Every other subscriber is Python that nobody traces, so an ORTModule
    runs in pieces between the modules that it looks at.
    """

    def __init__(self) -> None:
        self._states = RuntimeStates()
        self._subscribers: list[SubscriberBase] = []
        self._handles: list[RemovableHandle] = []

    def subscribe(self, module: nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """Register subscribers with a model, in the place of those that were registered before.

        Args:
            module: the model, wrapped in an ORTModule or not. Best before its first call.
            subscribers: they are called in this order; the step counts from 0 again.

        Raises:
            ValueError: `module` is no module, or one of `subscribers` no subscriber.
            RuntimeError: there are no subscribers.
        """
        if not isinstance(module, nn.Module):
            raise ValueError("module must be a torch.nn.Module instance")
        if not all(isinstance(one, SubscriberBase) for one in subscribers):
            raise ValueError("subscriber must be a SubscriberBase instance")
        if not subscribers:
            raise RuntimeError("No subscribers are registered.")
        for handle in self._handles:
            handle.remove()
        self._states = RuntimeStates()
        self._subscribers = list(subscribers)
        for one in self._subscribers:
            if isinstance(one, StatisticsSubscriber):
                one.states = self._states
        inner = module.module if isinstance(module, ORTModule) else module
        self._handles = list(self._register(inner))
        # On the ORTModule itself it runs after the compiled region, and on a plain module it must not be traced.
        self._handles.append(module.register_forward_hook(_untraced(self._end_of_forward)))

    def find(self, kind: type[_Subscriber]) -> _Subscriber | None:
        """Return the first subscriber of a class, or None."""
        return next((one for one in self._subscribers if isinstance(one, kind)), None)

    def get_subscriber(self, subscriber_type: type[_Subscriber]) -> _Subscriber:
        """Return the first subscriber of a class; raises RuntimeError if there is none."""
        found = self.find(subscriber_type)
        if found is None:
            raise RuntimeError(f"Subscriber {subscriber_type} is not registered.")
        return found

    def get_run_context(self) -> RuntimeStates:
        """Return the facts of the run that subscribers get."""
        return self._states

    def _register(self, root: nn.Module) -> Iterator[RemovableHandle]:
        statistics = [one for one in self._subscribers if isinstance(one, StatisticsSubscriber)]
        others = [one for one in self._subscribers if not isinstance(one, StatisticsSubscriber)]
        states = self._states.global_states
        for index, (depth, module) in enumerate(_by_depth(root, 1, set())):
            states.module_to_module_index[module] = index
            states.module_index_to_depth[index] = depth
            if others:
                before, after = _calls(others, self._states)
                yield module.register_forward_pre_hook(_untraced(before), with_kwargs=True)
                yield module.register_forward_hook(_untraced(after))
            if statistics:
                name = f"{type(module).__name__}_{index}"
                yield module.register_forward_hook(_observing(statistics, name, depth))

    def _end_of_forward(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        states = self._states
        for one in self._subscribers:
            if one.is_active(states.global_states.execution_step):
                args, outputs = one.post_forward_outmost_module_apply_impl(states, module, args, outputs)
        states.global_states.execution_step += 1
        return outputs


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that Dynamo leaves alone: the graph ends before it, and another begins after it."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def _by_depth(module: nn.Module, depth: int, seen: set[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    seen.add(module)
    yield depth, module
    for child in module.children():
        if child not in seen:
            yield from _by_depth(child, depth + 1, seen)


def _observing(subscribers: Sequence[StatisticsSubscriber], name: str, depth: int) -> Callable[..., Any]:
    """Return a forward hook that shows the tensors among a module's results."""

    def hook(module: nn.Module, args: Any, outputs: Any) -> Any:
        index = 0

        def show(value: Any) -> Any:
            nonlocal index
            if not isinstance(value, torch.Tensor):
                return value
            for one in subscribers:
                value = observe(value, f"{name}_{index}th_output", depth, one)
            index += 1
            return value

        return tree_map(show, outputs)

    return hook


def _calls(
    subscribers: Sequence[SubscriberBase], states: RuntimeStates
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the hooks before and after a module's forward."""

    def active() -> list[SubscriberBase]:
        return [one for one in subscribers if one.is_active(states.global_states.execution_step)]

    def each(module: nn.Module, values: Any, call: Callable[[SubscriberBase], Callable[..., Any]]) -> Any:
        index = 0

        def apply(value: Any) -> Any:
            nonlocal index
            if not isinstance(value, torch.Tensor):
                return value
            for one in active():
                value = call(one)(states, module, index, value)
            index += 1
            return value

        return tree_map(apply, values)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        for one in active():
            args, kwargs = one.pre_forward_module_apply_impl(states, module, args, kwargs)
        args = each(module, args, lambda one: one.pre_forward_tensor_apply_impl)
        return args, each(module, kwargs, lambda one: one.pre_forward_tensor_apply_impl)

    def after(module: nn.Module, args: Any, outputs: Any) -> Any:
        for one in active():
            _, outputs = one.post_forward_module_apply_impl(states, module, args, outputs)
        return each(module, outputs, lambda one: one.post_forward_tensor_apply_impl)

    return before, after


GlobalSubscriberManager: SubscriberManager = SubscriberManager()
"""The one that `inspect_activation` asks."""
