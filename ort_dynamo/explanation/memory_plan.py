"""Report the tensors that a model saves for its backward and could recompute instead, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.capture.trace import trace
from ort_dynamo.compilation.choose_target import graph_target, placement_threads, session_device
from ort_dynamo.compilation.cut import cut, mark, run_checked, tag_recomputed
from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.notebook import ShownAsText
from ort_dynamo.options.groups import Options, RecomputeOptions, parse_options
from ort_dynamo.passes.fx.analysis.memory import MemoryRecord, memory_record
from ort_dynamo.passes.fx.analysis.plans import PlanRow, plan_rows
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.pipelines import plan_passes
from ort_dynamo.program.asked_settings import check_needs_none
from ort_dynamo.program.program_state import unchanged
from ort_dynamo.program.read_objects import read_by
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.tracing.dry_run import compile_apart, untouched
from ort_dynamo.torch_internals.tracing.frames import uncompiled

__all__ = ["GraphPlan", "MemoryPlan", "memory_plan"]


@dataclass(frozen=True)
class GraphPlan:
    """One graph of a model.

    Attributes:
        rows: plans to choose from, most bytes first; each states its effect alone, beside recompute_casts.
        record: the result of the given options for the graph.
    """

    rows: tuple[PlanRow, ...]
    record: MemoryRecord

    def __str__(self) -> str:
        header = ("recompute_plan", "times", "fewer bytes", "of saved", "extra time", "in symbols")
        cells = [header, *(_cells(row, self.record.nbytes_without) for row in self.rows)]
        symbolic = any(line[-1] for line in cells[1:])
        columns = list(zip(*cells, strict=True))[: None if symbolic else -1]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join([f"{name:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(rest, widths[1:], strict=True))])
            for name, *rest in zip(*columns, strict=True)
        ]
        return "\n".join([self.record.summary(), *(line.rstrip() for line in lines)])


def _cells(row: PlanRow, before: int) -> tuple[str, ...]:
    symbols = "" if row.size.is_number else str(row.size)
    return (
        str(row.plan),
        str(row.frequency),
        f"{row.nbytes:,}",
        f"{row.nbytes / before:.1%}",
        f"{row.time:.1%}",
        symbols,
    )


@dataclass(frozen=True, repr=False)
class MemoryPlan(ShownAsText):
    """The graphs of a model that have a backward, in the order in which they run; its str is a table of each."""

    graphs: tuple[GraphPlan, ...]

    def __str__(self) -> str:
        if not self.graphs:
            return "No graph of this model has a backward: no tensor is saved."
        count = len(self.graphs)
        return "\n\n".join(f"Graph {i} of {count}: {graph}" for i, graph in enumerate(self.graphs, start=1))


def memory_plan(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> MemoryPlan:
    """List the plans for the option recompute_plan that exist in a model, with the bytes and the time of each.

    The model is captured as the backend captures it, and its forward runs once, in eager, since graphs after a graph
    break are known only then; nothing is saved for a backward. Parameters, buffers, gradients, inputs and random
    generators are put back, and so are the modules, optimizers and tensors that a function names. This takes memory
    for a copy of them. Everything compiled before stays compiled, from torch 2.13 on. Older releases forget it
    (torch.compiler.reset()).

    Args:
        model: a module or function; a compiled module is taken for the module in it.
        args: arguments of one training step's call. Call this under torch.autocast if training does, and in
            train() mode.
        options: torch.compile's options, to see their effect on each graph. Options of recomputation do not change the
            tables, except for recompute_casts.
        dynamic: torch.compile's `dynamic`.
        kwargs: keyword arguments of the call.

    Raises:
        UnknownOptionError, InvalidOptionError: bad options.
        InvalidArgumentError: the model cannot be called, or no arguments are given, and it needs some.
    """
    if not callable(model):
        raise InvalidArgumentError(function="memory_plan", name="model", value=model, expected="a module or a function")
    model = uncompiled(model)
    if not (args or kwargs):
        check_needs_none("memory_plan", model)
    found: list[GraphPlan] = []
    capture = _capture(parse_options(None, options), found)
    state = [*read_by(model, *args, *kwargs.values()).values(), *tree_leaves((args, kwargs))]
    with untouched(), unchanged(state), torch.enable_grad():
        compile_apart(model, backend=capture, dynamic=dynamic)(*args, **kwargs)
    return MemoryPlan(tuple(found))


def _capture(options: Options, found: list[GraphPlan]) -> Callable[..., Any]:
    """Give a backend that runs graphs in eager and appends the plans and the memory of each."""

    def partition(
        joint: GraphModule, inputs: Sequence[Any], *, target: Target, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        mark(joint, options, target, placement_threads(options))
        casts = RecomputeOptions(recompute_casts=options.recompute.recompute_casts)
        static = kwargs.get("static_lifetime_input_indices") or ()
        tag_recomputed(joint, replace(options, recompute=casts), target, static)
        rows = plan_rows(JointGraph(joint))
        halves = cut(joint, inputs, options, target, **kwargs)
        forward, backward, outputs = halves.forward, halves.backward, kwargs["num_fwd_outputs"]
        found.append(GraphPlan(rows, memory_record(joint, forward, backward, outputs)))
        run_checked(plan_passes(outputs), forward, options)  # its backward never runs
        return forward, backward

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        cuts = partial(partition, target=graph_target(session_device(gm, example_inputs), options))
        return trace(gm, example_inputs, forward=_as_is, backward=_as_is, inference=_as_is, partition=cuts)

    return backend


def _as_is(gm: GraphModule, _: slice) -> Callable[..., Any]:
    def run(given: list[Any]) -> Any:
        return gm(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
