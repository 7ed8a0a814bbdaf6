"""ATen overload -> lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import filterfalse
from pkgutil import walk_packages
from typing import Any, TypeGuard, TypeVar

from torch.fx import GraphModule

from ort_dynamo.errors import DuplicateLoweringError
from ort_dynamo.torch_internals.kernels.operators import OpOverload, OpOverloadPacket, custom_name, is_absent

__all__ = [
    "Lowering",
    "eager_only",
    "find_lowering",
    "has_outside_lowerings",
    "is_from_outside",
    "keep_in_eager",
    "lowering",
    "name_of",
    "named_lowering",
    "outside_lowerings",
    "register",
    "register_lowering",
    "registered",
]

Lowering = Callable[..., Any]
"""lowering(ctx, *args, **kwargs) -> ir.Value, or a tuple of ir.Value | None for several outputs.

The arguments are the node's own, with every tensor argument replaced by its ir.Value and every symbolic scalar by
its torch.SymInt / SymFloat. An output that no node reads may be None.
"""

_F = TypeVar("_F", bound=Lowering)
_K = TypeVar("_K")
_REGISTRY: dict[OpOverload, Lowering] = {}
_NAMED: dict[str, Lowering] = {}  # for operators that a library of somebody else's defines, when it is imported
_REASONS: dict[OpOverload, str] = {}
_FROM_OUTSIDE: dict[OpOverload, Lowering] = {}  # registered by users; goes before ours


def register(overload: OpOverload, function: Lowering) -> None:
    """Make `function` the lowering of `overload`; without effect for one that the installed torch lacks.

    Raises:
        DuplicateLoweringError: the overload has one already.
    """
    if not is_absent(overload):
        _add(_REGISTRY, overload, function)


def _add(table: dict[_K, Lowering], key: _K, function: Lowering) -> None:
    if key in table:
        raise DuplicateLoweringError(overload=key, first=name_of(table[key]), second=name_of(function))
    table[key] = function


def lowering(*overloads: OpOverload) -> Callable[[_F], _F]:
    """Register by a decorator, which returns the function unchanged."""

    def decorate(function: _F) -> _F:
        for overload in overloads:
            register(overload, function)
        return function

    return decorate


def named_lowering(*names: str) -> Callable[[_F], _F]:
    """`lowering` for custom operators that need not exist yet: "namespace.operator.overload"."""

    def decorate(function: _F) -> _F:
        for name in names:
            _add(_NAMED, name, function)
        return function

    return decorate


def keep_in_eager(reason: str, *overloads: OpOverload) -> None:
    """Leave `overloads` whole and in eager, on purpose, for `reason`."""

    def refuse(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        raise ctx.refuse(reason)

    for overload in overloads:
        register(overload, refuse)
    _REASONS.update(dict.fromkeys(filterfalse(is_absent, overloads), reason))


def eager_only() -> Mapping[OpOverload, str]:
    """Return the overloads that are fallbacks on purpose, each with the reason."""
    _load_families()
    return _REASONS


def register_lowering(*overloads: OpOverload, replace: bool = False) -> Callable[[_F], _F]:
    """Add a lowering for ATen or custom (torch.library) overloads, by a decorator.

    It applies to graphs that are compiled afterwards. Earlier graphs keep their lowerings until torch._dynamo.reset().
    An overload with a lowering is not decomposed, and its nodes are no fallbacks any more.

    Args:
        overloads: e.g. torch.ops.mylib.scale.default, and the overload of its gradient.
        replace: replace the lowering that an overload has already, ours or one registered before.

    Returns:
        A decorator that returns the function unchanged. The function gets a LoweringContext and the node's arguments,
        tensors as onnx_ir.Value, and returns one onnx_ir.Value, or a tuple of them (`help add_an_operator`).

    Raises:
        TypeError: an argument is no overload.
        DuplicateLoweringError: an overload has a lowering and `replace` is False; nothing was registered then.
    """
    for overload in overloads:
        if not isinstance(overload, OpOverload):
            raise TypeError(f"register_lowering takes overloads, {_advice(overload)}")
    if not overloads:
        raise TypeError("register_lowering takes at least one overload: @register_lowering(torch.ops.mylib.op.default)")

    def decorate(function: _F) -> _F:
        for overload in overloads:
            found = find_lowering(overload)
            if found is not None and not replace:
                raise DuplicateLoweringError(overload=overload, first=name_of(found), second=name_of(function))
        _FROM_OUTSIDE.update(dict.fromkeys(overloads, function))
        return function

    return decorate


def find_lowering(overload: OpOverload) -> Lowering | None:
    """Return the lowering of exactly this overload, a user's before our own, or None."""
    _load_families()
    return _FROM_OUTSIDE.get(overload) or _REGISTRY.get(overload) or _NAMED.get(str(overload))


def registered() -> frozenset[OpOverload]:
    """Every overload with a lowering, our own or a user's."""
    _load_families()
    return frozenset(_REGISTRY) | frozenset(_FROM_OUTSIDE)


def outside_lowerings(gm: GraphModule) -> dict[str, Lowering]:
    """Overload, as text -> its lowering, for nodes of `gm` and of its sub-graphs whose lowering a user registered."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    targets: set[Any] = {node.target for graph in graphs for node in graph.nodes}
    return {str(target): _FROM_OUTSIDE[target] for target in targets & _FROM_OUTSIDE.keys()}


def is_from_outside(target: object) -> TypeGuard[OpOverload]:
    """Check whether a user registered the lowering of a node's target."""
    return target in _FROM_OUTSIDE


def has_outside_lowerings() -> bool:
    """Check whether a user has registered any lowering."""
    return bool(_FROM_OUTSIDE)


@functools.cache
def _load_families() -> None:
    from ort_dynamo.lowering import ops

    for module in walk_packages(ops.__path__, f"{ops.__name__}."):
        import_module(module.name)


def name_of(function: Lowering) -> str:
    """Return the module and name of a lowering."""
    inner = function.func if isinstance(function, functools.partial) else function
    return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _advice(given: object) -> str:
    if isinstance(given, OpOverloadPacket):
        names: list[str] = given.overloads()  # type: ignore[no-untyped-call]
        return f"not the packet {given}; its overloads: " + ", ".join(f"torch.ops.{given}.{name}" for name in names)
    if (name := custom_name(given)) is not None:
        return f"not the function: torch.ops.{name}.default"
    return f"e.g. torch.ops.aten.mul.Tensor, not {given!r}"
