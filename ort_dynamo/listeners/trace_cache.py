"""The cache of AOTAutograd: when it stores results, under which key, and how they find the islands."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import GraphModule

from ort_dynamo.cache.disk import DiskCache, context_key, keeps_traces
from ort_dynamo.cache.open_island import OpenedIsland
from ort_dynamo.compilation.events import BoxedRun, GraphCompilation, Listener
from ort_dynamo.graph.build import BuildSpec, spell_pass
from ort_dynamo.graph.function_key import NotKeyableError, spell_function
from ort_dynamo.listeners.stored_code import LOADING, IslandPlace, Loading, StoredCode
from ort_dynamo.lowering.registry import has_outside_lowerings
from ort_dynamo.options.groups import CacheOptions, DumpOptions, Options
from ort_dynamo.passes.outside import outside_functions, outside_fx_passes, outside_onnx_passes
from ort_dynamo.report.recorder import Records
from ort_dynamo.runtime.installed.capabilities import runtime_facts
from ort_dynamo.torch_internals.aot_cache import AOT_CACHE, precompiles

__all__ = ["WORTH_IT", "TraceCache", "loading", "stored_key"]


_log = logging.getLogger(__name__)  # TORCH_LOGS=+ort_dynamo shows it


class NotStoredError(Exception):
    """A graph whose trace is not to be stored, with the reason."""


def stored_key(gm: GraphModule, options: Options, threads: int) -> str | None:
    """Give our part of the key of AOTAutograd's cache; None, with a line in the log, if nothing of `gm` is stored."""
    try:
        _check_stored(gm, options)
        functions = _spell_functions(options)
    except NotStoredError as error:
        _log.debug("this graph is not stored in torch's cache: %s", error)
        return None
    extra = options.passes.extra_passes
    passes = [*outside_onnx_passes(first=True), *outside_onnx_passes(extra, first=False)]
    decided = dataclasses.replace(options, cache=CacheOptions())
    settings = options.session.resolved(on_cuda=True)  # wherever the graph is going to run
    context = (decided, settings, threads, torch.get_default_dtype(), *map(spell_pass, passes), *functions)
    return context_key(map(str, context), runtime_facts())


def _check_stored(gm: GraphModule, options: Options) -> None:
    """Check that the trace of a graph may be stored, and is worth it.

    An operator that needs a constant specializes on a symbolic float, such as 0.25. AOTAutograd does not store this
    guard, so the result would be used for other values, too. A program's own lowerings and passes on FX graphs decide
    the trace and may do anything.

    Raises:
        NotStoredError: it is not.
    """
    extra = options.passes.extra_passes
    if not AOT_CACHE:
        raise NotStoredError("this torch stores nothing of a backend that is not its own")
    if options.session.cuda_graphs:
        raise NotStoredError("it is recorded in a CUDA graph")
    if options.dump != DumpOptions():
        raise NotStoredError("options save or check each compile")
    if has_outside_lowerings() or outside_fx_passes(first=True) or outside_fx_passes(extra, first=False):
        raise NotStoredError("the program has its own lowerings, or passes on FX graphs")
    if any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in gm.graph.nodes):
        raise NotStoredError("it has a symbolic float")
    _check_wanted(gm, options)


def _spell_functions(options: Options) -> list[str]:
    """Give the functions of the program that decide the result, as text.

    Raises:
        NotStoredError: one of them has no text.
    """
    functions = outside_functions(options.passes.extra_passes)
    try:
        return [f"{role}: {spell_function(function)}" for role, function in sorted(functions.items())]
    except NotKeyableError as error:
        raise NotStoredError(f"a function of the program cannot be spelled: {error}") from error


WORTH_IT = 250
"""Nodes of Dynamo's graphs that a process compiles before results are stored unasked.

A node's tracing, cutting, probing and lowering take some 8 ms together, which a later process saves. torch's first key
takes 1.3 s, in this process and the later one: it reads torch's sources and imports inductor. (Measured with GPT-2,
BERT, Llama, ViT and ResNet on torch 2.13, two cores.)
"""

_seen = 0


def _check_wanted(gm: GraphModule, options: Options) -> None:
    global _seen
    _seen += len(gm.graph.nodes)
    asked = keeps_traces(options.cache)
    if asked is False:
        raise NotStoredError("the cache, or trace_cache, is off")
    if asked is None and _seen < WORTH_IT and not precompiles():
        reason = f"this process has traced {_seen} nodes, and below {WORTH_IT} a new trace is faster than torch's key"
        raise NotStoredError(reason)


class TraceCache(Listener):
    """Gives AOTAutograd our results to store with a graph, and has stored results find their islands.

    Args:
        options: all options.
        records: the records of the compile.
    """

    def __init__(self, options: Options, records: Records) -> None:
        self._options = options
        self._records = records

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        """Give code that torch can store."""
        places = {name: self._place(one, graph.spec) for name, one in graph.islands.items()}
        record, partition = self._records.graphs[-1], self._records.partition if graph.role == "forward" else None
        return StoredCode(
            graph.segmented.gm, graph.whole, graph.origins, places, record, partition, self._options.cache, run
        )

    @staticmethod
    def _place(island: OpenedIsland, spec: BuildSpec) -> IslandPlace | None:
        if island.key is None or island.stored_at is None:
            return None
        return IslandPlace(
            island.key, island.stored_at, spec.session, spec.in_order, spec.device, island.places, island.covers
        )


@contextmanager
def loading(stored: DiskCache | None, records: Records) -> Iterator[None]:
    """Let stored results of AOTAutograd find their islands while this is open, and record them."""
    token = LOADING.set(None if stored is None else Loading(stored, records.read, records.graphs))
    try:
        yield
    finally:
        LOADING.reset(token)
