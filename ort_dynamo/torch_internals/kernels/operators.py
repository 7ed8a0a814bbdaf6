"""torch's operators by name, and their schemas; an operator that the installed torch lacks is no error.

`aten.mul.Tensor` is `torch.ops.aten.mul.Tensor`. Where torch has no such operator it is an `AbsentOperator`, which
equals no node's target: a table may name it, and the functions that register the entries of tables leave it out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C import FunctionSchema

# All tested versions have these under these names. Targets of FX nodes are instances of them: without them there is
# no graph to compile.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "AbsentOperator",
    "AbsentOperatorError",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "absent_operators",
    "all_overloads",
    "aten",
    "can_decompose",
    "custom_name",
    "higher_order",
    "in_place_of",
    "inductor_prims",
    "is_absent",
    "is_collective",
    "is_mutable",
    "is_pointwise",
    "is_view",
    "is_wait",
    "named_arguments",
    "namespace",
    "overload",
    "overloads_of",
    "present",
    "prims",
    "schema_of",
    "without_wrapper",
    "written_argument",
]

_V = TypeVar("_V")

_absent: set[str] = set()


class AbsentOperatorError(NotImplementedError):
    """A call of an operator that the installed torch lacks."""


class AbsentOperator:
    """Stands for an operator, or an overload of one, that the installed torch lacks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def overloads(self) -> list[str]:
        """Return the names of its overloads: none."""
        return []

    def __getattr__(self, overload: str) -> AbsentOperator:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return AbsentOperator(f"{self._name}.{overload}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise AbsentOperatorError."""
        raise AbsentOperatorError(f"torch {torch.__version__} has no operator {self._name}")

    def __repr__(self) -> str:
        return f"<absent {self._name}>"


class _Packet:
    """torch's packet, to which it is equal, with an AbsentOperator for each overload that torch lacks."""

    def __init__(self, packet: OpOverloadPacket, name: str) -> None:
        self._packet = packet
        self._name = name

    def __getattr__(self, overload: str) -> Any:
        try:
            found = _look_up(f"{self._name}.{overload}", self._packet, overload)
        except AttributeError:
            if overload.startswith("__"):
                raise
            return _remember(f"{self._name}.{overload}")
        if isinstance(found, OpOverload):
            self.__dict__[overload] = found
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._packet(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._packet

    def __hash__(self) -> int:
        return hash(self._packet)

    def __repr__(self) -> str:
        return self._name


class _Namespace:
    """The operators of one library."""

    def __init__(self, name: str, source: Any) -> None:
        self._name = name
        self._source = source

    def __getattr__(self, name: str) -> Any:
        called = f"{self._name}.{name}"
        try:
            found = _look_up(called, self._source, name)
        except AttributeError:
            if name.startswith("__") and name not in vars(operator):  # no operator: Python asks for a special method
                raise
            return _remember(called)
        self.__dict__[name] = found = _Packet(found, called) if isinstance(found, OpOverloadPacket) else found
        return found


def _look_up(name: str, owner: Any, attribute: str) -> Any:
    """Return the attribute of torch's object, which in full is called `name`; AttributeError if torch lacks it."""
    return getattr(owner, attribute)


def _remember(name: str) -> AbsentOperator:
    _absent.add(name)
    return AbsentOperator(name)


def namespace(name: str) -> Any:
    """`torch.ops.<name>`, in which an operator that torch lacks is an AbsentOperator.

    Its packets are equal to torch's, have torch's own overloads and can be called; they are not torch's objects, so
    torch's functions are to be given overloads.
    """
    return _Namespace(name, getattr(torch.ops, name))


def overload(name: str) -> Any:
    """Return the overload of a name such as "aten.mul.Tensor"; AttributeError where torch has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def absent_operators() -> tuple[str, ...]:
    """Return the operators named so far that the installed torch lacks, sorted: "aten.cholesky", "aten.mul.New"."""
    return tuple(sorted(_absent))


def is_absent(overload: object) -> bool:
    """Check whether `overload` is a placeholder for one that the installed torch lacks."""
    return isinstance(overload, AbsentOperator)


def present(table: Mapping[Any, _V]) -> dict[Any, _V]:
    """Return the entries of a table by overload whose overload the installed torch has."""
    return {overload: value for overload, value in table.items() if not is_absent(overload)}


aten: Any = namespace("aten")
prims: Any = namespace("prims")
higher_order: Any = namespace("higher_order")

inductor_prims: Any = _Namespace("inductor_prims", private("torch._inductor.inductor_prims"))
"""Prims that Dynamo makes of some ATen calls: attributes are overloads. Without the module all of them are absent."""


# -- facts that operators give about themselves; as in all tested versions ------------------------------------------


def schema_of(overload: OpOverload) -> FunctionSchema:
    """Arguments, results and the arguments that are written to."""
    return overload._schema


def named_arguments(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; one that is not given has its default, or is left out."""
    arguments = schema_of(overload).arguments
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return defaults | dict(zip((one.name for one in arguments), args, strict=False)) | dict(kwargs)


def is_mutable(overload: OpOverload) -> bool:
    """Check whether the operator writes to an argument."""
    return schema_of(overload).is_mutable


def written_argument(overload: OpOverload) -> tuple[int, str] | None:
    """Return the index and name of the argument that the operator writes to and returns, if there is one."""
    schema = schema_of(overload)
    if len(schema.returns) != 1 or (result := schema.returns[0].alias_info) is None or not result.is_write:
        return None
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set == result.before_set:
            return index, argument.name
    return None


def is_pointwise(target: object) -> bool:
    """Check whether a node's target is an operator that torch tags as pointwise."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def is_view(target: object) -> bool:
    """Check whether a node's target is an operator that returns views of its first argument, or an item of it."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return not is_mutable(target) and any(one.alias_info is not None for one in schema_of(target).returns)


_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"})
"""Namespaces of torch.distributed's operators."""


def is_collective(target: object) -> bool:
    """Check whether a node's target is an operator that exchanges data with other processes."""
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def is_wait(node: Node) -> bool:
    """Check whether the node waits for a collective that an earlier node has started."""
    return isinstance(node.target, OpOverload) and str(node.target).endswith("c10d_functional.wait_tensor.default")


def in_place_of(overload: OpOverload) -> OpOverload | None:
    """Return the overload with the same arguments that writes its result over the first; None without one."""
    schema = schema_of(overload)
    library, _, operator_name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, library), f"{operator_name}_", None)
    found = getattr(packet, schema.overload_name or "default", None)
    if not isinstance(found, OpOverload) or not is_mutable(found):
        return None
    same = [one.name for one in schema_of(found).arguments] == [one.name for one in schema.arguments]
    return found if same else None


def can_decompose(overload: OpOverload) -> bool:
    """Check whether the operator is a composite one, which torch itself decomposes. Without an answer: no."""
    asked = getattr(overload, "_can_decompose", None)
    return asked is not None and bool(asked())


def overloads_of(packet: OpOverloadPacket) -> list[OpOverload]:
    """All overloads of an operator."""
    return [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]


def without_wrapper(overload: OpOverload) -> Callable[..., Any]:
    """Return the C++ function of an overload, if a call of the overload does nothing else; else the overload.

    torch 2.15 gives some overloads their own dispatcher in Python; these and subclasses give the overload.
    """
    plain = type(overload) is OpOverload and getattr(overload, "_pyobj_dispatcher", None) is None
    function: Callable[..., Any] = getattr(overload, "_op", overload) if plain else overload
    return function


def custom_name(given: object) -> str | None:
    """Name, as "namespace.operator", of a result of torch.library.custom_op; None for anything else.

    Without its class or its name, which only an error message needs, None as well.
    """
    kind = private("torch._library.custom_ops:CustomOpDef")
    name = getattr(given, "_qualname", None) if kind is not None and isinstance(given, kind) else None
    return None if name is None else name.replace("::", ".")


def all_overloads(library: str) -> Iterator[tuple[str, OpOverload]]:
    """(operator, overload) of all that the dispatcher knows in `library`; without its list, those torch.ops has met."""
    source = getattr(torch.ops, library)
    list_names = private("torch._C:_dispatch_get_all_op_names")
    names = list_names() if list_names is not None else [f"{library}::{packet}" for packet in dir(source)]
    for full in names:
        owner, _, rest = full.partition("::")
        packet, _, name = rest.partition(".")
        overload = getattr(getattr(source, packet, None), name or "default", None) if owner == library else None
        if isinstance(overload, OpOverload):
            yield packet, overload
