"""Runs passes on a graph: each is timed and recorded, fake values follow, and an error names its pass."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnx_ir as ir
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.errors import OrtDynamoError, PassBrokeGraphError, PassFailedError
from ort_dynamo.graph.build import PassRecord
from ort_dynamo.passes.fx.analysis.fake_values import FakeValues, caller_layout, differences, looks_same
from ort_dynamo.passes.rewrites import noting_rewrites
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = ["run_passes"]

_log = logging.getLogger(__name__)


class _Pass(Protocol):
    def __call__(self, graph: Any, /) -> Any: ...


def run_passes(
    passes: Sequence[_Pass], graph: GraphModule | ir.Model, *, check: bool = False, folder: str | None = None
) -> tuple[PassRecord, ...]:
    """Run passes on a graph, in order and in place.

    After each pass that changes an FX graph, the fake values of the changed nodes and of all that follow are
    propagated anew. After each pass on an ONNX model, an output that states no type or shape gets those of the value
    whose place it takes: a model file needs both.

    Args:
        passes: passes on the kind of graph that `graph` is: torch's PassBase, or onnx_ir's InPlacePass.
        graph: an FX graph or an ONNX model.
        check: check the graph before the first pass and after each.
        folder: an existing or new folder, which gets the graph that a failing pass was given.

    Returns:
        A record of each pass.

    Raises:
        PassFailedError: a pass raised, or left calls that no fake value fits; chained to the error.
        PassBrokeGraphError: with `check`, the graph is invalid.
    """
    if not passes:
        return ()
    values: FakeValues | _OutputTypes = FakeValues(graph) if isinstance(graph, GraphModule) else _OutputTypes(graph)
    checker = _checker(graph) if check else None
    ends = _Ends(graph)
    records = []
    note = noting_rewrites(graph)
    counted = _operators(graph)
    for pass_ in passes:
        name = repr(pass_) if dataclasses.is_dataclass(pass_) else type(pass_).__name__
        given = _text(graph) if check else None
        begin = time.perf_counter()
        try:
            result = pass_(graph)
            _check_result(pass_, result, graph)
            seconds = time.perf_counter() - begin
            if result.modified:
                ends.check()
                values.update()
            note(name, result.modified)
        except OrtDynamoError:
            raise  # it tells the user the remedy
        except Exception as error:
            when = "left it" if given is None else "was given it"
            kept = _kept(name, _text(graph) if given is None else given, when, folder)
            raise PassFailedError(name=name, error=f"{type(error).__name__}: {error}", graph=kept) from error
        before, counted = counted, _operators(graph) if result.modified else counted
        records.append(
            PassRecord(
                name,
                seconds,
                result.modified,
                getattr(result, "summary", None),
                before.total(),
                counted.total(),
                tuple(
                    (one, before[one], counted[one])
                    for one in sorted({*before, *counted})
                    if before[one] != counted[one]
                ),
            )
        )
        if checker is not None:
            checker.check(name)
    if _log.isEnabledFor(logging.DEBUG):
        kind = "FX graph" if isinstance(graph, GraphModule) else "ONNX model"
        changed = [f"{one.name.partition('(')[0]} ({one.seconds * 1000:.0f} ms)" for one in records if one.modified]
        if changed:
            _log.debug("%d of %d passes changed the %s: %s", len(changed), len(records), kind, ", ".join(changed))
    return tuple(records)


def _operators(graph: GraphModule | ir.Model) -> Counter[str]:
    """Count the nodes by operator; inputs and output of an FX graph are operators, too."""
    if isinstance(graph, GraphModule):
        return Counter(str(node.target) if node.op == "call_function" else node.op for node in graph.graph.nodes)
    return Counter(node.op_type for node in graph.graph)


class _Ends:
    """The inputs and outputs of a graph, which its callers know by their places."""

    def __init__(self, graph: GraphModule | ir.Model) -> None:
        self._graph = graph
        self._inputs, self._outputs = _ends(graph)

    def check(self) -> None:
        """Raise ValueError if there are more or fewer of them, or if an input is at another place."""
        inputs, outputs = _ends(self._graph)
        for kind, before, now in (("inputs", len(self._inputs), len(inputs)), ("outputs", self._outputs, outputs)):
            if before != now:
                raise ValueError(f"the graph had {before} {kind}, and has {now}: a pass keeps them, in their order")
        moved = [one for one, other in zip(self._inputs, inputs, strict=True) if one is not other and one in inputs]
        if moved:
            names = ", ".join(str(one.name) for one in moved)
            raise ValueError(f"the inputs {names} are at other places: a pass keeps their order")


def _ends(graph: GraphModule | ir.Model) -> tuple[Sequence[Node | ir.Value], int]:
    """Return the inputs of a graph, and the number of its outputs."""
    if isinstance(graph, GraphModule):
        (output,) = graph.graph.find_nodes(op="output")
        return list(graph.graph.find_nodes(op="placeholder")), len(tree_leaves(output.args))
    return list(graph.graph.inputs), len(graph.graph.outputs)


class _OutputTypes:
    """The types and shapes that a model states of its outputs."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._stated = [(value.type, value.shape) for value in model.graph.outputs]

    def update(self) -> None:
        """State them of outputs that have come without."""
        for value, (type_, shape) in zip(self._model.graph.outputs, self._stated, strict=True):
            value.type, value.shape = value.type or type_, value.shape or shape


def _text(graph: GraphModule | ir.Model) -> str:
    return str(graph.graph) if isinstance(graph, GraphModule) else str(graph)


def _check_result(pass_: object, result: object, graph: object) -> None:
    """Raise TypeError if an FX pass returned no result, or another graph; onnx_ir checks those of its own passes."""
    if not isinstance(pass_, PassBase):
        return
    if not isinstance(result, PassResult):
        raise TypeError(
            f"call() returned {result!r}, not a PassResult: end it with return PassResult(graph_module, modified)"
        )
    if result.graph_module is not graph:
        raise TypeError("call() returned another graph: change the one that it is given, and return that")


def _kept(name: str, text: str, when: str, folder: str | None) -> str:
    """Write a graph to the folder, or else to the log; return the sentence that tells where it is."""
    if folder is None:
        _log.debug("%s failed on this graph, as it %s:\n%s", name, when, text)
        return (
            "To see the graph, run with TORCH_LOGS=+ort_dynamo, or set "
            "options={'save_onnx': FOLDER, 'debug': {'verify': True}} to write it to a file."
        )
    place = Path(folder) / f"failed_{name.partition('(')[0]}.txt"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    return f"The graph, as the pass {when}, is in {place}."


def _checker(graph: GraphModule | ir.Model) -> _FxChecker | _OnnxChecker:
    return _FxChecker(graph) if isinstance(graph, GraphModule) else _OnnxChecker(graph)


_BEFORE = "what comes before the first pass"


class _FxChecker:
    """Checks that an FX graph is well-formed, has the same results, and that each fake value is the value of its call.

    Nodes that AOTAutograd leaves without meta["val"], such as assertions, may stay so.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._without = {node for node in gm.graph.nodes if _lacks_value(node)}
        self._outputs = _outputs(gm)
        self.check(_BEFORE)

    def check(self, name: str) -> None:
        """Raise, naming the pass that has run, if the graph is invalid."""
        try:
            self._gm.graph.lint()
        except Exception as error:  # lint passes on any error that it meets
            raise PassBrokeGraphError(name=name, kind="FX", error=error) from error
        for problem in self._problems():
            raise PassBrokeGraphError(name=name, kind="FX", error=problem)

    def _problems(self) -> Iterator[str]:
        for node in self._gm.graph.nodes:
            if _lacks_value(node) and node not in self._without:
                yield f"{node.format_node()} has no fake value in meta['val']"
        yield from differences(self._gm)
        for index, (before, after) in enumerate(itertools.zip_longest(self._outputs, _outputs(self._gm))):
            if not looks_same(before, after):
                yield f"output {index} was {caller_layout(before)} and is {caller_layout(after)}"


def _lacks_value(node: Node) -> bool:
    return node.op == "call_function" and "val" not in node.meta


def _outputs(gm: GraphModule) -> list[Any]:
    """Return the fake values of a graph's outputs, and constants."""
    (output,) = gm.graph.find_nodes(op="output")
    returned = tree_leaves(output.args)
    return [one.meta.get("val") if isinstance(one, Node) else one for one in returned]


class _OnnxChecker:
    """Checks that a model is valid ONNX: onnx.checker, which also asks for a topological order, and its outputs.

    Each graph makes its outputs itself, and those of the main graph have the types and the ranks that they had.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._outputs = _kinds(model)
        self.check(_BEFORE)

    def check(self, name: str) -> None:
        """Raise, naming the passes that have run, if the model is invalid."""
        for problem in self._problems():
            raise PassBrokeGraphError(name=name, kind="ONNX", error=problem)
        try:
            onnx.checker.check_model(ir.to_proto(self._model))
        except onnx.checker.ValidationError as error:
            raise PassBrokeGraphError(name=name, kind="ONNX", error=error) from error

    def _problems(self) -> Iterator[str]:
        for graph in (self._model.graph, *self._model.graph.subgraphs()):
            for value in graph.outputs:
                made = value.producer()
                if not (made.graph is graph if made else value.is_graph_input() or value.is_initializer()):
                    yield f"nothing makes the output {value.name} of {graph.name}"
        for index, (before, after) in enumerate(itertools.zip_longest(self._outputs, _kinds(self._model))):
            if before != after:
                yield f"output {index} was {before} and is {after}"


def _kinds(model: ir.Model) -> list[tuple[ir.DataType | None, int | None]]:
    """Return the types and ranks of a model's outputs."""
    return [(value.dtype, None if value.shape is None else len(value.shape)) for value in model.graph.outputs]
