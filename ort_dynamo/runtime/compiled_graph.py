"""Runs a session on torch's tensors, without copying them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.kernels.kernel_compiler import KernelStore
from ort_dynamo.runtime.observe.compared_run import compared
from ort_dynamo.runtime.observe.show_values import show_values
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.session_code import OwnSession, session_code
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.targets.target import Target

__all__ = ["CompiledGraph", "open_graph"]


class CompiledGraph:
    """A session with its calling convention: torch values in, a tuple of tensors out.

    Inputs are passed by DLPack. One whose memory layout differs from its spec (a gradient with other strides, a slice)
    is copied first. On the CPU, outputs are in ONNX Runtime's arena, and torch holds them until the last reference is
    gone. On CUDA they are torch's tensors, which ONNX Runtime fills. They have the dtype, shape and dimension order of
    their spec. Calls from several threads are safe. A forked child opens its own session at its first call.

    Args:
        built: the graph to run.
        opened: opens a session of it, in this process and again in a forked child.
        device: the device of the session's tensors.
        stream: the stream on which the session computes, if its device has streams.

    Attributes:
        run: runs it on one value per input spec: tensors on the session's device, or Python scalars. Raises Stopped if
            ONNX Runtime did not come to the end, and torch's error if memory runs out.
        show: opens a session that gives the values inside, with the indices of their FX nodes; None if it has none.
        target: the target of the session; None if it is not opened by `open_graph`.
    """

    def __init__(
        self,
        built: BuiltGraph,
        opened: Callable[[], Any],
        device: torch.device,
        stream: SessionStream | None = None,
    ) -> None:
        self.built = built
        self.device = device
        self.show: Callable[[], tuple[CompiledGraph, tuple[int, ...]] | None] = lambda: None
        self.target: Target | None = None
        self._own = OwnSession(opened, None if stream is None else stream.around)
        options = onnxruntime().RunOptions()
        options.log_severity_level = 4  # an error is raised; ONNX Runtime need not print it, too
        if stream is not None:  # the order on the stream is all the synchronisation that is needed
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.run: Callable[..., Any] = session_code(
            built, self._own, device, options, owned=None if stream is None else stream.owned
        )

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Run the session as `run` does."""
        return self.run(*values)


def open_graph(
    built: BuiltGraph, target: Target, device: torch.device, store: KernelStore | None = None
) -> CompiledGraph:
    """Open a built graph in a session on `device`; has the arguments and errors of `open_session`."""
    settings = built.session
    if not target.facts.computes_on_streams:
        compiled = CompiledGraph(built, partial(open_session, built, target, device, store=store), device)
    else:
        stream = SessionStream(device, dict(settings.provider_options), apart=settings.cuda_graphs)
        opened = partial(open_session, built, target, device, stream, store)
        compiled = CompiledGraph(built, opened, device, stream)
    compiled.target = target
    compiled.show = partial(_show, built, target, device, store)
    if built.reference:
        compiled.run = compared(compiled.run, built, target, _open_reference(built))
    return compiled


def _show(
    built: BuiltGraph, target: Target, device: torch.device, store: KernelStore | None
) -> tuple[CompiledGraph, tuple[int, ...]] | None:
    """Open a session of the same nodes whose results are the values inside, and give the indices of their FX nodes."""
    shown, indices = show_values(built, target, device)
    return (open_graph(shown, target, device, store), indices) if indices else None


def _open_reference(built: BuiltGraph) -> CompiledGraph:
    """Return the same graph on the CPU, without ONNX Runtime's optimizers."""
    device, target = torch.device("cpu"), find_target("cpu")
    settings = SessionOptions(graph_optimization="disable").resolved()
    reference = dataclasses.replace(built, model=built.reference, session=settings, reference=b"", kernels=())
    return CompiledGraph(reference, partial(open_session, reference, target, device), device)
