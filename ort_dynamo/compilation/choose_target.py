"""Finds the device and the target that a graph of Dynamo's is compiled for, once, before anything else."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.compilation.probe_kernels import kernels_work
from ort_dynamo.options.groups import Options
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.process_group import group_store
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = ["graph_target", "placement_threads", "session_device"]

_log = logging.getLogger(__name__)


def session_device(gm: GraphModule, inputs: Iterable[Any] = ()) -> torch.device:
    """Find the device of a graph's sessions: the CUDA device most of its tensors are on if there is one, else the CPU.

    Args:
        gm: a graph of Dynamo's or AOTAutograd's, with fake values in its nodes' meta.
        inputs: the graph's inputs, for a graph whose nodes have no fake values.
    """
    counts: dict[torch.device, int] = {}
    fakes = [node.meta.get("val", node.meta.get("example_value")) for node in gm.graph.nodes]
    for tensor in tree_leaves([*fakes, *inputs]):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            counts[tensor.device] = counts.get(tensor.device, 0) + 1
    return max(counts, key=counts.__getitem__) if counts else torch.device("cpu")


def graph_target(device: torch.device, options: Options) -> Target:
    """Find the target of sessions on a device, as far as the options and the device let it be used.

    Raises:
        ProviderNotAvailableError: no execution provider serves the device, or it cannot load.
    """
    target = usable_target(device.type)
    fuses = target.fuses_kernels and options.passes.fuse and kernels_work(options.cache)
    allowed = dataclasses.replace(target, contrib_ops=options.segment.contrib_ops, fuses_kernels=fuses)
    return target if allowed == target else allowed  # keep the object with the cached answers


def placement_threads(options: Options) -> int:
    """Give the number of threads for choices between torch and a session, and between forms in a session.

    Ranks of a process group that compile the same graph have to place its nodes alike, and their machines may differ.
    So the first rank that asks decides for all, until the group ends.
    """
    own = options.session.resolved().intra_op_num_threads
    group = group_store() if options.segment.compare_ranks else None
    try:
        return own if group is None else int(group.first("placement threads", str(own)))
    except RuntimeError as error:
        _log.warning("ort_train: placement uses this rank's %d threads; the group's store failed: %s", own, error)
        return own
