"""Operators of ONNX as functions on torch's tensors, found by domain, name and version.

The graph is checked against a function's signature: positional parameters are the node's inputs, in order,
keyword-only ones its attributes, both with the type that is needed; a parameter without a default has to be there.
"""

from __future__ import annotations

import bisect
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Host

__all__ = ["GIVEN", "MICROSOFT", "InputKind", "Operator", "find_operator", "known_operators", "onnx_operator"]

MICROSOFT = "com.microsoft"

GIVEN = frozenset({"device", "training", "outputs", "in_place"})
"""Keyword-only parameters that are no attributes: the device of tensors without a tensor input, whether the module is
in train mode, how many outputs the node names, and whether all its statistics are initializers of the model."""

_F = TypeVar("_F", bound=Callable[..., Any])


class InputKind(enum.Enum):
    """The kinds of a function's inputs: a tensor; a tensor or Host; the same as a setting; a statistic; a list."""

    TENSOR = enum.auto()
    VALUE = enum.auto()
    SETTING = enum.auto()
    STATISTIC = enum.auto()
    SEQUENCE = enum.auto()


@dataclass(frozen=True)
class Operator:
    """A function with the facts of its signature.

    Attributes:
        function: a function with inputs by position, and attributes and some of `GIVEN` by keyword.
        inputs: the kinds of the inputs.
        required: the number of required inputs.
        variadic: the kind of further inputs, if there may be any.
        attributes: the types of the attributes.
        needed: the required attributes.
        given: the keywords of `GIVEN` that it takes.
        host: whether it can return a Host for Hosts.
        several: whether it returns a tuple, one value per output.
    """

    function: Callable[..., Any]
    inputs: tuple[InputKind, ...]
    required: int
    variadic: InputKind | None
    attributes: Mapping[str, Any]
    needed: frozenset[str]
    given: frozenset[str]
    host: bool
    several: bool


_OPERATORS: dict[tuple[str, str], list[tuple[int, Operator]]] = {}


def onnx_operator(name: str, since: int = 1, domain: str = "") -> Callable[[_F], _F]:
    """Register the function that computes an operator from a version of its domain on; gives the function back."""

    def register(function: _F) -> _F:
        versions = _OPERATORS.setdefault((domain, name), [])
        if any(version == since for version, _ in versions):
            raise ValueError(f"{domain}::{name} of version {since} is registered twice")
        bisect.insort(versions, (since, _read_signature(function)), key=lambda entry: entry[0])
        return function

    return register


def find_operator(domain: str, name: str, version: int) -> Operator | None:
    """Return the operator that a domain of this version means by a name."""
    found = [one for since, one in _OPERATORS.get((domain, name), []) if since <= version]
    return found[-1] if found else None


def known_operators() -> dict[tuple[str, str], list[int]]:
    """Return the versions from which on each operator is registered."""
    return {key: [since for since, _ in versions] for key, versions in _OPERATORS.items()}


def _read_signature(function: Callable[..., Any]) -> Operator:
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    inputs = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    attributes = [p for p in keywords if p.name not in GIVEN]
    result = hints["return"]
    parts = typing.get_args(result) if typing.get_origin(result) is tuple else (result,)
    return Operator(
        function=function,
        inputs=tuple(_kind(hints[p.name]) for p in inputs),
        required=sum(p.default is p.empty for p in inputs),
        variadic=_kind(hints[variadic[0].name]) if variadic else None,
        attributes={p.name: _plain(hints[p.name]) for p in attributes},
        needed=frozenset(p.name for p in attributes if p.default is p.empty),
        given=frozenset(p.name for p in keywords) & GIVEN,
        host=any(Host in _alternatives(part) for part in parts),
        several=typing.get_origin(result) is tuple,
    )


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(one for part in typing.get_args(hint) for one in _alternatives(part))
    return (hint,)


def _plain(hint: Any) -> Any:
    """Return an attribute's type without None."""
    (found,) = [part for part in _alternatives(hint) if part is not type(None)]
    return found


def _kind(hint: Any) -> InputKind:
    found = [part for part in _alternatives(hint) if part is not type(None)]
    for part in found:
        if typing.get_origin(part) is typing.Annotated:
            return InputKind[typing.get_args(part)[1].upper()]
        if typing.get_origin(part) is list:
            return InputKind.SEQUENCE
    if Host in found:
        return InputKind.VALUE
    if found != [Tensor] and found != [torch.Tensor]:
        raise TypeError(f"an input cannot be {hint}")
    return InputKind.TENSOR
