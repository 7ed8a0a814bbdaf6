"""Passes that programs add to ours."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import onnx_ir as ir
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils.hooks import RemovableHandle

from ort_dynamo.build import spell_pass

__all__ = ["outside_functions", "outside_fx_passes", "outside_onnx_passes", "register_pass"]

_FIRST: OrderedDict[int, PassBase | ir.passes.InPlacePass] = OrderedDict()
_LAST: OrderedDict[int, PassBase | ir.passes.InPlacePass] = OrderedDict()


def register_pass(pass_: PassBase | ir.passes.InPlacePass, *, first: bool = False) -> RemovableHandle:
    """Add a pass to those that run on each graph; passes run in the order in which they were added.

    It counts for graphs compiled from then on; graphs compiled before keep what they were compiled with until
    torch._dynamo.reset(). What the pass does (its class, its parameters and the code of its methods) is part of the
    graph key.

    Args:
        pass_: torch.fx's PassBase runs on joint and inference graphs, before what the backward recomputes is decided
            and before partitioning. onnx_ir's InPlacePass runs on each lowered model, before unused nodes are removed
            and before ONNX Runtime's own optimizers. Best a frozen dataclass (docs/add_a_pass.md).
        first: run before our own passes instead of after them.

    Returns:
        A handle, whose remove() takes the pass out again.

    Raises:
        TypeError: `pass_` is neither, or its repr does not tell its parameters.
    """
    if not isinstance(pass_, (PassBase, ir.passes.InPlacePass)):
        raise TypeError(
            f"register_pass takes an instance of torch.fx.passes.infra.pass_base.PassBase or of "
            f"onnx_ir.passes.InPlacePass, not {pass_!r}"
        )
    if " at 0x" in spell_pass(pass_):
        raise TypeError(f"the parameters of {pass_!r} must have a repr that tells them: make it a frozen dataclass")
    passes = _FIRST if first else _LAST
    handle = RemovableHandle(passes)
    passes[handle.id] = pass_
    return handle


def outside_fx_passes(*, first: bool) -> tuple[PassBase, ...]:
    """Give the FX passes that programs have added, in order."""
    return tuple(p for p in (_FIRST if first else _LAST).values() if isinstance(p, PassBase))


def outside_onnx_passes(*, first: bool) -> tuple[ir.passes.InPlacePass, ...]:
    """Give the ONNX passes that programs have added, in order."""
    return tuple(p for p in (_FIRST if first else _LAST).values() if isinstance(p, ir.passes.InPlacePass))


_MADE_BY_DATACLASS = frozenset(
    {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"}
    | {"__replace__", "__lt__", "__le__", "__gt__", "__ge__"}
)


def outside_functions() -> dict[str, Callable[..., Any]]:
    """Role -> method of an ONNX pass that a program has added, for keys: what the pass does is what these do."""
    passes = (*outside_onnx_passes(first=True), *outside_onnx_passes(first=False))
    return {f"pass {i} {name}": method for i, pass_ in enumerate(passes) for name, method in _methods(type(pass_))}


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for one in kind.__mro__:
        made = _MADE_BY_DATACLASS if dataclasses.is_dataclass(one) else frozenset()
        for name, value in vars(one).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))  # class methods, properties
            if isinstance(function, FunctionType) and name not in made:
                yield f"{one.__module__}.{one.__qualname__}.{name}", function
