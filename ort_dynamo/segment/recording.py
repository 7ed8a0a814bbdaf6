"""Whether a graph can be recorded in a CUDA graph, which replays the same launches on the same addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.session import CannotBeRecordedError
from ort_dynamo.target import Target
from ort_dynamo.torch_internals.cuda_graphs import (
    has_graph_trees,
    mutated_inputs,
    recorded,
    resting_inputs,
    running_backward,
    unsafe_node,
)

__all__ = ["Recording", "plan_recording", "why_not_recorded"]

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Recording:
    """What becomes of the wish to have a graph recorded.

    Attributes:
        gm, role, device: the graph's.
        resting: indices of its inputs whose addresses stay.
        is_wanted: whether it is to be recorded.
        refused: why it is not, though it was asked for; "" otherwise.
        forward_recorded: of a backward, whether its forward is.
    """

    gm: GraphModule
    role: str
    device: torch.device
    resting: tuple[int, ...] = ()
    is_wanted: bool = False
    refused: str = ""
    forward_recorded: bool = False

    def opening(self, opened: Callable[[bool], Opened]) -> tuple[Opened, Recording]:
        """What `opened` gives, which takes whether sessions are opened for a recording, and what becomes of that.

        Where one of them cannot be recorded, all are opened again without.
        """
        try:
            return opened(self.is_wanted), self
        except CannotBeRecordedError as error:
            given_up = self.given_up(str(error))
        return opened(False), given_up

    def given_up(self, reason: str) -> Recording:
        """The same, refused."""
        return dataclasses.replace(self, is_wanted=False, refused=reason)

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The boxed function of the graph as it is to be called."""
        if self.is_wanted:
            return recorded(run, self.gm, self.role, self.device, self.resting, mutated_inputs(self.gm))
        if self.refused and self.role == "backward" and self.forward_recorded:
            return running_backward(run, self.device)
        return run


def plan_recording(
    gm: GraphModule,
    role: str,
    options: SessionOptions,
    target: Target,
    device: torch.device,
    *,
    forward_recorded: bool,
) -> Recording:
    """Decide whether a graph is recorded.

    Where nothing is launched, as on the CPU, there is nothing to record, and it is no refusal: a model that trains on
    CUDA may have such a graph, and a program that is tried on the CPU is to run as it is.
    """
    if not (options.cuda_graphs and target.computes_on_streams):
        return Recording(gm, role, device)
    resting = resting_inputs(gm, role)
    plan = Recording(gm, role, device, resting, is_wanted=True, forward_recorded=forward_recorded)
    if role == "backward" and not forward_recorded:
        return plan.given_up("its forward is not recorded, so what that saves lies elsewhere each time")
    reason = why_not_recorded(gm, resting)
    return plan if reason is None else plan.given_up(reason)


def why_not_recorded(gm: GraphModule, resting: Collection[int]) -> str | None:
    """The reason why a graph cannot be recorded; None if nothing in it speaks against it.

    Args:
        gm: a graph with fake values.
        resting: indices of the inputs whose addresses stay.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes):
            return f"the sizes of {node.name} are dynamic (torch.compile(..., dynamic=False) makes one graph for each)"
    devices: dict[torch.device, str] = {}
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            devices.setdefault(value.device, node.name)
    if len(devices) != 1:
        return "not all of it is on one device: " + ", ".join(f"{name} on {device}" for device, name in devices.items())
    if not has_graph_trees():
        return "this torch has no CUDA graph trees"
    if node := unsafe_node(gm):
        return f"{node.target} ({node.name}) waits for the device, or has a size that data decides"
    if moving := sorted(mutated_inputs(gm) - set(resting)):
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        return f"it writes to an input that is neither a parameter nor a buffer: {names[moving[0]]}"
    return None
