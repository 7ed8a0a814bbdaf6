"""Tries an overload on fake tensors: the dtypes of its lowering, and the overloads of its gradient.

Only overloads whose arguments can be made up from their schema are tried. Nothing is computed.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ort_dynamo.errors import LoweringError
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.lowering.kernel_dtypes import OTHER_ARGUMENTS
from ort_dynamo.lowering.translate import refusal
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.fakes import FAKE_TENSOR_LOG, FakeTensorMode
from ort_dynamo.torch_internals.kernels.dispatcher import TorchDispatchMode
from ort_dynamo.torch_internals.kernels.operators import OpOverload, schema_of
from ort_dynamo.torch_internals.pytree import tree_leaves, tree_map

__all__ = ["gradient_overloads", "taken_dtypes"]

_Shape = tuple[int, ...]

_SHAPES: tuple[_Shape, ...] = ((3, 3), (3, 3, 3), (2, 3, 4, 4), (2, 3, 4, 4, 4), (3,), ())
_INDICES = ("index", "indices", "batch1_idx")
_MASKS = ("mask", "condition")


def taken_dtypes(overload: OpOverload, targets: Sequence[Target]) -> list[frozenset[torch.dtype]] | None:
    """For each target, the dtypes of the tensor arguments with which it takes the overload; None if not tried."""
    shapes = _SHAPES
    taken: list[set[torch.dtype]] = [set() for _ in targets]
    with _quiet():
        for dtype in TORCH_TO_ONNX:
            shape, node = next(_nodes(overload, dtype, shapes), ((), None))
            if node is not None:
                shapes = (shape,)  # a shape that fits one dtype fits the others
                for target, found in zip(targets, taken, strict=True):
                    if _is_taken(node, target):
                        found.add(dtype)
    return list(map(frozenset, taken)) if shapes is not _SHAPES else None


def _is_taken(node: Node, target: Target) -> bool:
    try:
        return refusal(node, target) is None
    except LoweringError:
        return False  # made-up arguments may be such that eager refuses them: fake tensors check less


def gradient_overloads(overload: OpOverload) -> list[str] | None:
    """Give the overloads that torch's gradient formula calls; empty without a gradient, None where not tried."""
    for _, arguments in _arguments(overload, torch.float32, _SHAPES, requires_grad=True):
        leaves = [a for a in tree_leaves(arguments) if isinstance(a, torch.Tensor) and a.requires_grad]
        try:
            with _quiet():
                outputs = _differentiable(overload(*arguments))
        except Exception:  # made-up arguments that do not fit raise anything
            continue
        if not outputs:
            return []
        recorder = _Recorder()
        try:
            with recorder, _quiet():
                torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
        except Exception:  # made-up arguments that do not fit raise anything
            continue
        return recorder.called
    return None


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    return [o for o in tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's and numpy's reports of misfits, which are expected here."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in self.called:
            self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def _nodes(overload: OpOverload, dtype: torch.dtype, shapes: Sequence[_Shape]) -> Iterator[tuple[_Shape, Node]]:
    """For each shape of its tensor arguments that fits: it, and a node that calls the overload."""
    for shape, arguments in _arguments(overload, dtype, shapes):
        try:
            out = overload(*arguments)
        except Exception:  # made-up arguments that do not fit raise anything
            continue
        graph = Graph()

        def hand_over(value: Any, graph: Graph = graph) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            node = graph.placeholder(f"input_{len(graph.nodes)}")
            node.meta["val"] = value
            return node

        node = graph.call_function(overload, tree_map(hand_over, arguments))
        node.meta["val"] = out
        if isinstance(out, (tuple, list)):
            for index in range(len(out)):
                graph.call_function(operator.getitem, (node, index))
        yield shape, node


def _arguments(
    overload: OpOverload, dtype: torch.dtype, shapes: Sequence[_Shape], requires_grad: bool = False
) -> Iterator[tuple[_Shape, tuple[Any, ...]]]:
    """Made-up arguments, under the fake mode in which they are to be used."""
    given = schema_of(overload).arguments
    required = [a for a in given if not a.has_default_value() and not a.kwarg_only]
    if any(a.kwarg_only and not a.has_default_value() for a in given):
        return
    with FakeTensorMode():
        for shape in shapes:
            made = [
                _argument(a.name, str(a.type), shape, _dtype_of(overload, a.name, dtype), requires_grad)
                for a in required
            ]
            if not any(value is NotImplemented for value in made):
                yield shape, tuple(made)


def _dtype_of(overload: OpOverload, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an argument: `dtype`, or int64 or bool of one that has to be."""
    own = OTHER_ARGUMENTS.get(schema_of(overload).name.removeprefix("aten::"), {}).get(name)
    if name in _INDICES or own in ("l", "li", "lu"):
        return torch.int64
    return torch.bool if name in _MASKS else dtype


def _argument(name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Any:
    def tensor() -> torch.Tensor:
        if name == "boundaries":  # a sorted list
            return torch.zeros(shape[-1:], dtype=dtype)
        return torch.zeros(shape, dtype=dtype, requires_grad=requires_grad and dtype.is_floating_point)

    match kind:
        case "Tensor":
            return tensor()
        case "List[Tensor]":
            return [tensor(), tensor()]
        case "int" | "SymInt":
            return 0 if "dim" in name else 1
        case "float" | "number" | "Scalar":
            return 1
        case "bool":
            return False
        case "List[int]" | "List[SymInt]":
            return (
                list(shape) if name in ("size", "sizes", "input_sizes", "self_sizes") else [1] * max(len(shape) - 2, 1)
            )
        case _ if kind.startswith("Optional"):
            return None
    return NotImplemented
