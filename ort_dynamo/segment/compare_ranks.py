"""Compares what the ranks of a process group decide about the same graph: a difference is an error that names both.

Each rank that compiles a graph puts its decision into the group's store, under the graph's content, unless another rank
was first; then it compares. Nobody waits: a rank that compiles other graphs, such as another stage of a pipeline, or
nothing at all, or later, is not missed. The rank that comes second raises. One round trip to the store for each graph
that is compiled; none where nothing is.

A rank may decide otherwise later, with other options: its second decision about a graph is compared with the second of
the others. Threads, saved files and caches are no decisions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.fx import GraphModule

from ort_dynamo.build import BuildSpec
from ort_dynamo.cache.graph_key import graph_key
from ort_dynamo.errors import RanksDisagreeError
from ort_dynamo.options.groups import DumpOptions, SegmentOptions, SessionOptions
from ort_dynamo.segment.segment import Segmented
from ort_dynamo.torch_internals.process_group import GroupStore, group_store

__all__ = ["compare_ranks", "graph_of_ranks"]

_log = logging.getLogger(__name__)
_decided: WeakKeyDictionary[Any, dict[str, list[str]]] = WeakKeyDictionary()
"""Store -> graph -> this process's distinct decisions, in order."""


def graph_of_ranks(gm: GraphModule, options: SegmentOptions) -> str | None:
    """What the same graph is found by on other ranks; None where nothing is compared.

    Args:
        gm: the graph, before it is decided where its nodes run.
        options: whether ranks are compared.
    """
    if not options.compare_ranks or group_store() is None:
        return None
    key = graph_key(gm)
    return None if key is None else key.digest


def compare_ranks(
    graph: str | None,
    role: str,
    segmented: Segmented,
    spec: BuildSpec,
    functions: Mapping[str, Callable[..., Any]],
) -> None:
    """Compare this rank's decision with that of the first rank that compiled the same graph.

    Args:
        graph: from `graph_of_ranks`.
        role: "forward", "backward", "inference" or "training".
        segmented: where its nodes run.
        spec: what its islands are built by.
        functions: functions of the program's that decide it, too.

    Raises:
        RanksDisagreeError: they differ.
    """
    group = group_store()
    if graph is None or group is None:
        return
    graph = f"{role}/{graph}"
    decision = _decision(segmented, spec, functions)
    decided = _decided.setdefault(group.store, {}).setdefault(graph, [])
    if (text := json.dumps(decision)) in decided:
        return
    decided.append(text)
    try:
        first = group.first(f"{graph}/{len(decided)}", json.dumps([group.rank, platform.node(), decision]))
    except RuntimeError as error:
        _log.warning("The %s graph is not compared with that of other ranks: %s", role, error)
        return
    rank, host, theirs = json.loads(first)
    if theirs != decision:
        raise RanksDisagreeError(
            role=role,
            rank=group.rank,
            host=platform.node(),
            other=rank,
            other_host=host,
            differences=_differences(group, decision, rank, theirs),
        )


def _decision(
    segmented: Segmented, spec: BuildSpec, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, dict[str, Any]]:
    """What must be the same on all ranks, as JSON has it."""
    same = dataclasses.replace(spec, session=SessionOptions(intra_op_num_threads=1).resolved(), dump=DumpOptions())
    # The context alone, and each island with it.
    built_by = hashlib.sha256(repr(same).encode()).hexdigest()[:16]
    islands = [str(graph_key(island, same, functions=functions)) for island in segmented.islands.values()]
    return {
        "target": {
            name: str(getattr(spec.target, name))
            for name in ("package", "version", "provider", "contrib_ops", "fuses_kernels")
        },
        "in eager": {f"{node.name} ({node.target})": node.reason for node in segmented.eager},
        "in torch by choice": dict(segmented.chosen),
        "built by": {"passes and target": built_by},
        "islands": {f"island {index}": key for index, key in enumerate(islands)},
    }


def _differences(group: GroupStore, mine: dict[str, dict[str, Any]], rank: int, theirs: dict[str, Any]) -> str:
    lines = []
    for topic, facts in mine.items():
        others = theirs.get(topic, {})
        for name in sorted({*facts, *others}):
            if facts.get(name) != others.get(name):
                lines.append(
                    f"  {topic}, {name}: rank {rank} has {others.get(name, 'none')}, "
                    f"rank {group.rank} has {facts.get(name, 'none')}"
                )
    return "\n".join(lines)
