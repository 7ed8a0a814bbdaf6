"""The backend that torch.compile(backend="ort_train") calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.capture.whole_graphs import trace_whole
from ort_dynamo.compilation.choose_target import placement_threads, session_device
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import EXTRA_LISTENERS, Listener, Listeners
from ort_dynamo.listeners.compare_ranks import CompareRanks
from ort_dynamo.listeners.record_cuda_graphs import RecordCudaGraphs
from ort_dynamo.listeners.save_files import SaveFiles
from ort_dynamo.listeners.trace_cache import TraceCache, loading, stored_key
from ort_dynamo.listeners.write_trace import WriteTrace
from ort_dynamo.options.groups import Options, parse_options
from ort_dynamo.program.garbage import fewer_collections
from ort_dynamo.program.progress import showing
from ort_dynamo.report.counts import report_left_out, reset_messages
from ort_dynamo.report.record import RECORDS, CompileRecord
from ort_dynamo.report.recorder import Records
from ort_dynamo.report.summary import print_at_exit
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.importing import restore_torch
from ort_dynamo.runtime.session_attributes import check_attributes
from ort_dynamo.saving.program import read_program
from ort_dynamo.torch_internals.cuda_graphs import forget_recordings
from ort_dynamo.torch_internals.tracing.frames import watch_attempts
from ort_dynamo.torch_internals.tracing.wrappers import zeros_in_memory
from ort_dynamo.torch_internals.versions import say_if_untested

__all__ = ["compile_recorded", "compile_step", "ort_train"]

restore_torch()  # before Dynamo traces the first model: the program may have imported onnxruntime itself
print_at_exit()
watch_attempts(report_left_out)


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
        options: option name -> value (`python -m ort_dynamo help options`).

    Returns:
        A callable with the graph's own signature.

    Raises:
        UnknownModeError, UnknownOptionError, InvalidOptionError: bad arguments.
        RuntimeNotInstalledError, SeveralRuntimesError, ProviderNotAvailableError: no usable ONNX Runtime.
        FallbackRefusedError: fallback="error" and a node that ONNX Runtime cannot take.
    """
    compiled, _ = compile_recorded(gm, example_inputs, parse_options(mode, options))
    return compiled


@showing()
@fewer_collections()
def compile_recorded(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options
) -> tuple[Callable[..., Any], CompileRecord]:
    """Compile a graph as `ort_train` does, and return the record of the compile too; raises the same errors."""
    say_if_untested()
    installed_runtime()
    check_attributes(options.session.session_options)
    records, threads = Records(), placement_threads(options)
    calls = options.verify.verified_calls
    if calls:
        options = options.without_cuda_graphs()
    stored_as = None if calls or EXTRA_LISTENERS else stored_key(gm, options, threads)
    saved = None if options.dump.save_onnx is None else SaveFiles(options.dump, gm, example_inputs)
    listeners = _listeners(options, records, *([saved] if saved else []))
    if stored_as is not None:
        listeners.append(TraceCache(options, records))
    if calls:
        from ort_dynamo.verification.calls import CheckedCalls  # which most programs do without

        checked = CheckedCalls(gm, calls, read_program(gm, example_inputs).inputs)
        listeners.append(checked.recorder)
    device = session_device(gm, example_inputs)
    compilation = Compilation(options, device, threads, Listeners(*listeners), records.graphs)
    with loading(compilation.cache, records):
        compiled = compilation.run(gm, example_inputs, stored_as)
    record = records.close(saved.close() if saved else None)
    compiled = zeros_in_memory(compiled, example_inputs)
    return (checked.of(compiled) if calls else compiled), record


def _listeners(options: Options, records: Records, *others: Listener) -> list[Listener]:
    """List the listeners of each compile, in the order of their calls; the first records errors of later ones."""
    observers = [make() for make in EXTRA_LISTENERS]
    return [
        records,
        *others,
        CompareRanks(options.segment),
        RecordCudaGraphs(options.session),
        WriteTrace(),
        *observers,
    ]


@showing()
@fewer_collections()
def compile_step(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    around: Callable[[GraphModule], nn.Module],
    more_inputs: Sequence[torch.Tensor],
    options: Options,
) -> tuple[Callable[..., Any], CompileRecord]:
    """Compile a module around a Dynamo graph, such as a whole training step, as one graph without gradients of its own.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake; one that requires a gradient is taken for a parameter without.
        around: makes the module that calls the graph. It may compute gradients inside.
        more_inputs: inputs that this has after those of the graph.
        options: all options; nothing is saved.

    Raises:
        The errors that `ort_train` raises.
    """
    say_if_untested()
    installed_runtime()
    records, device = Records(), session_device(gm, example_inputs)
    listeners = Listeners(*_listeners(options, records))
    threads = placement_threads(options)
    compilation = Compilation(options, device, threads, listeners, records.graphs, role="training")
    compiled = trace_whole(gm, example_inputs, compilation.inference, around, more_inputs)
    return compiled, records.close()


def _reset() -> None:
    """Forget all compiled graphs, the records of their compiles and the warnings that were given."""
    CACHE.clear()
    RECORDS.clear()
    reset_messages()
    forget_recordings()


ort_train.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
