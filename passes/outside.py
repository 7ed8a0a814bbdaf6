"""Passes that programs add to ours."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import onnx_ir as ir
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils.hooks import RemovableHandle

from ort_dynamo.graph.build import spell_pass

__all__ = ["outside_functions", "outside_fx_passes", "outside_onnx_passes", "register_pass"]

Pass = PassBase | ir.passes.InPlacePass

_FIRST: OrderedDict[int, Pass] = OrderedDict()
_LAST: OrderedDict[int, Pass] = OrderedDict()


def register_pass(pass_: Pass, *, first: bool = False) -> RemovableHandle:
    """Add a pass to those that run on each graph; passes run in the order in which they were added.

    It applies to graphs that are compiled afterwards. Earlier graphs keep their passes until torch._dynamo.reset().
    The behaviour of the pass (its class with attributes, its parameters, the code of its methods) is in the graph key.

    Args:
        pass_: torch.fx's PassBase runs on joint and inference graphs, before recomputation is decided and before
            partitioning. onnx_ir's InPlacePass runs on each lowered model, before unused nodes are removed and before
            ONNX Runtime's own optimizers. Best a frozen dataclass (`help add_a_pass`).
        first: run before our own passes instead of after them.

    Returns:
        A handle, whose remove() takes the pass out again.

    Raises:
        TypeError: `pass_` is neither, or its repr does not tell its parameters.
    """
    if not isinstance(pass_, (PassBase, ir.passes.InPlacePass)):
        is_class = isinstance(pass_, type) and issubclass(pass_, (PassBase, ir.passes.InPlacePass))
        raise TypeError(
            f"register_pass takes an instance of torch.fx.passes.infra.pass_base.PassBase or of "
            f"onnx_ir.passes.InPlacePass, not {pass_!r}{f' (did you mean {pass_.__name__}()?)' if is_class else ''}"
        )
    if " at 0x" in spell_pass(pass_):
        raise TypeError(f"the parameters of {pass_!r} must have a repr that tells them: make it a frozen dataclass")
    passes = _FIRST if first else _LAST
    handle = RemovableHandle(passes)
    passes[handle.id] = pass_
    return handle


def outside_fx_passes(extra: Sequence[Pass] = (), *, first: bool) -> tuple[PassBase, ...]:
    """Give the FX passes that programs have added, in order; the last are those of one compile, among `extra`."""
    return tuple(p for p in _outside(extra, first) if isinstance(p, PassBase))


def outside_onnx_passes(extra: Sequence[Pass] = (), *, first: bool) -> tuple[ir.passes.InPlacePass, ...]:
    """Give the ONNX passes that programs have added, in order; the last are those of one compile, among `extra`."""
    return tuple(p for p in _outside(extra, first) if isinstance(p, ir.passes.InPlacePass))


def _outside(extra: Sequence[Pass], first: bool) -> tuple[Pass, ...]:
    return tuple(_FIRST.values()) if first else (*_LAST.values(), *extra)


_MADE_BY_DATACLASS = frozenset(
    {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"}
    | {"__replace__", "__lt__", "__le__", "__gt__", "__ge__"}
)


def outside_functions(extra: Sequence[Pass] = ()) -> dict[str, Callable[..., Any]]:
    """Role -> function of an ONNX pass that a program has added, for keys: these functions are the pass's behaviour.

    They are its methods, functions that are its fields, and functions that return the other attributes of its class.
    """
    passes = (*outside_onnx_passes(first=True), *outside_onnx_passes(extra, first=False))
    return {
        f"pass {i} {name}": function
        for i, pass_ in enumerate(passes)
        for name, function in (*_methods(type(pass_)), *_function_fields(pass_), *_attributes(type(pass_)))
    }


def _function_fields(pass_: ir.passes.InPlacePass) -> Iterator[tuple[str, Callable[..., Any]]]:
    names: list[str] = [field.name for field in dataclasses.fields(pass_)] if dataclasses.is_dataclass(pass_) else []
    for name in names:
        if isinstance(function := getattr(pass_, name), FunctionType):
            yield name, function


def _methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for one in kind.__mro__:
        made = _MADE_BY_DATACLASS if dataclasses.is_dataclass(one) else frozenset()
        for name, value in vars(one).items():
            function = _function_of(value)
            if isinstance(function, FunctionType) and name not in made:
                yield f"{one.__module__}.{one.__qualname__}.{name}", function


def _function_of(value: object) -> object:
    """Return the function of a class method, a property, a cached property or a cached function; else the value."""
    found = [getattr(value, name, None) for name in ("__func__", "fget", "func", "__wrapped__")]
    return next((one for one in found if isinstance(one, FunctionType)), value)


def _attributes(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in ("builtins", "abc", "onnx_ir", "ort_dynamo"):
            continue
        for name, value in vars(one).items():
            is_own = not (name.startswith("__") or name == "_abc_impl" or name in fields)
            if is_own and not isinstance(_function_of(value), FunctionType):
                yield f"{one.__module__}.{one.__qualname__}.{name}", partial(_held, value)


def _held(value: object) -> object:
    return value
