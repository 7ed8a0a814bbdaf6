"""Finds the first operator of recorded graphs whose result is wrong, from the same inputs, and the part at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch.fx import GraphModule, Interpreter, Node

from ort_dynamo.errors import OrtDynamoError
from ort_dynamo.graph.boundary import copy_with_strides
from ort_dynamo.graph.marks import WHOLE_NODE
from ort_dynamo.graph.source_line import module_path, user_line
from ort_dynamo.lowering.registry import find_lowering, is_from_outside, name_of
from ort_dynamo.torch_internals.kernels.operators import OpOverload
from ort_dynamo.torch_internals.kernels.undefined import UNDEFINED
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.verification.alone import Alone, run_alone
from ort_dynamo.verification.compare import FACTOR_OF_ONE, excess, first_problem, largest
from ort_dynamo.verification.equal_choice import is_same_choice
from ort_dynamo.verification.find_stage import find_stage
from ort_dynamo.verification.in_double import InDouble
from ort_dynamo.verification.models import LoweredIsland, in_double, nodes_of, plainly, spell_nodes
from ort_dynamo.verification.record import GraphRun, IslandRun, random_states_set
from ort_dynamo.verification.repeat import write_operator, written
from ort_dynamo.verification.result import Choice, Fault

__all__ = ["Search", "find_fault"]


@dataclass(frozen=True)
class Search:
    """The result of a search for a fault.

    Attributes:
        fault: the fault, or None.
        choices: the operators that chose other elements than torch, of equal ones. All that follows from them differs.
    """

    fault: Fault | None
    choices: tuple[Choice, ...] = ()


def find_fault(runs: Sequence[GraphRun], folder: Path) -> Search:
    """Find the first fault of some runs.

    Islands whose results differ come first, in the order of their runs, and then the graphs around them. An operator
    may be wrong by less than shows in the results of its island, so all operators are looked at in the end.

    Args:
        runs: the recorded runs, in order.
        folder: where the program that repeats the fault is written.
    """
    choices: dict[str, Choice] = {}
    around: list[tuple[GraphRun, dict[str, Any]]] = []
    for run in runs:
        chosen: dict[str, Any] = {}
        for island in run.islands:
            if not _differs(island):
                continue
            steps = _walked(island, folder)
            choices |= {f"{run.graph.role} {node.name}": _choice(node, run) for node in steps.choices}
            chosen |= {node.meta.get(WHOLE_NODE, node.name): result for node, result in steps.choices.items()}
            expected, exact = (steps.results, steps.results) if steps.choices else _interpreted(island)
            if fault := steps.fault or find_stage(island, expected, exact, folder):
                return Search(fault)
            if not steps.choices and (fault := _least_exact([island], folder, least=0.0)):
                return Search(fault)
        around.append((run, chosen))
    for run, chosen in around:
        if (fault := _around(run, chosen)) is not None:
            return Search(fault)
    islands = [island for run in runs for island in run.islands]
    for island in islands:
        if fault := _walked(island, folder).fault:
            return Search(fault)
    return Search(None if choices else _least_exact(islands, folder, least=FACTOR_OF_ONE), tuple(choices.values()))


def _choice(node: Node, run: GraphRun) -> Choice:
    return Choice(str(node.target), node.name, run.graph.role, user_line(node))


def _differs(island: IslandRun) -> str:
    expected, exact = _interpreted(island)
    return first_problem(island.outputs, expected, lambda: exact, scale=largest(expected))


def _interpreted(island: IslandRun) -> tuple[Sequence[Any], Sequence[Any]]:
    """Give the results of an island's operators in torch, and in float64."""
    return _in_torch(island.gm, island.inputs)


def _in_torch(
    gm: GraphModule, inputs: Sequence[Any], chosen: Mapping[Node, Any] | None = None
) -> tuple[Sequence[Any], Sequence[Any]]:
    mode = InDouble()
    with plainly(), mode:
        results = tuple(_Choosing(gm, chosen or {}).run(*inputs))
    return results, tuple(map(mode.read, results))


class _Choosing(Interpreter):
    """Runs a graph in torch, with the results that some operators had in ONNX Runtime.

    Args:
        gm: the graph.
        chosen: node -> its result.
    """

    def __init__(self, gm: GraphModule, chosen: Mapping[Node, Any]) -> None:
        super().__init__(gm)
        self._chosen = chosen

    def run_node(self, n: Node) -> Any:
        """Run a node, or take its result."""
        return self._chosen[n] if n in self._chosen else super().run_node(n)


# -- one operator ----------------------------------------------------------------------------------------------------


class _Found(Exception):  # noqa: N818
    """The first operator that differs."""

    def __init__(self, node: Node, args: Any, kwargs: Any, problem: str) -> None:
        super().__init__(node, problem)
        self.node, self.given, self.problem = node, (args, kwargs), problem


class _Steps(Interpreter):
    """Runs each operator in torch on the values that ONNX Runtime computed, and compares the two results.

    Args:
        gm: the island.
        values: node -> ONNX Runtime's result, or a tuple of them, some of which may be None.

    Attributes:
        choices: the nodes that chose other elements than torch, of equal ones -> their results.
    """

    def __init__(self, gm: GraphModule, values: dict[Node, Any]) -> None:
        super().__init__(gm)
        self._values_of = values
        self.choices: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node; go on with the result of ONNX Runtime."""
        expected = super().run_node(n)
        if n not in self._values_of:
            return expected
        found = self._values_of[n]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        several = isinstance(expected, (tuple, list))
        ours, eager = (found, expected) if several else ((found,), (expected,))
        if n.target not in UNDEFINED and (problem := self._problem(n, ours, eager, args, kwargs)):
            raise _Found(n, args, kwargs, problem)
        together = [_like(one, other) for one, other in zip(ours, eager, strict=True)]
        result = (
            type(expected)(together)
            if type(expected) in (tuple, list)
            else (tuple(together) if several else together[0])
        )
        if n in self.choices:
            self.choices[n] = result
        return result

    def _problem(self, node: Node, ours: Any, eager: Any, args: Any, kwargs: Any) -> str:
        def exact() -> Any:
            results = in_double(node.target, args, kwargs)
            return results if isinstance(results, tuple) else (results,)

        if is_same_choice(node.target, args, kwargs, ours, eager):
            if not torch.equal(ours[-1], eager[-1]):
                self.choices[node] = None
            ours = [None if isinstance(one, torch.Tensor) and one.dtype is torch.int64 else one for one in ours]
        return first_problem(ours, eager, exact, inputs=tree_leaves((args, kwargs)))


def _like(found: Any, expected: Any) -> Any:
    """Return ONNX Runtime's numbers in the layout of torch's result."""
    if found is None or not isinstance(expected, torch.Tensor):
        return expected
    found = found.to(expected.dtype)
    return found if found.stride() == expected.stride() else copy_with_strides(found, expected.stride())


@dataclass(frozen=True)
class _Walk:
    """The operators of an island, looked at one by one.

    Attributes:
        fault: the first that differs.
        choices: those that chose other elements than torch, of equal ones -> their results.
        results: the results of the last operators in torch, from the values of ONNX Runtime that they read.
    """

    fault: Fault | None = None
    choices: Mapping[Node, Any] = field(default_factory=dict)
    results: Sequence[Any] = ()


def _walked(run: IslandRun, folder: Path) -> _Walk:
    """Look at an island's operators, as they were lowered, one by one."""
    island = LoweredIsland(run.gm, run.graph.spec)
    steps = _steps(run, island, _Steps)
    if steps is None:
        return _Walk()
    try:
        with plainly():
            results = steps.run(*run.inputs)
    except _Found as found:
        return _Walk(_operator(found, run, island, folder))
    return _Walk(None, steps.choices, results)


_AnySteps = TypeVar("_AnySteps", bound=_Steps)


def _steps(run: IslandRun, island: LoweredIsland, kind: type[_AnySteps]) -> _AnySteps | None:
    """Run an island as it was lowered, with every value as an output; None if only fused kernels can run it."""
    gm = run.gm
    more = list(dict.fromkeys(value for node in gm.graph.nodes for value in _values_of(island, node)))
    try:
        results = island.run(run.inputs, more)
    except OrtDynamoError:
        if run.graph.target.fuses_kernels:
            return None
        raise
    outputs = dict(zip((*island.model.graph.outputs, *more), results, strict=True))
    return kind(
        gm, {node: _read(island.values[node], outputs) for node in gm.graph.nodes if _is_operator(node, island)}
    )


class _Inexact(_Steps):
    """Looks for the operator whose error is largest, relative to that of torch.

    Attributes:
        worst: how many times torch's error it has, and the operator.
    """

    def __init__(self, gm: GraphModule, values: dict[Node, Any]) -> None:
        super().__init__(gm, values)
        self.worst: tuple[float, _Found | None] = (0.0, None)

    def _problem(self, node: Node, ours: Any, eager: Any, args: Any, kwargs: Any) -> str:
        exact = in_double(node.target, args, kwargs)
        for one, other, wide in zip(ours, eager, exact if isinstance(exact, tuple) else (exact,), strict=True):
            factor, problem = excess(one, other, wide)
            if factor > self.worst[0]:
                self.worst = factor, _Found(node, args, kwargs, problem)
        return ""


def _least_exact(islands: Sequence[IslandRun], folder: Path, *, least: float) -> Fault | None:
    """Find the operator that adds most to a difference that no operator has alone.

    Args:
        islands: the islands that it may be in.
        folder: where the program that repeats the fault is written.
        least: how many times torch's error it has at least.
    """
    found: list[tuple[float, _Found, IslandRun, LoweredIsland]] = []
    for run in islands:
        island = LoweredIsland(run.gm, run.graph.spec)
        steps = _steps(run, island, _Inexact)
        if steps is None:
            continue
        with plainly():
            steps.run(*run.inputs)
        factor, one = steps.worst
        if one is not None and factor > least:
            found.append((factor, one, run, island))
    if not found:
        return None
    _, one, run, island = max(found, key=lambda item: item[0])
    return _operator(one, run, island, folder)


def _is_operator(node: Node, island: LoweredIsland) -> bool:
    is_call = node.op == "call_function" and node.target is not getitem
    return is_call and any(isinstance(one, ir.Value) for one in tree_leaves(island.values[node]))


def _values_of(island: LoweredIsland, node: Node) -> list[ir.Value]:
    """List the values of a node that are to become outputs."""
    if not _is_operator(node, island):
        return []
    values = [one for one in tree_leaves(island.values[node]) if isinstance(one, ir.Value)]
    return [one for one in values if not one.is_graph_output()]


def _read(value: Any, outputs: dict[ir.Value, torch.Tensor]) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(None if one is None else outputs.get(one) for one in value)
    return outputs.get(value)


def _operator(found: _Found, run: IslandRun, island: LoweredIsland, folder: Path) -> Fault:
    node, (args, kwargs) = found.node, found.given
    nodes = spell_nodes(nodes_of(island.model, node))
    items: set[Any] = {user.args[1] for user in node.users if user.target is getitem}
    read = sorted(items) or None
    culprit, repeat, unwritten = "lowering or kernel", "", ""
    if isinstance(node.target, OpOverload):
        try:
            alone = run_alone(node.target, args, kwargs, read)
        except OrtDynamoError as error:  # its sizes are numbers now, and another lowering may be tried
            alone, unwritten = Alone("", (), ""), f" (it cannot run alone: {error})"
        if alone.problem:
            culprit = alone.culprit
            name = f"{run.graph.role}-{node.name}"
            repeat, unwritten = written(write_operator, folder, name, node.target, args, kwargs, read, user_line(node))
    return Fault(
        operator=str(node.target),
        node=node.name,
        graph=run.graph.role,
        module=module_path(node),
        line=user_line(node),
        problem=found.problem,
        culprit=culprit,
        cause=_cause(culprit, node, run) + unwritten,
        onnx_nodes=nodes,
        repeat=repeat,
    )


def _cause(culprit: str, node: Node, run: IslandRun) -> str:
    target = run.graph.target
    kernel = f"a kernel of {target.package} {target.version} ({target.provider})"
    lowering = f"the lowering {_lowering_name(node)}"
    if culprit == "kernel":
        return f"{kernel}: another implementation of these ONNX nodes gives torch's result"
    if culprit == "lowering":
        return f"{lowering}: another implementation of its ONNX nodes gives the same wrong result"
    return f"{lowering}, or {kernel}; nothing else here runs these ONNX nodes"


def _lowering_name(node: Node) -> str:
    function: Any = find_lowering(node.target) if isinstance(node.target, OpOverload) else None
    if function is None:
        return f"of {node.target} in onnxscript's torch_lib"
    name = name_of(function)
    return f"{name}, which your program registered" if is_from_outside(node.target) else name


# -- the graph around the islands ------------------------------------------------------------------------------------


def _around(run: GraphRun, chosen: Mapping[str, Any]) -> Fault | None:
    """Compare a graph with its own operators in torch: where islands are right, torch's part of it is wrong.

    Args:
        run: a run of the graph.
        chosen: name of an operator that chose others of equal elements -> its result.
    """
    role = run.graph.role
    whole = run.graph.whole.module({})
    names = zip(whole.graph.nodes, run.graph.origins.nodes, strict=True)
    results = {node: chosen[origin.name] for node, origin in names if origin.name in chosen}
    with random_states_set(run.generators):
        expected, exact = _in_torch(whole, run.inputs, results)
    problem = first_problem(run.outputs, expected, lambda: exact, scale=largest(expected))
    if not problem:
        return None
    return Fault(
        operator="",
        node="",
        graph=role,
        module="",
        line="",
        problem=problem,
        culprit="outside",
        cause="the graph around the sessions, which torch runs: each session gives the results of its operators",
    )
