"""A model of an older opset takes the place of one of a newer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass
from onnx_ir.traversal import RecursiveGraphIterator

from ort_dynamo.errors import OpsetError
from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx.analysis.opsets import ONNX_DOMAINS, opset_of
from ort_dynamo.passes.onnx.analysis.value_names import ValueNames
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.opsets.building import Builder, InexpressibleError
from ort_dynamo.passes.onnx.opsets.changed_meanings import NEWEST, OLDEST, check_meaning
from ort_dynamo.passes.onnx.opsets.function_bodies import body_model, splice
from ort_dynamo.passes.onnx.opsets.rewrites import rewritten
from ort_dynamo.passes.onnx.opsets.schemas import check_fits, fitted, schema_at

__all__ = ["LowerOpset"]


@dataclass(frozen=True)
class LowerOpset(ir.passes.InPlacePass):
    """Replace every node of ai.onnx by one or more nodes of opset `version` that compute the same.

    A node that fits its operator's older schema, with the same meaning, does not change. Others are rewritten by
    `passes/onnx/opsets/`. Nodes of other domains do not change. If a node cannot be expressed, the model does not
    change. Functions of the model, such as those of fused kernels, are inlined first.

    Attributes:
        version: the opset of ai.onnx: 12 or newer, and not newer than the model's.
    """

    version: int

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of the model.

        Raises:
            OpsetError: naming each operator that has no form, with the reason.
        """
        opset = opset_of(model)
        if opset is None or opset == self.version:
            return ir.passes.PassResult(model, modified=False)
        if not OLDEST <= self.version < opset:
            given = f"only opsets {OLDEST} to {opset} can take the place of its {opset}"
            older = f"its opset {opset} has no older one to take its place: the oldest is {OLDEST}"
            raise OpsetError(version=self.version, reason=given if opset > OLDEST else older)
        InlinePass()(model)
        model.functions.clear()
        infer_missing_types(model)
        plan = _Plan(self.version, opset, {PASS: repr(self)}, ValueNames(model, nodes=True).fresh)
        for node in RecursiveGraphIterator(model.graph):
            plan.add(node)
        plan.carry_out()
        model.opset_imports.pop("ai.onnx", None)
        model.opset_imports[""] = self.version
        return ir.passes.PassResult(model, modified=True)


class _Plan:
    """The replacements of nodes; nothing changes before all are known.

    Args:
        version: the opset that the nodes are to be of.
        opset: the opset that they are of.
        metadata: the metadata of new nodes.
        fresh: gives a name that no value and no node has.
    """

    def __init__(self, version: int, opset: int, metadata: dict[str, str], fresh: Callable[[str], str]) -> None:
        self._version = version
        self._opset = opset
        self._metadata = metadata
        self._fresh = fresh
        self._kept: list[ir.Node] = []
        self._replaced: list[tuple[ir.Node, Builder, Sequence[ir.Value]]] = []
        self._reasons: dict[str, None] = {}

    def add(self, node: ir.Node) -> None:
        """Decide about one node."""
        if node.domain not in ONNX_DOMAINS:
            return
        make = Builder(node, self._fresh, self._metadata)
        try:
            results = self._older(node, make)
        except InexpressibleError as error:
            make.discard()
            self._reasons[f"{node.op_type} ({node.name or node.outputs[0].name}): {error}"] = None
        else:
            if results is None:
                self._kept.append(node)
            else:
                self._replaced.append((node, make, results))

    def _older(self, node: ir.Node, make: Builder) -> Sequence[ir.Value] | None:
        """Give the replacements of a node's outputs; None if the node can stay."""
        new, old = schema_at(node.op_type, self._opset), schema_at(node.op_type, self._version)
        if new is None:
            raise InexpressibleError(f"opset {self._opset} has no such operator")
        if old is not None and old.since_version == new.since_version:
            return None
        try:
            if old is None:
                raise InexpressibleError(f"it is of opset {_first_opset(node.op_type, self._opset)}")
            if (results := self._rewritten(node, new.since_version, make)) is not None:
                return results
            inputs, attributes = fitted(node, new, old, self._version)
            check_meaning(node, new.since_version, self._version)
        except InexpressibleError:
            make.discard()
            body = body_model(node, new, self._version)
            if body is None:
                raise
            self._lower_body(body)
            return splice(body, node, make)
        if list(inputs) == list(node.inputs) and attributes == dict(node.attributes):
            return None
        same = ir.Node("", node.op_type, inputs, attributes.values(), num_outputs=len(node.outputs))
        make.take(same, node.op_type)
        return same.outputs

    def _rewritten(self, node: ir.Node, since: int, make: Builder) -> Sequence[ir.Value] | None:
        if since > NEWEST:
            raise InexpressibleError(f"what opset {since} changed about it is not known here")
        results = rewritten(node, since, self._version, make)
        for one in make.nodes:
            check_fits(one, self._opset, self._version)
        return results

    def _lower_body(self, body: ir.Model) -> None:
        try:
            LowerOpset(self._version)(body)
        except OpsetError as error:
            raise InexpressibleError(f"it stands for others, which have none: {error.facts['reason']}") from error

    def carry_out(self) -> None:
        """Replace the nodes; raises OpsetError, with nothing replaced, if some have no form."""
        if self._reasons:
            for _, make, _ in self._replaced:
                make.discard()
            raise OpsetError(version=self._version, reason="; ".join(self._reasons))
        for node in self._kept:
            node.version = self._version if node.version is not None else None
        for node, make, results in self._replaced:
            _replace(node, make, results)


def _replace(node: ir.Node, make: Builder, results: Sequence[ir.Value]) -> None:
    graph = node.graph
    assert graph is not None
    make.nodes[-1].name = node.name or make.nodes[-1].name
    graph.insert_before(node, make.nodes)
    for old, new in zip(node.outputs, results, strict=True):
        if new is old:
            continue
        name = old.name
        new.type, new.shape = old.type, old.shape
        new.metadata_props.update(old.metadata_props)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = None, name
    inputs = [value for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for value in inputs:
        _drop_unread_constant(value)


def _drop_unread_constant(value: ir.Value) -> None:
    """Remove a value that was an input and is an attribute now."""
    if value.uses() or value.is_graph_output() or value.is_graph_input():
        return
    node, graph = value.producer(), value.graph
    if value.is_initializer() and graph is not None:
        del graph.initializers[str(value.name)]
    elif node is not None and node.op_type == "Constant" and node.graph is not None:
        node.graph.remove(node, safe=True)


def _first_opset(op_type: str, opset: int) -> int:
    return next(version for version in range(1, opset + 1) if schema_at(op_type, version) is not None)
