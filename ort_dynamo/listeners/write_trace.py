"""Writes the models and passes of a compile to torch's own log of compiles, where TORCH_TRACE names a folder."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir
from torch.fx import GraphModule

from ort_dynamo.cache.open_island import OpenedIsland
from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.graph.build import PassRecord
from ort_dynamo.torch_internals.tracing.structured_trace import write_artifact

__all__ = ["WriteTrace"]


class WriteTrace(Listener):
    """Writes artifacts for tlparse, which shows them as files. Texts are built only if torch writes its trace log.

    - `ort_dynamo_joint_passes`: the passes on the joint graph, and on its forward and backward.
    - `ort_dynamo_forward_passes`: the passes on one graph, and on the models of its islands.
    - `ort_dynamo_forward_island_0`: the model that ONNX Runtime was given, as text.
    """

    def cut(self, graphs: Mapping[str, GraphModule], partition: PartitionRecord | None) -> None:
        """Write the passes on a joint graph."""
        if partition is not None:
            write_artifact("ort_dynamo_joint_passes", lambda: _lines(_partition(partition)))

    def opened(self, graph: GraphCompilation) -> None:
        """Write the passes on a graph, and the model of each of its islands, wherever that comes from."""
        write_artifact(f"ort_dynamo_{graph.role}_passes", lambda: _lines(_report(graph)))
        for name, island in graph.islands.items():
            _write_model(f"ort_dynamo_{graph.role}_{name}", island)


def _write_model(name: str, island: OpenedIsland) -> None:
    write_artifact(name, lambda: _text(island.compiled.built.model))


def _text(model: bytes) -> str:
    """Spell a model, without the values of large constants."""
    return str(ir.from_proto(onnx.ModelProto.FromString(model))).replace("⬅️", "=")  # a log need not be in UTF-8


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _partition(record: PartitionRecord) -> Iterator[str]:
    yield record.memory.summary()
    yield ""
    yield from _passes(record.passes)


def _report(graph: GraphCompilation) -> Iterator[str]:
    found = graph.segmented
    yield (
        f"{graph.role} graph: {found.native.total()} nodes in ONNX Runtime in {len(graph.islands)} islands, "
        f"{found.by_design.total()} in torch by design, {found.chosen.total()} in torch by choice, "
        f"{len(found.eager)} in eager (fallback)"
    )
    yield from (f"  {node.target}: {node.reason}" for node in found.eager)
    yield ""
    yield from _passes(graph.passes)
    for name, island in graph.islands.items():
        record = island.compiled.built.record
        took = ", ".join(f"{stage} {seconds * 1e3:.1f} ms" for stage, seconds in record.seconds.items())
        yield ""
        yield f"{name}: {island.covers}, {island.name}, {record.nodes} ONNX nodes, from {_SOURCES[island.source]}"
        yield f"  {took}"
        yield from _passes(record.passes)


_SOURCES = {"memory": "this process", "disk": "the cache on disk", "built": "a new build"}


def _passes(passes: Sequence[PassRecord]) -> Iterator[str]:
    for one in passes:
        name = textwrap.shorten(one.name, 100, placeholder="...")  # a target among the parameters is long
        yield f"  {one.seconds * 1e3:8.2f} ms  {'changed  ' if one.modified else 'unchanged'}  {name}"
        if one.summary is not None:
            yield f"    {one.summary}"
