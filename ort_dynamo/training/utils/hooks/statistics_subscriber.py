"""Writes statistics of activations and of their gradients to files, one for each tensor and step.

A tensor is shown to the subscriber by an operator that returns its input. It stands in the traced graph like any
other, so a model that is observed is compiled in one piece.
"""

from __future__ import annotations

import itertools
import math
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ort_dynamo.embedding import OBSERVERS
from ort_dynamo.training.utils.hooks.subscriber import RuntimeStates, SubscriberBase

__all__ = ["StatisticsSubscriber", "observe"]


class StatisticsSubscriber(SubscriberBase):
    """Summarises every module's results, and their gradients.

    In the folder of each step, `step_<n>`, a tensor has a file for the forward and one for the backward: shape, dtype,
    minimum, maximum, mean, standard deviation, how many elements are NaN, infinite, negative, positive and zero, and
    the first 128. `order.txt` has their names in the order in which they came. To put two runs side by side:
    `python -m ort_dynamo.training.utils.hooks.merge_activation_summary`.

    Args:
        output_dir: the folder; it must not exist, unless it may be overridden.
        start_step: the first step that is summarised.
        end_step: the first that is not any more.
        override_output_dir: remove a folder that is there.
        run_on_cpu: copy tensors to the CPU first, to need less of the device's memory.
        bucket_size: elements that are looked at in one go.

    Raises:
        FileExistsError: the folder exists.
    """

    def __init__(
        self,
        output_dir: str,
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 2**29,
    ) -> None:
        super().__init__(start_step, end_step)
        self._folder = Path(output_dir)
        self._run_on_cpu = run_on_cpu
        self._bucket_size = bucket_size
        self.states: RuntimeStates = RuntimeStates()
        self.number: int = next(_numbers)
        _subscribers[self.number] = self
        if self._folder.exists():
            if not override_output_dir:
                raise FileExistsError(
                    f"Output directory {output_dir} already exists. "
                    "Set override_output_dir=True for StatisticsSubscriber if this is the intention."
                )
            warnings.warn(f"Output directory {output_dir} already exists, overriding it.", UserWarning, stacklevel=2)
            shutil.rmtree(self._folder)

    def write(self, tensor: Tensor, name: str, depth: int, step: int, *, is_forward: bool) -> None:
        """Summarise one tensor; raises OSError."""
        if not self.is_active(step):
            return
        direction = "forward" if is_forward else "backward"
        name = _file_name(name)
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "order.txt").open("a", encoding="utf-8") as order:
            order.write(f"{name}_{direction}\n")
        summary = _summarised(tensor.cpu() if self._run_on_cpu else tensor, self._bucket_size)
        title = f"{'>' * max(0, depth)}{name} {direction} run"
        (folder / f"{name}_{direction}").write_text("\n".join([f"{title} {summary[0]}", *summary[1:], ""]))


_LONGEST = 150
"""Characters of the name of a module in the name of a file."""


def _file_name(name: str) -> str:
    """Return a name that stays in its folder: that of a class may be any text."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[-_LONGEST:]


_numbers = itertools.count()
_subscribers: WeakValueDictionary[int, StatisticsSubscriber] = WeakValueDictionary()


@dataclass
class _Statistics:
    """Statistics of the elements seen so far; the square sum is of deviations from the mean (Chan et al., 1979)."""

    count: int = 0
    mean: float = 0.0
    square_sum: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    nan: int = 0
    inf: int = 0
    negative: int = 0
    positive: int = 0
    zero: int = 0

    def add(self, bucket: Tensor) -> None:
        """Add some elements."""
        values = bucket.to(torch.float64 if bucket.dtype is torch.float64 else torch.float32)
        count = values.numel()
        mean = values.mean(dtype=torch.float64).item()
        deviation = (values - mean).square().sum(dtype=torch.float64).item()
        apart, total = mean - self.mean, self.count + count
        self.square_sum += deviation + apart**2 * self.count * count / total
        self.mean += apart * count / total
        self.count = total
        lowest, highest = values.min().item(), values.max().item()
        # A comparison with NaN is false; torch's extremes of a bucket with a NaN are NaN.
        self.smallest = lowest if math.isnan(lowest) else min(self.smallest, lowest)
        self.largest = highest if math.isnan(highest) else max(self.largest, highest)
        self.nan += int(values.isnan().sum())
        self.inf += int(values.isinf().sum())
        self.negative += int((values < 0).sum())
        self.positive += int((values > 0).sum())
        self.zero += int((values == 0).sum())

    @property
    def deviation(self) -> float:
        """The standard deviation of a sample: with one degree of freedom less than elements."""
        return math.sqrt(self.square_sum / (self.count - 1)) if self.count > 1 else math.nan


def _summarised(tensor: Tensor, bucket_size: int) -> list[str]:
    flat = tensor.detach().flatten()
    found = _Statistics()
    for bucket in _buckets(flat, bucket_size):
        found.add(bucket)
    numbers = " ".join(f"{value:.5g}" for value in flat[:128].tolist())
    return [
        f"shape: {tuple(tensor.shape)} dtype: {tensor.dtype} size: {flat.numel()}",
        f"min: {found.smallest:.6g} max: {found.largest:.6g}, mean: {found.mean:.6g}, std: {found.deviation:.6g}",
        f"nan: {found.nan}, inf: {found.inf}",
        f"samples(top 128): {numbers}",
        f"neg: {found.negative}, pos: {found.positive}, zero: {found.zero},",
        "=" * 16,
    ]


def _buckets(flat: Tensor, size: int) -> Iterator[Tensor]:
    for begin in range(0, flat.numel(), size):
        yield flat[begin : begin + size]


def observe(tensor: Tensor, name: str, depth: int, subscriber: StatisticsSubscriber) -> Tensor:
    """Show a tensor, and where it has one its gradient, to a subscriber; the returned tensor takes its place."""
    seen, _ = _activation(tensor, name, depth, subscriber.number)
    return seen


@torch.library.custom_op(f"{OBSERVERS}::activation", mutates_args=())
def _activation(tensor: Tensor, name: str, depth: int, subscriber: int) -> tuple[Tensor, Tensor]:
    """Show an activation; the second result is the step, for the gradient."""
    found = _subscribers.get(subscriber)
    step = 0 if found is None else found.states.global_states.execution_step
    if found is not None:
        found.write(tensor, name, depth, step, is_forward=True)
    return tensor.clone(), torch.tensor(step)


@_activation.register_fake
def _(tensor: Tensor, name: str, depth: int, subscriber: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(f"{OBSERVERS}::gradient", mutates_args=())
def _gradient(gradient: Tensor, step: Tensor, name: str, depth: int, subscriber: int) -> Tensor:
    """Show the gradient of an activation."""
    found = _subscribers.get(subscriber)
    if found is not None:
        found.write(gradient, name, depth, int(step), is_forward=False)
    return gradient.clone()


@_gradient.register_fake
def _(gradient: Tensor, step: Tensor, name: str, depth: int, subscriber: int) -> Tensor:
    return torch.empty_like(gradient)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, ctx.name, ctx.depth, ctx.subscriber = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    return _gradient(gradient, *ctx.saved_tensors, ctx.name, ctx.depth, ctx.subscriber), None, None, None


_activation.register_autograd(_backward, setup_context=_set_up)
