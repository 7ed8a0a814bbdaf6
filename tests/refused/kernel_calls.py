"""Calls of kernels in every dtype and in mixes of two, and whether the rules of lowering/kernel_dtypes.py agree."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ort_dynamo.capture.decompositions.table import decompositions
from ort_dynamo.lowering.kernel_checks import left_to_torch
from ort_dynamo.lowering.kernel_dtypes import LETTERS

__all__ = ["Call", "calls_of", "disagreements"]

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An overload, its arguments, its keywords."""

DTYPES = {letter: dtype for dtype, letter in LETTERS.items()}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

OF_VALUES = re.compile(
    "ZeroDivision|alpha must not be|beta must not be|cannot be converted to type .* without overflow|unsigned type with"
    "|shape of the mask|negative powers|out of (bounds|range)|non-zero|at least one|out of bound|singular|not positive"
    "|primitive|monotonically|Lengths|positive-definite|no elements|does not contain"
)
"""Patterns in errors about values and sizes, which a change of dtype can bring about."""


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._calls.append((func, *tree_map(_copied, (tuple(args), dict(kwargs)))))
        return func(*args, **kwargs)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def calls_of(function: Callable[..., Any], *arguments: Any) -> list[Call]:
    """The functional calls of ATen that a call and its backward make, one of each overload and form of arguments.

    Those that read a tensor without elements, or one that is neither strided nor of a dtype with rules, are left out:
    many kernels check nothing there.
    """
    calls: list[Call] = []
    with _Recorder(calls):
        outputs = [one for one in tree_leaves(function(*arguments)) if isinstance(one, torch.Tensor)]
        differentiable = [one for one in outputs if one.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(one) for one in differentiable])
    return list({_form(call): call for call in calls if _is_wanted(call)}.values())


def _form(call: Call) -> Any:
    overload, args, _ = call
    return str(overload), tuple(len(one) if isinstance(one, list) else one is None for one in args)


def _is_wanted(call: Call) -> bool:
    overload, args, kwargs = call
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    return (
        overload.namespace == "aten"
        and not overload._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in overload.tags
        and bool(tensors)
        and all(0 < one.numel() < 500 and one.layout is torch.strided and one.dtype in LETTERS for one in tensors)
    )


def disagreements(call: Call) -> Iterator[str]:
    """List the disagreements of a kernel and the rules about a dtype, or a mix of two.

    Either the kernel accepts a call that the rules leave to torch. Or it raises, but neither the rules nor fake tensors
    refuse the call. Or, in a call that is not left to torch, its dtype differs from the decomposition or fake tensor.
    """
    overload, args, kwargs = call
    names = [argument.name for argument in overload._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for dtypes in _variants(given):
        arguments = {**given, **{name: _cast(given[name], DTYPES[letter]) for name, letter in dtypes.items()}}
        left = left_to_torch(overload, (), arguments) is not None
        theirs = _outcome(overload, arguments)
        said = f"{overload} of {dtypes}"
        if left:
            if not isinstance(theirs, Exception):
                yield f"{said}: left to torch, which takes it"
        elif not isinstance(theirs, Exception):
            ours = _traced(overload, arguments)
            if not isinstance(ours, Exception) and ours != theirs:  # errors of fake tensors are torch's own
                yield f"{said}: {ours}, and the kernel gives {theirs}"
        elif not OF_VALUES.search(str(theirs)) and not isinstance(_traced(overload, arguments), Exception):
            yield f"{said}: {type(theirs).__name__}: {str(theirs).splitlines()[0][:150]}"


def _outcome(function: Any, arguments: Mapping[str, Any]) -> list[torch.dtype] | Exception:
    """The dtypes that a call gives, or its error."""
    try:
        return [one.dtype for one in tree_leaves(function(**arguments)) if isinstance(one, torch.Tensor)]
    except Exception as error:
        return error


def _traced(overload: Any, arguments: Mapping[str, Any]) -> list[torch.dtype] | Exception:
    """Dtypes that AOTAutograd's tracing of a call gives: our decomposition, or the overload, of fake tensors."""
    decomposition = decompositions().get(overload)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree_map(lambda one: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one, dict(arguments))
        if decomposition is not None:
            names = [one.name for one in overload._schema.arguments if not one.kwarg_only and one.name in fakes]
            keywords = {name: value for name, value in fakes.items() if name not in names}
            try:
                result = decomposition(*(fakes[name] for name in names), **keywords)
            except Exception as error:
                return error
            if result is not NotImplemented:
                return [one.dtype for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        return _outcome(overload, fakes)


def _variants(given: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Letters by argument: every dtype of all operands, pairs in two groups of them, every dtype of each other one."""
    tensors = {
        name: value for name, value in given.items() if any(isinstance(one, torch.Tensor) for one in tree_leaves(value))
    }
    floats = [name for name, value in tensors.items() if _first(value).dtype in FLOATS]
    operands = floats or list(tensors)
    for group in itertools.product((False, True), repeat=len(operands) - 1):
        for one, other in itertools.product(DTYPES, repeat=2):
            if any(group) != (one != other):
                continue
            if len(operands) > 4 and one != other and sum(group) != 1 and {one, other} != {"h", "f"}:
                continue
            yield dict(zip(operands, (one, *(other if second else one for second in group)), strict=True))
    for name in tensors:
        if name not in operands:
            for letter in DTYPES:
                yield {name: letter}


def _first(value: Any) -> torch.Tensor:
    return next(one for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda one: one.to(dtype, copy=True) if isinstance(one, torch.Tensor) else one, value)
