"""Finds the first pass, or ONNX Runtime's optimizers, that changes the results of a model that was lowered right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import Node

from ort_dynamo.errors import OrtDynamoError
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.graph.marks import fx_node_name
from ort_dynamo.graph.node_origins import operator_name
from ort_dynamo.graph.source_line import module_path, user_line
from ort_dynamo.passes.running import run_passes
from ort_dynamo.verification.compare import first_problem, largest
from ort_dynamo.verification.models import LoweredIsland, spell_nodes
from ort_dynamo.verification.record import IslandRun
from ort_dynamo.verification.repeat import write_models, written
from ort_dynamo.verification.result import Fault

__all__ = ["find_stage"]

_KNOWN = frozenset(TORCH_TO_ONNX.values())


def find_stage(run: IslandRun, expected: Sequence[Any], exact: Sequence[Any], folder: Path) -> Fault | None:
    """Find the first change of an island's model after which its results differ.

    Args:
        run: a run of the island.
        expected, exact: its results in torch and in float64.
        folder: where the program that repeats the fault is written.
    """
    spec = run.graph.spec
    island = LoweredIsland(run.gm, spec)
    if _problem(island, run, expected, exact):
        return None  # it was lowered wrong
    before = ir.to_proto(island.model)
    for pass_ in spec.passes:
        (record,) = run_passes((pass_,), island.model)
        after = ir.to_proto(island.model)
        if after != before and (problem := _problem(island, run, expected, exact)):
            cause = f"the pass {record.name}, which rewrites the ONNX model"
            return _changed(run, island, ir.from_proto(before), problem, "pass", cause, folder)
        before = after
    problem = first_problem(run.compiled.run(*run.inputs), expected, lambda: exact, scale=largest(expected))
    if problem:
        target = run.graph.target
        cause = f"ONNX Runtime's optimizers ({target.package} {target.version}): the model is right without them"
        return _changed(run, island, ir.from_proto(before), problem, "optimizer", cause, folder)
    return None


def _problem(island: LoweredIsland, run: IslandRun, expected: Sequence[Any], exact: Sequence[Any]) -> str:
    try:
        found = island.run(run.inputs)
    except OrtDynamoError:
        return ""  # a model between two passes need not open; the last one does
    return first_problem(found, expected, lambda: exact, scale=largest(expected))


def _changed(
    run: IslandRun,
    island: LoweredIsland,
    before: ir.Model,
    problem: str,
    culprit: str,
    cause: str,
    folder: Path,
) -> Fault:
    """Name the first value that a change has made wrong, with the operator that it belongs to."""
    right = island.holding(before)
    after = island.model if culprit == "pass" else None
    found = None if after is None else _first_wrong(right, island, run.inputs)
    made = None if found is None else found[0].producer()
    node = _fx_node(run, made) or _output_node(run)
    name = f"{run.graph.role}-{node.name if node else run.name}"
    repeat, unwritten = written(write_models, folder, name, right, after, run.inputs, cause)
    return Fault(
        operator=operator_name(node) if node else "",
        node=node.name if node else "",
        graph=run.graph.role,
        module=module_path(node) if node else "",
        line=user_line(node) if node else "",
        problem=problem if found is None else found[1],
        culprit=culprit,
        cause=cause + unwritten,
        onnx_nodes=spell_nodes([made] if made is not None else []),
        repeat=repeat,
    )


def _first_wrong(right: LoweredIsland, wrong: LoweredIsland, inputs: Sequence[Any]) -> tuple[ir.Value, str] | None:
    """Find the first value that two models have under one name, with other numbers."""
    try:
        expected, found = _values(right, inputs), _values(wrong, inputs)
    except OrtDynamoError:
        return None
    for node in wrong.model.graph:
        for value in node.outputs:
            one, other = found.get(value.name), expected.get(value.name)
            if one is None or other is None or one.shape != other.shape:
                continue
            if problem := first_problem([one], [other], lambda: [None]):
                return value, problem
    return None


def _values(island: LoweredIsland, inputs: Sequence[Any]) -> dict[str | None, torch.Tensor]:
    """Run a model, and return its values by their names."""
    outputs = list(island.model.graph.outputs)
    values = [value for node in island.model.graph for value in node.outputs if value not in outputs]
    inner = [value for value in values if value.dtype in _KNOWN and value.name]
    names = [value.name for value in (*outputs, *inner)]
    return dict(zip(names, island.run(inputs, inner), strict=True))


def _fx_node(run: IslandRun, made: ir.Node | None) -> Node | None:
    """Return the FX node that an ONNX node was lowered from; None if it has no name of one."""
    name = None if made is None else fx_node_name(made.metadata_props)
    return next((node for node in run.gm.graph.nodes if node.name == name), None)


def _output_node(run: IslandRun) -> Node | None:
    """Return the FX node of an island's output; None of an island with several."""
    (output,) = run.gm.graph.find_nodes(op="output")
    nodes: Sequence[Node] = output.args[0]
    return nodes[0] if len(nodes) == 1 else None
