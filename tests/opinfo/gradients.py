"""Gradients of compiled functions against finite differences in float64, for samples of PyTorch's operator database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from opinfo_samples import operators, quiet
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import gradcheck
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ort_dynamo.testing import copied

__all__ = ["Calls", "Case", "cases_of", "check_gradients", "differentiable", "small_case", "with_work"]

FEWEST, MOST = 6, 80
"""A small sample has FEWEST elements that vary; up to MOST, with the results', all entries of the Jacobian are checked.

Of larger samples a random product with the Jacobian is checked, which gradcheck calls its fast mode.
"""


@dataclass(frozen=True)
class Case:
    """A function with arguments, of which the tensors that require gradients vary.

    Attributes:
        function: the function to compile.
        arguments: its arguments.
        elements: the elements of the tensors that vary, and of the results.
        overloads: the ATen overloads that eager calls, forward and backward.
        call: calls the compiled function with arguments that vary freely, and picks results that have gradients.
        noise: the difference that two runs of the backward may have.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    elements: tuple[int, int] = (0, 0)
    overloads: frozenset[str] = frozenset()
    call: Callable[..., Any] = lambda function, *arguments: function(*arguments)
    noise: float = 0.0


def differentiable() -> list[str]:
    """List the operators of the database that have gradients in float64 on the CPU."""
    return [
        name
        for name, op in operators().items()
        if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")
    ]


def check_gradients(case: Case, compile_: Callable[..., Any] | None = None) -> set[str]:
    """Compare all gradients with finite differences, and give the overloads that ran in ONNX Runtime.

    Args:
        case: the function and its arguments.
        compile_: compiles the function; None for the backend.

    Raises:
        GradcheckError: they differ.
    """
    counters.clear()
    torch._dynamo.reset()
    compiled = compile_(case.function) if compile_ else torch.compile(case.function, backend="ort_train", dynamic=False)
    leaves, spec = tree_flatten(case.arguments)
    varied = [index for index, leaf in enumerate(leaves) if varies(leaf)]

    def call(*inputs: Tensor) -> Any:
        given = dict(zip(varied, inputs, strict=True))
        torch.manual_seed(0)  # masks of dropout are the same in each call
        return case.call(compiled, *tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], spec))

    inputs = tuple(copied(leaves[index]) for index in varied)
    with quiet():
        gradcheck(call, inputs, check_grad_dtypes=True, nondet_tol=case.noise, fast_mode=sum(case.elements) > MOST)
    return set(counters["ort_train_native"])


def varies(leaf: Any) -> bool:
    """Check for a tensor whose gradient is asked for."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def small_case(name: str, overload: str | None = None) -> Case | None:
    """Give the smallest sample of an operator with FEWEST elements, or the largest of those with fewer.

    Args:
        name: the operator.
        overload: an overload that the sample has to call in eager.
    """
    found = [case for case in cases_of(name) if overload is None or overload in case.overloads]
    enough = [case for case in found if case.elements[0] >= FEWEST]
    if enough:
        return min(enough, key=lambda case: sum(case.elements))
    return max(found, key=lambda case: sum(case.elements), default=None)


def cases_of(name: str) -> Iterator[Case]:
    """Give the samples of an operator that have a gradient with elements, in float64."""
    op = operators()[name]
    torch.manual_seed(0)
    with quiet():
        for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
            case = _case(op, sample)
            if all(case.elements):
                yield case


def _case(op: OpInfo, sample: SampleInput) -> Case:
    # Some wrappers make an argument one that the operator takes, such as a triangular matrix; another sets the seed.
    wrapper = None if "set_seed" in getattr(op.gradcheck_wrapper, "__name__", "") else op.gradcheck_wrapper

    def call(function: Callable[..., Any], value: Any, args: Any, kwargs: Any) -> Any:
        results = wrapper(function, value, *args, **kwargs) if wrapper else function(value, *args, **kwargs)
        return sample.output_process_fn_grad(results) if sample.output_process_fn_grad else results

    arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
    varied = [leaf for leaf in tree_leaves(arguments) if varies(leaf)]
    with Calls() as calls:
        results = [one for one in tree_leaves(call(op.op, *arguments)) if varies(one)]
        if varied and results:
            torch.autograd.grad(results, varied, [torch.ones_like(one) for one in results], allow_unused=True)
    elements = (sum(one.numel() for one in varied), sum(one.numel() for one in results))
    overloads = frozenset(map(str, calls.overloads))
    return Case(with_work(op.op), arguments, elements, overloads, call, op.gradcheck_nondet_tol)


def with_work(function: Callable[..., Any]) -> Callable[..., Any]:
    """Multiply the results of a function, since torch computes a graph of views alone."""

    @wraps(function)
    def worked(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda one: one * 0.75 if varies(one) else one, function(*args, **kwargs))

    return worked


class Calls(TorchDispatchMode):
    """Keeps the overloads that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.overloads: set[Any] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.overloads.add(function)
        return function(*args, **(kwargs or {}))
