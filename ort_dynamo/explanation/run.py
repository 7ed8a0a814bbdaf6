"""Compiles and runs a function once, as a dry run, and explains the graphs that this takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.backend import ort_train
from ort_dynamo.cache.disk import stored_place
from ort_dynamo.compilation.choose_target import placement_threads, session_device
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import GraphCompilation, Listeners
from ort_dynamo.explanation.collect import Collect
from ort_dynamo.explanation.explanation import Explanation
from ort_dynamo.explanation.measure import Measuring
from ort_dynamo.explanation.notes import earlier_recompiles, function_name
from ort_dynamo.explanation.step_calls import StepCalls
from ort_dynamo.options.groups import Options, parse_options
from ort_dynamo.program.asked_settings import asked_settings, check_needs_none
from ort_dynamo.program.program_state import State, unchanged
from ort_dynamo.program.progress import clocked, showing
from ort_dynamo.program.read_objects import read_by
from ort_dynamo.report.record import RECORDS
from ort_dynamo.report.summary import summarize
from ort_dynamo.torch_internals.aot import metadata
from ort_dynamo.torch_internals.autograd import gradients_unless_freed
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.tracing.dry_run import compile_apart, released, untouched
from ort_dynamo.torch_internals.tracing.frames import frames, generated_function, uncompiled
from ort_dynamo.torch_internals.tracing.wrappers import zeros_in_memory

__all__ = ["explain"]


def explain(
    function: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    measure: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Explanation:
    """Compile and run a model once, and tell where its operators run, and where memory and time go.

    The forward runs on the given inputs, and so does the backward if a result requires a gradient and the function has
    not run it itself. Call this under torch.no_grad() or torch.autocast if the program calls the model so, and in
    train() or eval() mode. Nothing is changed: attributes of modules, parameters, buffers, gradients, random
    generators, compiled functions and `summary()` are as before. Sessions stay in the caches, so the first step of
    training finds them. If it is a function, the modules, optimizers and tensors that it names are put back, and so are
    tensors that a compiled graph writes to. torch before 2.13 forgets everything compiled (torch.compiler.reset()).

    Args:
        function: a module or function. One that was compiled with ort_train is explained with its options.
        inputs: positional arguments of the call.
        options, mode: those of torch.compile(backend="ort_train"), for a function that is not compiled. Nothing is
            saved, and no CUDA graph is recorded. Fallbacks are told, also with fallback="error".
        dynamic: torch.compile's `dynamic`, for a function that is not compiled.
        measure: whether to run some more steps, and measure the time of each session and ONNX node.
        kwargs: keyword arguments of the call with names that this function takes itself, such as `options`.
        named: other keyword arguments of the call.

    Raises:
        UnknownModeError, UnknownOptionError, InvalidOptionError: bad options.
        InvalidArgumentError: the function cannot be called, or is compiled by another backend, or `options`, `mode` or
            `dynamic` is given for a compiled one, or no inputs are given, and it needs some.
    """
    mode, options, dynamic, _ = asked_settings("explain", function, mode=mode, options=options, dynamic=dynamic)
    asked = parse_options(mode, options)
    plain = _uncompiled(function)
    call = (inputs, {**(kwargs or {}), **named})
    if not any(call):
        check_needs_none("explain", plain)
    before = frames(RECORDS.since)
    begin = time.time()
    with (
        untouched(),
        _called_itself(plain),
        unchanged([*read_by(plain, *inputs, *call[1].values()).values(), *tree_leaves(call)]) as state,
        released() as around,
        closing(_DryRun(_without_effects(asked), state, around, Measuring() if measure else None)) as run,
    ):
        step = _Step(compile_apart(plain, backend=run, dynamic=dynamic), call, state)
        step()
        measured = run.measuring.measure(step) if run.measuring is not None else None
        seen = frames(begin)
        graphs = [one.graph(function_name(one.compile_id, seen)) for one in run.collected]
        if run.measuring is not None:
            graphs = [run.measuring.fill(number, graph) for number, graph in enumerate(graphs)]
        summary = summarize(tuple(one.compiled() for one in run.collected), seen, ())
        return Explanation(
            name=getattr(plain, "__qualname__", type(plain).__qualname__).rpartition("<locals>.")[2],
            graphs=tuple(graphs),
            summary=dataclasses.replace(summary, recompiles=(*summary.recompiles, *earlier_recompiles(before, seen))),
            runtime=run.collected[-1].runtime if run.collected else "",
            options=_spelled(mode, options),
            measured=measured,
            cache=_folder(asked),
            calls=run.calls.largest(run.collected),
        )


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, nn.Module):
        return uncompiled(function)
    return generated_function(function)


def _spelled(mode: str | None, options: Mapping[str, Any] | None) -> Mapping[str, str]:
    named = {} if mode is None else {"mode": mode}
    return {**named, **{name: str(value) for name, value in (options or {}).items()}}


def _folder(options: Options) -> str:
    place = stored_place(options.cache)
    return "" if place is None else str(place.path)


def _without_effects(options: Options) -> Options:
    """Return the options without files, CUDA graphs and refusals."""
    return dataclasses.replace(
        options,
        segment=dataclasses.replace(options.segment, fallback="eager"),
        session=dataclasses.replace(options.session, cuda_graphs=False),
        dump=dataclasses.replace(options.dump, save_onnx=None),
    )


@contextmanager
def _called_itself(function: Callable[..., Any]) -> Iterator[None]:
    """Have a module that was compiled in place run its own code."""
    call = function.__dict__.get("_compiled_call_impl") if isinstance(function, nn.Module) else None
    if call is None:
        yield
        return
    function._compiled_call_impl = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        function._compiled_call_impl = call  # type: ignore[attr-defined]


class _DryRun:
    """The backend of a dry run: it compiles graphs as ort_train does, without records, files and caches of traces.

    Attributes:
        collected: the facts of each compile, in order.
        calls: counts the calls of its graphs.
        measuring: measures its sessions; None if nothing is measured.
    """

    reset = staticmethod(ort_train.reset)  # type: ignore[attr-defined]  # torch._dynamo.reset() frees its sessions, too

    def __init__(
        self,
        options: Options,
        state: State,
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
        measuring: Measuring | None,
    ) -> None:
        self.collected: list[Collect] = []
        self.calls = StepCalls()
        self.measuring = measuring
        self._options = options
        self._state = state
        self._around = around
        self._threads = placement_threads(options)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        written: set[int] = set()

        def opened(graph: GraphCompilation) -> None:
            written.update(_written_inputs())
            if self.measuring is not None:
                self.measuring.open(graph, len(self.collected))

        collect = Collect(self.calls, opened)
        device = session_device(gm, example_inputs)
        compilation = Compilation(self._options, device, self._threads, Listeners(collect, *self._measurers()))
        with clocked() as seconds, showing():
            compiled = compilation.run(gm, example_inputs)
        collect.stages = seconds
        self.collected.append(collect)
        return self._around(self._state.watched(zeros_in_memory(compiled, example_inputs), written))

    def __deepcopy__(self, memo: Any) -> _DryRun:
        """Return the same backend: Lightning copies the arguments of torch.compile, to compile again with them."""
        return self

    def close(self) -> None:
        """Let go of tensors and sessions: Dynamo keeps its backends."""
        self.collected, self.measuring, self._state = [], None, State()

    def _measurers(self) -> list[Measuring]:
        return [] if self.measuring is None else [self.measuring]


class _Step:
    """Calls the function, and computes the gradients of its results with respect to the leaves that it reads.

    Attributes:
        forward: seconds of the last call.
        backward: seconds of its backward; None without gradients, and if the function has run it itself.
    """

    def __init__(
        self, function: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]], state: State
    ) -> None:
        self._function, (self._args, self._kwargs), self._state = function, call, state
        self.forward = 0.0
        self.backward: float | None = None

    def __call__(self) -> None:
        begin = time.perf_counter()
        result = self._function(*self._args, **self._kwargs)
        _wait()
        self.forward, begin = time.perf_counter() - begin, time.perf_counter()
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        leaves = self._state.leaves
        if not (found and leaves):
            return
        if gradients_unless_freed(found, leaves, [torch.ones_like(one) for one in found]) is not None:
            _wait()
            self.backward = time.perf_counter() - begin


def _written_inputs() -> tuple[int, ...]:
    """Return the indices of the inputs that the graph writes to that AOTAutograd is at."""
    known = metadata()
    inputs = known.input_info if known is not None else []
    return tuple(index for index, info in enumerate(inputs) if info.mutates_data)


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
