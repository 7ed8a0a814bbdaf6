"""Runs passes on a graph: each is timed, what it says is kept, and what it leaves can be checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

import onnx
import onnx_ir as ir
from torch.fx import GraphModule, Node

from ort_dynamo.errors import PassBrokeGraphError
from ort_dynamo.pass_record import PassRecord

__all__ = ["run_passes"]


class _Pass(Protocol):
    def __call__(self, graph: Any, /) -> Any: ...


def run_passes(
    passes: Sequence[_Pass], graph: GraphModule | ir.Model, *, check: bool = False
) -> tuple[PassRecord, ...]:
    """Run passes on a graph, in order and in place.

    Args:
        passes: passes on what `graph` is: torch's PassBase, or onnx_ir's InPlacePass.
        graph: an FX graph or an ONNX model.
        check: check the graph before the first pass and after each.

    Returns:
        What became of each.

    Raises:
        PassBrokeGraphError: with `check`, the graph is invalid.
    """
    checker = _checker(graph) if check and passes else None
    records = []
    for pass_ in passes:
        begin = time.perf_counter()
        result = pass_(graph)
        seconds = time.perf_counter() - begin
        name = repr(pass_) if dataclasses.is_dataclass(pass_) else type(pass_).__name__
        records.append(PassRecord(name, seconds, result.modified, getattr(result, "summary", None)))
        if checker is not None:
            checker.check(name)
    return tuple(records)


def _checker(graph: GraphModule | ir.Model) -> _FxChecker | _OnnxChecker:
    return _FxChecker(graph) if isinstance(graph, GraphModule) else _OnnxChecker(graph)


_BEFORE = "what comes before the first pass"


class _FxChecker:
    """Checks that an FX graph is well-formed, and that every node with a value that a pass makes says which.

    What AOTAutograd leaves without meta["val"], such as an assertion, may stay so.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._without = {node for node in gm.graph.nodes if _lacks_value(node)}
        self.check(_BEFORE)

    def check(self, name: str) -> None:
        """Raise, naming what has run, if the graph is invalid."""
        try:
            self._gm.graph.lint()
        except Exception as error:  # lint raises whatever it meets
            raise PassBrokeGraphError(name=name, kind="FX", error=error) from error
        for node in self._gm.graph.nodes:
            if _lacks_value(node) and node not in self._without:
                missing = f"{node.format_node()} has no fake value in meta['val']"
                raise PassBrokeGraphError(name=name, kind="FX", error=missing)


def _lacks_value(node: Node) -> bool:
    return node.op == "call_function" and "val" not in node.meta


class _OnnxChecker:
    """Checks that a model is valid ONNX: onnx.checker, which also asks for a topological order, and its outputs."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self.check(_BEFORE)

    def check(self, name: str) -> None:
        """Raise, naming what has run, if the model is invalid."""
        graph = self._model.graph
        for value in graph.outputs:
            made = value.producer()
            if not (made.graph is graph if made else value.is_graph_input() or value.is_initializer()):
                raise PassBrokeGraphError(name=name, kind="ONNX", error=f"nothing makes the output {value.name}")
        try:
            onnx.checker.check_model(ir.to_proto(self._model))
        except onnx.checker.ValidationError as error:
            raise PassBrokeGraphError(name=name, kind="ONNX", error=error) from error
