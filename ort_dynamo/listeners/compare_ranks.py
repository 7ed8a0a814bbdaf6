"""Compares the decisions of a process group's ranks about the same graph: a difference is an error that names both.

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
from typing import Any
from weakref import WeakKeyDictionary

from torch.fx import GraphModule

from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.errors import RanksDisagreeError
from ort_dynamo.graph.graph_key import graph_key
from ort_dynamo.options.groups import DumpOptions, SegmentOptions, SessionOptions
from ort_dynamo.torch_internals.process_group import GroupStore, group_store

__all__ = ["CompareRanks"]

_log = logging.getLogger(__name__)
_decided: WeakKeyDictionary[Any, dict[str, list[str]]] = WeakKeyDictionary()
"""Store -> graph -> this process's distinct decisions, in order."""


class CompareRanks(Listener):
    """Compares this rank's decisions about a graph with those of the first rank that compiled the same one.

    Args:
        options: the options that enable the comparison.

    Raises:
        RanksDisagreeError: the decisions differ.
    """

    def __init__(self, options: SegmentOptions) -> None:
        self._compares = options.compare_ranks
        self._traced: str | None = None

    def traced(self, gm: GraphModule) -> None:
        """Spell the graph as other ranks find it; passes that place its nodes change it, as the options say."""
        key = graph_key(gm) if self._compares and group_store() is not None else None
        self._traced = None if key is None else key.digest

    def segmented(self, graph: GraphCompilation) -> None:
        """Compare."""
        group = group_store()
        if self._traced is None or group is None:
            return
        decision, name = _decision(graph), f"{graph.role}/{self._traced}"
        decided = _decided.setdefault(group.store, {}).setdefault(name, [])
        if (text := json.dumps(decision)) in decided:
            return
        decided.append(text)
        try:
            first = group.first(f"{name}/{len(decided)}", json.dumps([group.rank, platform.node(), decision]))
        except RuntimeError as error:
            _log.warning("ort_train: the %s graph is not compared with that of other ranks: %s", graph.role, error)
            return
        rank, host, theirs = json.loads(first)
        if theirs != decision:
            raise RanksDisagreeError(
                role=graph.role,
                rank=group.rank,
                host=platform.node(),
                other=rank,
                other_host=host,
                differences=_differences(group, decision, rank, theirs),
            )


def _decision(graph: GraphCompilation) -> dict[str, dict[str, Any]]:
    """Spell in JSON everything that must be the same on all ranks."""
    spec, segmented = graph.spec, graph.segmented
    same = dataclasses.replace(spec, session=SessionOptions(intra_op_num_threads=1).resolved(), dump=DumpOptions())
    # The context alone, and each island with it.
    built_by = hashlib.sha256(repr(same).encode()).hexdigest()[:16]
    islands = [str(graph_key(island, same, functions=graph.functions)) for island in segmented.islands.values()]
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
