"""Runs a session on torch's tensors, without copying them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ort_dynamo.build import BuiltGraph
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.session_code import OwnSession, session_code
from ort_dynamo.target import Target

__all__ = ["CompiledGraph", "open_graph"]


class CompiledGraph:
    """A session with its calling convention: torch values in, a tuple of tensors out.

    Inputs go in by DLPack. One whose memory is not what its spec says (a gradient with other strides, a slice) is
    copied first. Outputs are owned by ONNX Runtime's arena and held by torch until the last reference is gone; they
    come back with the dtype, shape and dimension order of their spec. Safe to call from several threads. A forked child
    runs a session of its own, opened at its first call.

    Args:
        built: what runs.
        opened: opens a session of it, in this process and again in one forked from it.
        device: the device of the session's tensors.

    Attributes:
        run: runs it on one value per input spec: tensors on the session's device, or Python numbers. Raises Stopped if
            ONNX Runtime did not come to the end.
    """

    def __init__(self, built: BuiltGraph, opened: Callable[[], Any], device: torch.device) -> None:
        self.built = built
        self.device = device
        self._own = OwnSession(opened)
        options = onnxruntime().RunOptions()
        options.log_severity_level = 4  # an error is raised; ONNX Runtime need not print it, too
        self.run = session_code(built, self._own, device, options)
        if device.type == "cuda":
            # torch's stream is the session's: order on the stream is all the synchronisation that is needed.
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            stream = torch.cuda.current_stream(device).cuda_stream
            self.run = partial(_run_on_stream, self.run, device, stream)

    @property
    def _session(self) -> Any:
        return self._own.session

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Do what `run` does."""
        return self.run(*values)


def open_graph(built: BuiltGraph, target: Target, device: torch.device) -> CompiledGraph:
    """What was built, opened in a session on `device`; raises what `open_session` does."""
    return CompiledGraph(built, partial(open_session, built, target, device), device)


def _run_on_stream(
    run: Callable[..., tuple[torch.Tensor, ...]], device: torch.device, stream: int, *values: Any
) -> tuple[torch.Tensor, ...]:
    """Run on the session's stream, with the order that the work has on the caller's."""
    current = torch.cuda.current_stream(device)
    if current.cuda_stream == stream:
        return run(*values)
    own = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
    own.wait_stream(current)
    with torch.cuda.stream(own):
        results = run(*values)
    current.wait_stream(own)
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(own)
    return results
