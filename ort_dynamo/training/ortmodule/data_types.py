"""Checks the types and devices of ORTModule's inputs and results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ort_dynamo.training.ortmodule.fallback import ORTModuleDeviceException, ORTModuleIOError, wrap_exception
from ort_dynamo.training.torch_internals import is_container

__all__ = ["check_devices", "check_inputs", "check_outputs", "module_device"]

_PLAIN = frozenset({torch.Tensor, nn.Parameter, type(None), int, float, bool, str})


def check_inputs(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the types of a call's arguments: None, str, numbers, tensors, and nested sequences and mappings of these.

    Containers that torch's pytree knows, sizes, dtypes and devices, and the caches of transformers are allowed as well.

    Args:
        forward: the function that is called, which names the positional arguments.

    Raises:
        ORTModuleIOError: an argument is of another type.
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in arguments:
        if type(value) not in _PLAIN and (found := _find_other(value)) is not None:
            path, other = found
            name = "_".join([_argument_name(forward, key) if isinstance(key, int) else key, *path])
            message = f"ORTModule does not support input type {other} for input {name}"
            raise wrap_exception(ORTModuleIOError, TypeError(message))


def check_outputs(outputs: Any) -> None:
    """Check the types of a module's results, which may be the same; raises ORTModuleIOError."""
    if type(outputs) not in _PLAIN and (found := _find_other(outputs)) is not None:
        message = f"ORTModule fails to extract schema from data: Unsupported flatten data type: {found[1]}"
        raise wrap_exception(ORTModuleIOError, TypeError(message))


def _find_other(value: Any) -> tuple[list[str], type] | None:
    """Find the first part of a value that has another type: the keys and indices that lead to it, and the type."""
    if isinstance(value, (torch.Tensor, str, int, float, complex, torch.dtype, torch.device, type(None))):
        return None
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (Sequence, set, frozenset)):
        parts = enumerate(value)
    elif is_container(type(value)) or _is_cache(value):
        return None
    else:
        return [], type(value)
    for key, part in parts:
        if type(part) not in _PLAIN and (found := _find_other(part)) is not None:
            path, other = found
            return [str(key), *path], other
    return None


def _argument_name(forward: Callable[..., Any], index: int) -> str:
    """Name a positional argument by its parameter; one that `*args` takes has its index there, as in `args_0`.

    An argument has its index as its name if `forward` does not tell its parameters.
    """
    for position, parameter in enumerate(_parameters(forward)):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}_{index - position}"
        if position == index:
            return parameter.name
    return str(index)


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # a function of C, or a signature that is none
        return []


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
