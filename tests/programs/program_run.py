"""Runs a program, in eager or compiled, and writes down everything observable of the run."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from program_text import PREAMBLE, Program
from torch import Tensor, nn

__all__ = ["Observed", "Raised", "observe"]

Compile = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Raised:
    """An exception of a run, and where it came from: "forward", "write" or "backward"."""

    stage: str
    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__} in the {self.stage}: {self.error}"


@dataclass
class Observed:
    """A run: numbers, which are compared by a tolerance, and facts, which must be equal."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    raised: Raised | None = None


def observe(
    program: Program,
    batches: Sequence[int],
    *,
    gradients: bool,
    compile_: Compile = lambda module: module,
    dtype: torch.dtype | None = None,
    shaken: float = 0.0,
    everything: bool = False,
) -> Observed:
    """Make the program's module and call it once for each batch.

    Args:
        batches: the batch size of each call.
        gradients: run the backward, too; otherwise the calls are under no_grad.
        compile_: makes the callable from the module.
        dtype: of parameters, buffers and inputs instead of the program's; their values are the same for each.
        shaken: the relative size of noise on all of them.
        everything: end after the first forward, and observe all values by their names in the text.

    Returns:
        The observations until the first exception.
    """
    observed = Observed()
    stage = ["forward"]
    dtype = dtype or getattr(torch, program.dtype)
    with _quiet(), _default_dtype(dtype):
        try:
            _observe(program, batches, gradients, compile_, dtype, shaken, observed, stage, everything)
        except Exception as error:
            observed.raised = Raised(stage[0], error.with_traceback(None))
    return observed


def _observe(
    program: Program,
    batches: Sequence[int],
    gradients: bool,
    compile_: Compile,
    dtype: torch.dtype,
    shaken: float,
    observed: Observed,
    stage: list[str],
    everything: bool,
) -> None:
    scope: dict[str, Any] = {}
    exec(PREAMBLE + program.source(everything), scope)
    noise = torch.Generator().manual_seed(99)
    module = _make(scope["make"], dtype, shaken, noise)
    run = compile_(module)
    kept: dict[str, Tensor] = {}
    for call, batch in enumerate(batches):
        stage[0] = "forward"
        torch.manual_seed(call)
        leaves = [_converted(leaf, dtype, shaken, noise) for leaf in _in_float32(scope["inputs"], batch)]
        before = [parameter.detach().clone() for parameter in module.parameters()]
        arguments = scope["arguments"](*leaves)
        torch.manual_seed(call)
        with nullcontext() if gradients else torch.no_grad():
            results = run(*arguments)
            if everything:
                observed.tensors = {name: value for name, value in results[0].items() if isinstance(value, Tensor)}
                return
            _note_results(f"call {call}: ", results, arguments, module, observed)
            stage[0] = "write"
            scope["after"](results)
        if gradients:
            stage[0] = "backward"
            total = scope["loss"](results)
            if isinstance(total, Tensor) and total.requires_grad:
                scope["backward"](total)
        _note_final_state(f"call {call}: ", results, leaves, arguments, module, before, observed)
        kept |= {f"call {call}: result {index}": result for index, result in enumerate(results)}
        kept |= {
            f"call {call}: gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None
        }
        module.zero_grad(set_to_none=True)
    for name, tensor in kept.items():
        observed.tensors[f"{name} after all calls"] = tensor.detach().clone()


def _note_results(
    call: str, results: Sequence[Tensor], arguments: Sequence[Tensor], module: nn.Module, observed: Observed
) -> None:
    observed.facts[f"{call}number of results"] = len(results)
    for index, result in enumerate(results):
        name = f"{call}result {index}"
        observed.tensors[name] = result.detach().clone()
        observed.facts |= _layout(name, result)
        observed.facts[f"{name}, requires_grad"] = result.requires_grad
        observed.facts[f"{name}, is_leaf"] = result.is_leaf
        observed.facts[f"{name}, _is_view"] = result._is_view()
    named = [(f"result {index}", result) for index, result in enumerate(results)]
    observed.facts[f"{call}identity"] = _partition(named, id)
    named += [(f"argument {index}", argument) for index, argument in enumerate(arguments)]
    named += [*module.named_parameters(), *module.named_buffers()]
    observed.facts[f"{call}memory"] = _partition(named, lambda tensor: tensor.untyped_storage()._cdata)


def _note_final_state(
    call: str,
    results: Sequence[Tensor],
    leaves: Sequence[Tensor],
    arguments: Sequence[Tensor],
    module: nn.Module,
    before: Sequence[Tensor],
    observed: Observed,
) -> None:
    observed.facts[f"{call}random state"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]
    for index, result in enumerate(results):
        observed.tensors[f"{call}result {index} at the end"] = result.detach().clone()
    for index, argument in enumerate(arguments):
        observed.tensors[f"{call}argument {index} at the end"] = argument.detach().clone()
    for name, buffer in module.named_buffers():
        observed.tensors[f"{call}buffer {name} at the end"] = buffer.detach().clone()
    for (name, parameter), old in zip(module.named_parameters(), before, strict=True):
        observed.facts[f"{call}parameter {name}, is as it was"] = torch.equal(parameter, old)
    differentiable = [(f"input {index}", leaf) for index, leaf in enumerate(leaves)] + [*module.named_parameters()]
    gradients = [(name, leaf.grad) for name, leaf in differentiable]
    for name, gradient in gradients:
        observed.facts[f"{call}gradient of {name}, exists"] = gradient is not None
        if gradient is not None:
            observed.tensors[f"{call}gradient of {name}"] = gradient.detach().clone()
            observed.facts |= _layout(f"{call}gradient of {name}", gradient)
    shown = [(name, gradient) for name, gradient in gradients if gradient is not None]
    shown += [(f"result {index}", result) for index, result in enumerate(results)]
    observed.facts[f"{call}memory of gradients"] = _partition(shown, lambda tensor: tensor.untyped_storage()._cdata)


def _layout(name: str, tensor: Tensor) -> dict[str, Any]:
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return {
        f"{name}, dtype": tensor.dtype,
        f"{name}, shape": tuple(tensor.shape),
        f"{name}, strides": strides if tensor.numel() else (),
    }


def _partition(named: Sequence[tuple[str, Tensor]], key: Callable[[Tensor], Any]) -> list[list[str]]:
    """Return the groups of names, of more than one, whose tensors have one key."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(key(tensor), []).append(name)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _make(make: Callable[[], nn.Module], dtype: torch.dtype, shaken: float, noise: torch.Generator) -> nn.Module:
    """Make the module with numbers that no initialization makes equal: of norms and of their statistics, too."""
    with _default_dtype(torch.float32), torch.no_grad():
        torch.manual_seed(1)
        module = make()
        for parameter in module.parameters():
            parameter.mul_(2 if parameter.dim() > 1 else 1).add_(torch.randn(parameter.shape), alpha=0.1)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape) + 0.5)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(_shake(parameter, shaken, noise))
    return module


def _in_float32(inputs: Callable[[int], Sequence[Tensor]], batch: int) -> Sequence[Tensor]:
    with _default_dtype(torch.float32):
        return inputs(batch)


def _converted(leaf: Tensor, dtype: torch.dtype, shaken: float, noise: torch.Generator) -> Tensor:
    if not leaf.is_floating_point() or (dtype is leaf.dtype and not shaken):
        return leaf
    return _shake(leaf.detach().to(dtype), shaken, noise).requires_grad_(leaf.requires_grad)


def _shake(tensor: Tensor, shaken: float, noise: torch.Generator) -> Tensor:
    if not shaken:
        return tensor
    return tensor * (1 + shaken * torch.randn(tensor.shape, generator=noise, dtype=torch.float64).to(tensor.dtype))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
