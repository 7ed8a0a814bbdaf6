"""What torch.compile(backend="ort_train") calls."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.capture.trace import trace, without_gradients
from ort_dynamo.compiler import compile_graph
from ort_dynamo.marks import RETURNED_STRIDES, RETURNED_VIEWS
from ort_dynamo.opened import CACHE
from ort_dynamo.options.groups import Options, parse_options
from ort_dynamo.partition.cut import PartitionRecord, mark, partitioner
from ort_dynamo.passes.fx.analysis.aliases import returned_views
from ort_dynamo.passes.fx.analysis.eager_strides import returned_strides
from ort_dynamo.progress import showing
from ort_dynamo.report.counts import report, report_not_recorded, say_again
from ort_dynamo.report.record import RECORDS, CompileRecord, GraphRecord
from ort_dynamo.report.summary import print_at_exit
from ort_dynamo.runtime.capabilities import installed_runtime
from ort_dynamo.runtime.importing import restore_torch
from ort_dynamo.saving.compile import SavedCompile
from ort_dynamo.torch_internals.cuda_graphs import forget_recordings
from ort_dynamo.torch_internals.frames import current_compile_id
from ort_dynamo.torch_internals.versions import say_if_untested
from ort_dynamo.torch_internals.wrappers import zeros_in_memory
from ort_dynamo.trace_cache import finding, kept_key

__all__ = ["compile_recorded", "compile_step", "ort_train"]

restore_torch()  # before Dynamo traces the first model: the program may have imported onnxruntime itself
print_at_exit()


def ort_train(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: forward and backward run in ONNX Runtime sessions.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake.
        mode: one of ort_dynamo.options.groups.MODES, such as "debug".
        options: option name -> value (docs/options.md).

    Returns:
        A callable with the graph's own signature.

    Raises:
        UnknownModeError, UnknownOptionError, InvalidOptionError: bad arguments.
        RuntimeNotInstalledError, SeveralRuntimesError, ProviderNotAvailableError: no usable ONNX Runtime.
        FallbackRefusedError: fallback="error" and a node that ONNX Runtime cannot take.
    """
    compiled, _ = compile_recorded(gm, example_inputs, parse_options(mode, options))
    return compiled


def compile_recorded(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options
) -> tuple[Callable[..., Any], CompileRecord]:
    """Do what `ort_train` does, and give also what the compile learned; raises what it raises."""
    say_if_untested()
    installed_runtime()
    begin, keep = time.perf_counter(), RECORDS.begin()
    saved = None if options.dump.save_onnx is None else SavedCompile(options.dump.save_onnx, gm, example_inputs)
    partitions: list[PartitionRecord] = []
    graphs: list[GraphRecord] = []
    partition = partitioner(options, partitions.append)
    kept_as = kept_key(gm, options)
    compiling = partial(_compile, options=options, graphs=graphs, keeps=kept_as is not None)

    read: list[tuple[GraphRecord, PartitionRecord | None]] = []
    with showing(), finding(options, lambda *learned: read.append(learned), graphs):
        compiled = trace(
            gm,
            example_inputs,
            forward=partial(compiling, role="forward", partitions=partitions),
            backward=partial(compiling, role="backward"),
            inference=partial(
                _compile_inference, options=options, graphs=graphs, saved=saved, keeps=kept_as is not None
            ),
            partition=partition if saved is None else saved.naming(partition),
            kept_as=kept_as,
        )
    if not graphs:  # what was read of a forward whose backward is gone does not count
        for graph, cut in read:
            graphs.append(graph)
            partitions += [] if cut is None else [cut]
            report(graph.role, graph.native, graph.by_design, graph.chosen, graph.eager, len(graph.islands))
    record = CompileRecord(
        partition=partitions[0] if partitions else None,
        graphs=tuple(graphs),
        seconds=time.perf_counter() - begin,
        compile_id=current_compile_id(),
        saved=saved.write([graph.described for graph in graphs if graph.described is not None]) if saved else None,
    )
    keep(record)
    return zeros_in_memory(compiled, example_inputs), record


def compile_step(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    around: Callable[[GraphModule], nn.Module],
    more_inputs: Sequence[torch.Tensor],
    options: Options,
) -> tuple[Callable[..., Any], CompileRecord]:
    """Compile what is around a Dynamo graph, such as a whole training step, as one graph without gradients of its own.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake; one that requires a gradient is taken for a parameter without.
        around: makes the module that calls the graph. It may compute gradients inside.
        more_inputs: inputs that this has after those of the graph.
        options: all options; nothing is saved.

    Raises:
        What `ort_train` does.
    """
    say_if_untested()
    installed_runtime()
    begin, keep = time.perf_counter(), RECORDS.begin()
    graphs: list[GraphRecord] = []
    with showing():
        compiled = trace(
            gm,
            without_gradients(example_inputs),
            forward=_no_gradients,
            backward=_no_gradients,
            inference=partial(_compile_inference, options=options, graphs=graphs, saved=None, role="training"),
            partition=_no_gradients,
            around=around,
            more_inputs=more_inputs,
        )
    record = CompileRecord(None, tuple(graphs), time.perf_counter() - begin, current_compile_id())
    keep(record)
    return compiled, record


def _no_gradients(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a whole step has no gradients outside it: an input requires one")


def _reset() -> None:
    """Forget what was compiled, what was learned of it and what was said."""
    CACHE.clear()
    RECORDS.clear()
    say_again()
    forget_recordings()


ort_train.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _compile(
    gm: GraphModule,
    seen: slice,
    role: str,
    options: Options,
    graphs: list[GraphRecord],
    keeps: bool,
    partitions: Sequence[PartitionRecord] = (),
) -> Callable[[list[Any]], Any]:
    cut = partitions[-1] if partitions else None
    recorded = not any(graph.not_recorded for graph in graphs)
    run = compile_graph(
        gm,
        role,
        options,
        seen,
        graphs.append,
        graphs=graphs,
        keeps=keeps,
        partition=cut,
        forward_recorded=recorded,
    )
    report_not_recorded(role, graphs[-1].not_recorded)
    return run


def _compile_inference(
    gm: GraphModule,
    seen: slice,
    options: Options,
    graphs: list[GraphRecord],
    saved: SavedCompile | None,
    role: str = "inference",
    keeps: bool = False,
) -> Callable[[list[Any]], Any]:
    gm.meta[RETURNED_VIEWS] = returned_views(gm.graph)
    gm.meta[RETURNED_STRIDES] = returned_strides(gm.graph)
    passes = mark(gm, options)
    if saved is not None:
        saved.name(gm)

    def record(graph: GraphRecord) -> None:
        graphs.append(dataclasses.replace(graph, passes=passes + graph.passes))

    run = compile_graph(gm, role, options, seen, record, graphs=graphs, keeps=keeps)
    report_not_recorded(role, graphs[-1].not_recorded)
    return run
