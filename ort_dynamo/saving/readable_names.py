"""Names the values and nodes of an island's model as people know them. The model that runs keeps its short names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir
from torch.fx import GraphModule, Node

from ort_dynamo.graph.marks import DIRECTION, FX_NODE, HALF, READABLE, SCOPE, fx_node_name
from ort_dynamo.graph.source_line import modules
from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames, utf8

__all__ = ["makers", "readable"]


def makers(model: ir.Model) -> dict[str, str]:
    """Name of a value -> the FX node that it was lowered from, in a model of ours."""
    found = {}
    for node in model.graph.all_nodes():
        if origin := _origin(node):
            found.update({str(value.name): origin for value in node.outputs})
    return found


def readable(serialised: bytes, island: GraphModule, known: Mapping[str, str]) -> ir.Model:
    """Copy an island's model with readable names, from the READABLE metadata of the FX nodes.

    Inputs and outputs get the names of their FX values. A node is called by the module and the FX node that it was
    lowered from, as in "layers.3.mlp/mm_1"; others of that FX node get their operator, "layers.3.mlp/mm_1/Transpose".
    Its metadata has the keys that torch.onnx's exporter writes (namespace, pkg.torch.onnx.*), and the direction. A node
    that a pass or ONNX Runtime has made is named after its results, then after its readers, then after its inputs.

    Args:
        serialised: a ModelProto.
        island: the FX graph that it was made of; its outputs are the model's, in order, and so are the
            placeholders that it reads.
        known: value -> FX node, for values of a model that ONNX Runtime has written, which drops our metadata.
    """
    model = ir.from_proto(onnx.ModelProto.FromString(serialised))
    graph = model.graph
    nodes = {node.name: node for node in island.graph.nodes}
    read = {value.name for value in graph.inputs}
    placeholders = [node for node in island.graph.find_nodes(op="placeholder") if node.name in read]
    fed = {value: node.name for value, node in zip(graph.inputs, placeholders, strict=True)}
    origins = _origins(graph, known, fed)
    unique = UniqueNames(graph.initializers)
    (output,) = island.graph.find_nodes(op="output")
    named = {
        value: unique.fresh(_name(node))
        for values, fx_nodes in ((graph.inputs, placeholders), (graph.outputs, output.args[0]))
        for value, node in zip(values, fx_nodes, strict=True)
    }
    _name_nodes(graph, origins, nodes)
    for node in graph.all_nodes():
        for index, value in enumerate(node.outputs):
            if value.name and value not in named:
                plain = str(node.name) if len(node.outputs) == 1 else f"{node.name}:{index}"
                # A name alone is ambiguous: the lowering's add_1 may be the second result of add.
                mine = nodes.get(value.name) if value.name == origins[node] else None
                named[value] = unique.fresh(plain if mine is None else _name(mine))
    for value, name in named.items():
        value.name = name
    return model


def _name(node: Node) -> str:
    return str(node.meta.get(READABLE, node.name))


def _origin(node: ir.Node) -> str:
    return fx_node_name(node.metadata_props)


def _origins(graph: ir.Graph, known: Mapping[str, str], fed: Mapping[ir.Value, str]) -> dict[ir.Node, str]:
    """ONNX node -> the name of its FX node; of one that only reads constants and is not read, its operator."""
    order = list(graph.all_nodes())
    found = {node: _origin(node) or _first(known.get(str(value.name), "") for value in node.outputs) for node in order}
    for node in reversed(order):
        found[node] = found[node] or _first(found[user] for value in node.outputs for user in value.consumers())
    for node in order:
        sources = (found.get(made) if (made := value.producer()) else fed.get(value) for value in node.inputs if value)
        found[node] = found[node] or _first(sources) or node.op_type
    return found


def _first(names: Iterable[str | None]) -> str:
    return next((name for name in names if name), "")


def _name_nodes(graph: ir.Graph, origins: Mapping[ir.Node, str], nodes: Mapping[str, Node]) -> None:
    left = Counter(origins.values())
    unique = UniqueNames()
    for node in graph.all_nodes():
        origin = origins[node]
        left[origin] -= 1
        fx_node = nodes.get(origin)
        scope = fx_node.meta.get(SCOPE) if fx_node is not None else None
        path = f"{scope}/{origin}" if scope else origin
        # The last ONNX node of an FX node computes its value.
        node.name = unique.fresh(path if not left[origin] else f"{path}/{node.op_type}")
        node.metadata_props.update(_metadata(fx_node) if fx_node is not None else {})


def _metadata(node: Node) -> dict[str, Any]:
    stack = modules(node)
    scopes = [path for path, _ in stack]
    return {
        FX_NODE: f"{node.name}: {node.target}",
        "namespace": utf8("/".join([*(f"{path}: {kind}" for path, kind in stack), f"{node.name}: {node.target}"])),
        "pkg.torch.onnx.name_scopes": repr([*scopes, node.name]),
        "pkg.torch.onnx.class_hierarchy": repr([*(kind for _, kind in stack), str(node.target)]),
        "pkg.torch.onnx.stack_trace": str(node.meta.get("stack_trace", "")).strip(),
        DIRECTION: "backward" if "backward" in node.meta.get(HALF, "") else "forward",
    }
