"""Modules for If, Loop and Scan: Python reads the condition and decides; autograd follows.

A condition or an iteration count that is known while Dynamo traces causes no graph break. One that is computed from
data does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ort_dynamo.onnx_module.host_values import Host, Value, as_tensor, flag, integer

__all__ = ["IfNode", "LoopNode", "ScanNode"]

_Like: TypeAlias = tuple[torch.dtype, tuple[int, ...]] | None


class IfNode(nn.Module):
    """Run one of two graphs.

    Args:
        then_branch: called with the model and the values that it reads from outside.
        else_branch: the same.
    """

    def __init__(self, then_branch: nn.Module, else_branch: nn.Module) -> None:
        super().__init__()
        self.then_branch = then_branch
        self.else_branch = else_branch

    def forward(
        self, root: nn.Module, condition: Value, for_then: Sequence[Any], for_else: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the outputs of the graph that ran."""
        if flag(condition):
            return self.then_branch(root, *for_then)
        return self.else_branch(root, *for_else)


class LoopNode(nn.Module):
    """Run a graph in a loop.

    Args:
        body: called with the model, the iteration, the condition, the carried values and the values that it reads from
            outside; returns the condition, the carried values, and values to be stacked.
        carried: the number of carried values.
        empty: the dtype and shape of each stacked value, for zero iterations; None if unknown, and 0 for unknown sizes.
    """

    def __init__(self, body: nn.Module, carried: int, empty: Sequence[_Like]) -> None:
        super().__init__()
        self.body = body
        self.carried = carried
        self.empty: list[_Like] = list(empty)

    def forward(
        self,
        root: nn.Module,
        trips: Value | None,
        condition: Value | None,
        state: Sequence[Any],
        outside: Sequence[Any],
        device: torch.device | None,
    ) -> tuple[Any, ...]:
        """Return the carried values after the last iteration, and the stacked ones."""
        limit = None if trips is None else integer(trips)
        goes_on = True if condition is None else flag(condition)
        current = list(state)
        rows: list[list[Tensor]] = [[] for _ in self.empty]
        count = 0
        while goes_on and (limit is None or count < limit):
            step = Host((count,), True, torch.int64)
            outputs = self.body(root, step, Host((True,), True, torch.bool), *current, *outside)
            goes_on = flag(outputs[0])
            current = list(outputs[1 : 1 + self.carried])
            for row, value in zip(rows, outputs[1 + self.carried :], strict=True):
                row.append(as_tensor(value, device))
            count += 1
        return (*current, *(_stack(row, like, device) for row, like in zip(rows, self.empty, strict=True)))


def _stack(row: list[Tensor], like: _Like, device: torch.device | None) -> Tensor:
    if row:
        return torch.stack(row)
    if like is None:
        raise ValueError("a Loop stacks values of no known type, and ran no iteration")
    dtype, shape = like
    return torch.empty((0, *shape), dtype=dtype, device=device)


class ScanNode(nn.Module):
    """Run a graph for each entry of sequences.

    Args:
        body: called with the model, the carried values, an entry of each sequence and the values that it reads from
            outside; returns the carried values and values to be stacked.
        carried: the number of carried values.
        input_axes: the axis of each sequence.
        input_backwards: whether each sequence is read from its end.
        output_axes: the axis of each stacked value.
        output_backwards: whether each is stacked from its end.
    """

    def __init__(
        self,
        body: nn.Module,
        carried: int,
        input_axes: Sequence[int],
        input_backwards: Sequence[bool],
        output_axes: Sequence[int],
        output_backwards: Sequence[bool],
    ) -> None:
        super().__init__()
        self.body = body
        self.carried = carried
        self.inputs: list[tuple[int, bool]] = list(zip(input_axes, input_backwards, strict=True))
        self.outputs: list[tuple[int, bool]] = list(zip(output_axes, output_backwards, strict=True))

    def forward(
        self,
        root: nn.Module,
        state: Sequence[Any],
        sequences: Sequence[Tensor],
        outside: Sequence[Any],
        device: torch.device | None,
    ) -> tuple[Any, ...]:
        """Return the carried values after the last entry, and the stacked ones."""
        current = list(state)
        rows: list[list[Tensor]] = [[] for _ in self.outputs]
        lengths = [x.shape[axis] for x, (axis, _) in zip(sequences, self.inputs, strict=True)]
        if any(length != lengths[0] for length in lengths):
            raise ValueError(f"Scan takes sequences of one length, not of {lengths}")
        for step in range(lengths[0]):
            entries = [
                torch.select(x, axis, lengths[0] - 1 - step if backwards else step)
                for x, (axis, backwards) in zip(sequences, self.inputs, strict=True)
            ]
            outputs = self.body(root, *current, *entries, *outside)
            current = list(outputs[: self.carried])
            for row, value in zip(rows, outputs[self.carried :], strict=True):
                row.append(as_tensor(value, device))
        return (
            *current,
            *(
                torch.stack(row[::-1] if backwards else row, axis)
                for row, (axis, backwards) in zip(rows, self.outputs, strict=True)
            ),
        )
