"""Finds the modules, optimizers, tensors and other objects that a function of the program reads."""

from __future__ import annotations

import argparse
import dis
import functools
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.utils.data
from torch import nn
from torch.optim import Optimizer

from ort_dynamo.program.containers import is_container, items_of
from ort_dynamo.program.program_warning import FRAMEWORKS
from ort_dynamo.torch_internals.tracing.frames import generated_function, uncompiled

__all__ = ["MOST_ITEMS", "global_names", "has_state", "modules_among", "read_by"]

MOST_ITEMS = 1000
"""Most items of a container that is looked into: one with more is data of the program."""

_LIBRARIES = (*FRAMEWORKS, *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")))
"""Beginnings of the file names of code that is not the program's."""

_LIBRARY_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "ort_dynamo"})


def read_by(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Find the modules, optimizers, tensors, objects and containers that a function reads, by their names.

    Objects are those whose attributes the function may change, such as a trainer or a learning-rate scheduler. All of
    them are looked for in the function's object, its closure, its defaults and bound arguments, and in the globals that
    it names. From there the search goes on in attributes of objects, in containers of up to 1000 items, and in
    functions of the program. A module is found as a whole, without the modules inside it. Data sets and loaders are
    left out, and so is what objects have in slots, and classes as attributes.

    Args:
        function: the function or module.
        arguments: those of its call; tensors among them are left out.
    """
    first = function if isinstance(function, nn.Module) else generated_function(function)
    found: dict[str, Any] = {}
    seen: set[int] = set()
    given = [(f"argument {index}", one) for index, one in enumerate(arguments) if not _is(one, torch.Tensor)]
    waiting: deque[tuple[str, Any]] = deque([("", first), *given])
    while waiting:
        name, value = waiting.popleft()
        one = uncompiled(value) if _is(value, nn.Module) else value
        if id(one) in seen:
            continue
        seen.add(id(one))
        if _is(one, (nn.Module, Optimizer, torch.Tensor)):
            found[_free(name, found)] = one
            waiting.extend(_beside(name, one))
        elif has_state(one):
            found[_free(f"{name} ({type(one).__name__})", found)] = one
            waiting.extend(_parts_of_object(name, one))
        else:
            if is_container(one):
                found[_free(f"{name} ({type(one).__name__})", found)] = one
            waiting.extend(_parts(name, one, is_first=one is first))
    inner = {id(part) for one in modules_among(found).values() for part in one.modules() if part is not one}
    return {name: one for name, one in found.items() if id(one) not in inner}


def modules_among(read: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules of what a function reads."""
    return {name: one for name, one in read.items() if _is(one, nn.Module)}


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that a function's code reads, with those of the functions inside it."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from global_names(inner)


def _free(name: str, found: dict[str, Any]) -> str:
    """Return a name that is not taken: functions may use one name for several values."""
    number = 1
    free = name
    while free in found:
        number += 1
        free = f"{name}#{number}"
    return free


def has_state(one: Any) -> bool:
    """Check for an object of the program that is no data, or one of a library that has a state of its own."""
    if _is(one, _WITHOUT_STATE) or not _is_dict(one):
        return False
    package = str(type(one).__module__).partition(".")[0]
    if package not in _LIBRARY_PACKAGES or _is(one, (SimpleNamespace, argparse.Namespace)):
        return True
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _is(value: Any, kinds: Any) -> bool:
    """Check the type of a value, without asking the value itself: a proxy might look for its object."""
    return issubclass(type(value), kinds)


def _is_dict(one: Any) -> bool:
    """Check whether an object has attributes, and gives them; a proxy has those of another object."""
    try:
        return one.__class__ is type(one) and issubclass(type(vars(one)), dict)
    except Exception:  # whatever an object of the program raises where it is asked for its attributes
        return False


def _beside(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds beside modules and tensors, or the optimizer that another one wraps."""
    if _is(one, nn.Module):
        for path, module in one.named_modules():
            items = list(vars(module).items())
            values = ((".".join(filter(None, (name, path, key))), value) for key, value in items)
            yield from ((key, value) for key, value in values if has_state(value) and not _is(value, nn.Module))
    elif _is(one, Optimizer):
        yield from ((f"{name}.{key}", value) for key, value in list(vars(one).items()) if _is(value, Optimizer))


_WITHOUT_STATE = (
    *(type, ModuleType, FunctionType, MethodType, functools.partial, Enum),
    *(torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler),
)


def _parts_of_object(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    yield from ((f"{prefix}{key}", value) for key, value in list(vars(one).items()))
    for kind in type(one).__mro__:
        for key, value in list(vars(kind).items()):
            if _is(value, (staticmethod, classmethod)):
                value = value.__func__
            value = value.fget if _is(value, property) else value
            if _is(value, (FunctionType, nn.Module, Optimizer)):  # its tables are those of all objects of the class
                yield f"{prefix}{key}", value


def _parts(name: str, one: Any, *, is_first: bool) -> Iterator[tuple[str, Any]]:
    """Yield what a container or a function holds, with names."""
    if items := items_of(one):
        keys = list(dict.keys(one)) if _is(one, dict) else range(len(items))
        if len(items) <= MOST_ITEMS:
            spelled = (repr(key) if type(key) in (str, int) else index for index, key in enumerate(keys))
            yield from ((f"{name}[{key}]", value) for key, value in zip(spelled, items, strict=True))
        return
    if not _is(one, (functools.partial, MethodType, FunctionType)):
        return
    match one:
        case functools.partial():
            yield name, one.func
            yield from ((f"args[{index}]", value) for index, value in enumerate(one.args))
            yield from one.keywords.items()
        case MethodType():
            yield name, one.__self__
            yield name, one.__func__
        case FunctionType() if is_first or not one.__code__.co_filename.startswith(_LIBRARIES):
            yield from _read_by_code(one)
        case FunctionType() if hasattr(one, "__wrapped__"):  # a decorator of a library
            yield name, generated_function(one)
            yield name, one.__wrapped__


def _read_by_code(function: FunctionType) -> Iterator[tuple[str, Any]]:
    yield from vars(function).items()  # with what functools.wraps keeps
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # a variable that has no value yet
    yield from ((f"defaults[{index}]", value) for index, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in dict.fromkeys(global_names(function.__code__)):
        value = function.__globals__.get(name)
        if not _is(value, ModuleType):
            yield name, value
        elif not (getattr(value, "__file__", None) or "<").startswith(_LIBRARIES):
            attributes = vars(value)
            yield from ((f"{name}.{key}", attributes[key]) for key in function.__code__.co_names if key in attributes)
