"""Checks the types and devices of ORTModule's inputs and results."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ort_dynamo.training.ortmodule.fallback import ORTModuleDeviceException, ORTModuleIOError, wrap_exception
from ort_dynamo.training.torch_internals import is_container

__all__ = ["check_devices", "check_inputs", "check_outputs", "module_device"]

_PLAIN = frozenset({torch.Tensor, nn.Parameter, type(None), int, float, bool, str})


def check_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the types of a call's arguments: None, str, numbers, tensors, and nested sequences and mappings of these.

    Containers that torch's pytree knows, sizes, dtypes and devices, and the caches of transformers are allowed as well.

    Raises:
        ORTModuleIOError: an argument is of another type.
    """
    for value in args:
        if type(value) not in _PLAIN:
            _check(value, "data")
    for value in kwargs.values():
        if type(value) not in _PLAIN:
            _check(value, "data")


def check_outputs(outputs: Any) -> None:
    """Check the types of a module's results, which may be the same; raises ORTModuleIOError."""
    if type(outputs) not in _PLAIN:
        _check(outputs, "output")


def _check(value: Any, what: str) -> None:
    if isinstance(value, (torch.Tensor, str, int, float, complex, torch.dtype, torch.device, type(None))):
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (Sequence, set, frozenset)):
        parts = value
    elif is_container(type(value)) or _is_cache(value):
        return
    else:
        message = f"ORTModule does not support the following model {what} type {type(value)}."
        raise wrap_exception(ORTModuleIOError, TypeError(message))
    for part in parts:
        if type(part) not in _PLAIN:
            _check(part, what)


def _is_cache(value: Any) -> bool:
    """Check for a cache of transformers' decoders, whose type is not registered as a container."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def module_device(module: nn.Module) -> torch.device | None:
    """Give the device of a module's parameters, or None if it has none; raises ORTModuleDeviceException for several."""
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise wrap_exception(ORTModuleDeviceException, RuntimeError("ORTModule supports a single device per model"))
    return next(iter(devices), None)


def check_devices(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that all tensors of a call are on the module's device; raises ORTModuleDeviceException."""
    device = module_device(module)
    for tensor in _tensors([*args, *kwargs.values()]):
        if device is not None and tensor.device != device:
            message = (
                f"Input argument to forward found on device {tensor.device}, "
                f"but expected it to be on module device {device}."
            )
            raise wrap_exception(ORTModuleDeviceException, RuntimeError(message))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _tensors(value)
