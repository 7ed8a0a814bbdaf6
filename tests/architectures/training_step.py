"""A training step of a model, everything seen of it, and the verdict on two of them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ort_dynamo.testing import Tolerance, assert_close

__all__ = [
    *("Seen", "as_near_as_rounded_weights", "compare", "disturbed", "double", "evaluation", "training_step", "verdict"),
]

Seen = dict[str, torch.Tensor]

_RELATIVE = 1e-4
_FLOOR = 1e-5  # of the largest gradient: those that are zero but for rounding have nothing to compare with
_RATIO = 5.0


def training_step(model: torch.nn.Module, run: Callable[..., Any], inputs: Mapping[str, Any]) -> Seen:
    """Loss, outputs, gradients and buffers of one step; `run` is the model, or the model compiled."""
    _seed()
    model.zero_grad(set_to_none=True)
    output = run(**_copied(inputs))
    loss = _loss(output)
    loss.backward()  # type: ignore[no-untyped-call]
    seen = {"loss": loss.detach(), **_outputs(output)}
    seen |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return seen | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def evaluation(model: torch.nn.Module, run: Callable[..., Any], inputs: Mapping[str, Any]) -> Seen:
    """Outputs without gradients."""
    _seed()
    with torch.no_grad():
        return _outputs(run(**_copied(inputs)))


def compare(actual: Seen, expected: Seen) -> dict[str, str]:
    """Compare two steps: name of each tensor that differs -> how it differs."""
    found = dict.fromkeys(expected.keys() - actual.keys(), "is missing")
    largest = max((_size(value) for name, value in expected.items() if name.startswith("gradient")), default=0.0)
    for name in expected.keys() & actual.keys():
        floor = largest * _FLOOR if name.startswith("gradient") else 1e-6
        try:
            assert_close(actual[name], expected[name], name, Tolerance(_RELATIVE, floor), strides=False)
        except AssertionError as error:
            found[name] = str(error)
    return found


def verdict(actual: Seen, expected: Seen, exact: Callable[[], Seen]) -> tuple[str, dict[str, str]]:
    """Judge a step; give the verdict and the differences.

    Returns:
        "same"; "rounding" if each difference is nearly as close to the step in float64 as eager's float32 is;
        "undecided" if eager itself chooses otherwise in float64 (other key points, other boxes); "different".
    """
    found = compare(actual, expected)
    if not found:
        return "same", {}
    wide = exact()
    ours, eagers = distances(actual, wide), distances(expected, wide)
    if all(name in ours and ours[name] <= _RATIO * eagers[name] + 1e-6 for name in found):
        return "rounding", found
    chosen = [name for name, value in wide.items() if name.startswith("output") and _decides(expected.get(name), value)]
    return ("undecided" if chosen else "different"), found


def _decides(value: torch.Tensor | None, exact: torch.Tensor) -> bool:
    if value is None or value.shape != exact.shape:
        return True
    return not exact.is_floating_point() and not exact.is_complex() and not torch.equal(value, exact)


def distances(seen: Seen, exact: Seen) -> dict[str, float]:
    """Name -> greatest error, relative to the largest entry."""
    largest = max((_size(value) for name, value in exact.items() if name.startswith("gradient")), default=0.0)
    found = {}
    for name, value in exact.items():
        if name in seen and value.is_floating_point() and value.numel() and seen[name].shape == value.shape:
            error = (seen[name].double() - value).abs().max().item()
            scale = _size(value) + (largest * _FLOOR if name.startswith("gradient") else 1e-6)
            found[name] = error / scale if math.isfinite(error) else math.inf
    return found


def as_near_as_rounded_weights(actual: Seen, found: Iterable[str], exact: Seen, shaken: Iterable[Seen]) -> bool:
    """Check whether `found` is as close to the exact step as `shaken`, eager's steps with perturbed weights.

    Near a kink (ReLU at zero, the maximum of two nearly equal values) one rounding decides about a whole term of a
    gradient. There a step is right if it is as close as eager's with weights that differ by one rounding.
    """
    ours = distances(actual, exact)
    others = [distances(one, exact) for one in shaken]
    return all(name in ours and ours[name] <= _RATIO * max(o[name] for o in others) + 1e-6 for name in found)


def disturbed(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Copy the model and change its weights by about one rounding, relative 1e-7."""
    generator = torch.Generator().manual_seed(seed)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=generator))
    return changed


def double(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A copy of the model, and inputs, in float64."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(model).double()
    if isinstance(exact, PreTrainedModel):
        exact.set_experts_implementation("eager")  # torch's grouped product takes no float64
    return exact, wide


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def _copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _size(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)].abs() if value.is_floating_point() else value[:0]
    return finite.max().item() if finite.numel() else 0.0


def _loss(output: Any) -> torch.Tensor:
    """The model's own loss, or a sum of every output in which no two entries have the same part."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.sum()
    total = torch.zeros(())
    for leaf in _leaves(output):
        if leaf.is_floating_point() and leaf.requires_grad and leaf.numel():
            weight = torch.cos(torch.arange(leaf.numel(), dtype=torch.float64)).to(leaf.dtype).reshape(leaf.shape)
            total = total + torch.where(torch.isfinite(leaf), leaf * weight, 0).sum() / leaf.numel() ** 0.5
    return total


def _outputs(output: Any) -> Seen:
    return {f"output {index}": leaf.detach() for index, leaf in enumerate(_leaves(output))}


def _leaves(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [leaf for part in parts for leaf in _leaves(part)]
