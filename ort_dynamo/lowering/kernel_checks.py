"""Leave to torch the calls that its kernels refuse, or may refuse, for dtypes, a dimension or sizes.

Most kernels make checks that fake tensors do not make: a lowering or a decomposition would compute such a call without
a word, or would fail in words of its own. So torch runs the operator, which computes or raises eager's own error. It
also runs a mix of dtypes for which `kernel_dtypes.py` has no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from ort_dynamo.lowering.kernel_dtypes import (
    FLOAT32_BESIDE_HALVES,
    LETTERS,
    MIXING,
    OTHER_ARGUMENTS,
    PROMOTING,
    TAKEN,
    UNKNOWN,
)
from ort_dynamo.torch_internals.kernels.operators import OpOverload, schema_of
from ort_dynamo.torch_internals.kernels.promotion import KIND, elementwise_dtypes

__all__ = ["calls_for_entries", "left_to_torch", "node_left_to_torch"]

_V = TypeVar("_V")
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat)

_DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "axis", "axes"})
"""Names of arguments that hold dimensions."""

_ONE_MORE = frozenset({"diag_embed", "stack", "unsqueeze", "unsqueeze_copy"})
"""Operators whose dimensions are those of a result that has one more than the argument."""

_SIZES = frozenset({"input_sizes", "self_sizes", "sizes"})
"""Names of arguments that hold the sizes of a tensor that has those dimensions."""

_REPEATING = frozenset({"roll"})
"""Operators that take a dimension twice."""

_OPERANDS = frozenset({"exponent", "other", "self"})
"""Names of arguments in which a scalar takes part in a promotion."""

_OVER_LISTS = "aten._foreach_"
"""The beginning of the names of operators that call another one for each entry of their lists."""

_BY_SLICES = frozenset({"index_add", "index_reduce"})
"""Operators whose `source` has the slices of `self`, which their kernels check and fake tensors do not."""


def node_left_to_torch(node: Node) -> str | None:
    """Return the reason to leave the call of `node` to torch, or None.

    A node that a decomposition made is not checked, unless it is a call for an entry of a list: eager runs the operator
    that was decomposed.
    """
    if not isinstance(node.target, OpOverload):
        return None
    decomposed = node.meta.get("original_aten") or node.target
    if str(decomposed) != str(node.target) and not calls_for_entries(decomposed):  # a copied meta has a copy
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    return left_to_torch(node.target, args, kwargs)


def calls_for_entries(overload: OpOverload) -> bool:
    """Check whether eager, too, computes an operator by calling another one for each entry of its lists."""
    return str(overload).startswith(_OVER_LISTS)


def left_to_torch(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason to leave a call of an ATen operator to torch's kernel, or None.

    Args:
        overload: any operator; there are rules for those of ATen.
        args, kwargs: its arguments; tensors are real or fake.
    """
    schema = schema_of(overload)
    name = schema.name.removeprefix("aten::")
    full = f"{name}.{schema.overload_name or 'default'}"
    if overload.namespace != "aten" or full.startswith(UNKNOWN):
        return None
    names = [argument.name for argument in schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    full = _kernel_of_its_own(name, arguments) or full
    wrong = _wrong_dimension(name, arguments) or _other_slices(name, arguments)
    return wrong or _Dtypes(name, full, arguments).refusal()


def _kernel_of_its_own(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the name in the tables of a form of the operator with a kernel of its own, or with rules of its own."""
    if arguments.get("transposed") is True:
        return f"{name}.transposed"
    if name == "convolution" and any(one != 1 for one in arguments["dilation"]):
        return f"{name}.dilated"
    return f"{name}.cast" if isinstance(arguments.get("dtype"), torch.dtype) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for one in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, torch.Tensor):
            yield one


# -- dimensions ----------------------------------------------------------------------------------------------------


def _wrong_dimension(name: str, arguments: Mapping[str, Any]) -> str | None:
    given = [value for argument, value in arguments.items() if argument in _DIMENSIONS]
    if not given:
        return None
    ranks = [tensor.dim() for value in arguments.values() for tensor in _tensors(value)]
    ranks += [len(value) for argument, value in arguments.items() if argument in _SIZES and isinstance(value, list)]
    rank = max(1, *ranks, 1) if name not in _ONE_MORE else 1 + max(0, *ranks, 0)
    for value in given:
        dims = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if type(one) is int]
        for dim in dims:
            if not -rank <= dim < rank:
                return f"dimension {dim} is out of range, which torch's kernel reports"
        if len({dim % rank for dim in dims}) < len(dims) and name not in _REPEATING:
            return "a dimension is given twice, which only torch's kernels check"
    return None


def _other_slices(name: str, arguments: Mapping[str, Any]) -> str | None:
    if name not in _BY_SLICES:
        return None
    sizes, given = (list(arguments[one].shape) for one in ("self", "source"))
    if not sizes or not given:
        return None
    slices = (_without(one, arguments["dim"]) for one in (sizes, given))
    known = (both for both in zip(*slices, strict=False) if type(both[0]) is type(both[1]) is int)
    if len(sizes) == len(given) and all(one == other for one, other in known):
        return None
    return "the source does not have the tensor's slices, which torch's kernel reports"


def _without(sizes: Sequence[Any], dim: int) -> list[Any]:
    return [size for place, size in enumerate(sizes) if place != dim % len(sizes)]


# -- dtypes --------------------------------------------------------------------------------------------------------


class _Dtypes:
    """The dtypes of one call.

    Args:
        name: the name of the operator.
        full: its name with the overload.
        arguments: the arguments, by name.
    """

    def __init__(self, name: str, full: str, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._full = full
        self._arguments = arguments
        found = {argument: list(_tensors(value)) for argument, value in arguments.items()}
        self._tensors = {argument: tensors for argument, tensors in found.items() if tensors}

    def refusal(self) -> str | None:
        """Return the reason to leave the call to torch's kernel, or None."""
        every = [tensor for tensors in self._tensors.values() for tensor in tensors]
        dtypes = self._dtypes()
        if not dtypes or not dtypes <= LETTERS.keys():
            return None
        others = self._rule(OTHER_ARGUMENTS) or {}
        operands = {argument: tensors for argument, tensors in self._tensors.items() if argument not in others}
        for argument, tensors in self._tensors.items():
            if argument in others and not _letters(tensors) <= set(others[argument]):
                return self._says("are not those of its kernel")
        used = self._computed_in(operands)
        if used is None:
            return self._says("are mixed, which only torch's kernels check")
        if any(isinstance(value, complex) for value in self._arguments.values()):
            return self._says("are real, and a number is complex")
        taken = self._rule(TAKEN)
        on_cuda = any(tensor.device.type == "cuda" for tensor in every)  # its kernels take more
        if taken is None or on_cuda or used <= set(taken):
            return None
        return self._says("are not those of its kernel")

    def _computed_in(self, operands: Mapping[str, list[torch.Tensor]]) -> set[str] | None:
        """Return the dtypes that a kernel has to take; None where it may not take the mix."""
        used = set().union(*map(_letters, operands.values()))
        if isinstance(cast := self._arguments.get("dtype"), torch.dtype) and len(used) < 2:
            return {LETTERS[cast]} if cast in LETTERS else set()
        if self._name in PROMOTING:
            return self._promoted(operands)
        if len(used) < 2 or self._name in MIXING:
            return used
        wide = self._rule(FLOAT32_BESIDE_HALVES) or ()
        narrow = set().union(*(_letters(tensors) for name, tensors in operands.items() if name not in wide))
        others = set().union(*(_letters(tensors) for name, tensors in operands.items() if name in wide))
        return set() if narrow in ({"h"}, {"b"}) and others == {"f"} else None

    def _promoted(self, operands: Mapping[str, list[torch.Tensor]]) -> set[str]:
        """Return the promoted dtype of the operands, including scalars that are passed as operands."""
        numbers = [
            value for name, value in self._arguments.items() if name in _OPERANDS and isinstance(value, _NUMBERS)
        ]
        every = [tensor for tensors in operands.values() for tensor in tensors]
        _, dtype = elementwise_dtypes(*every, *numbers, type_promotion_kind=KIND.NO_OPMATH)
        return {LETTERS[dtype]} if dtype in LETTERS else set()

    def _rule(self, table: Mapping[str, _V]) -> _V | None:
        return table.get(self._full, table.get(self._name))

    def _dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the tensors or, of a call that makes one from numbers, the dtype that it names."""
        seen = {tensor.dtype for tensors in self._tensors.values() for tensor in tensors}
        named = self._arguments.get("dtype")
        return seen if seen or not isinstance(named, torch.dtype) else {named}

    def _says(self, what: str) -> str:
        seen = sorted(str(dtype).removeprefix("torch.") for dtype in self._dtypes())
        return f"its dtypes ({', '.join(seen)}) {what}"


def _letters(tensors: Sequence[torch.Tensor]) -> set[str]:
    return {LETTERS[tensor.dtype] for tensor in tensors}
