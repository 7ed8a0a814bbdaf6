"""The CUDA stream of a session, and the order of its work with that on others."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from ort_dynamo.runtime import processes
from ort_dynamo.runtime.binding import Run
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY

__all__ = ["SessionStream", "is_recorded"]

_LEGACY = 1
"""CUDA's address of its default stream. torch's is 0: ONNX Runtime takes that as no stream, and creates one for which
nothing waits."""


def is_recorded() -> bool:
    """Check whether a CUDA graph records the current stream, on which nothing runs then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class SessionStream:
    """The single stream of a session: the one on which it is opened.

    A call on the same stream needs no synchronization. For a call on another stream, the session's stream waits for the
    caller's before the run, and the caller's waits for the session's after it. Both waits are on the device, not on the
    host. So to the caller, the work runs on its own stream. It may free memory after the call, without `record_stream`.
    Results are torch's tensors, allocated on the caller's stream, and the program's own `record_stream` works on them.

    A session is not opened again for each stream: that takes seconds, programs create many streams, and autograd runs a
    backward on the stream of its forward.

    Args:
        device: the device of the session.
        provider_options: the user's options; a user_compute_stream among them is used.
        apart: use a stream that nothing else uses, since CUDA cannot record its default stream in a graph.
    """

    def __init__(self, device: torch.device, provider_options: Mapping[str, str], *, apart: bool = False) -> None:
        self._device = device
        given = provider_options.get("user_compute_stream")
        if given is not None:
            self._stream: Any = torch.cuda.ExternalStream(int(given), device)  # type: ignore[no-untyped-call]
        else:
            self._stream = _stream_apart(device) if apart else torch.cuda.current_stream(device)
        self._several = torch.cuda.device_count() > 1

    @property
    def address(self) -> str:
        """The stream, as the provider takes it."""
        return str(self._stream.cuda_stream or _LEGACY)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Be on the stream while a session is opened: constants are copied to the device."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def hold(self, session: Any) -> None:
        """Keep an InferenceSession's inner session, once the outer is dropped, until its stream has done all work.

        A run ends with a callback on the stream that gives back pinned memory. If the session is gone by then, the
        callback frees the memory itself, which CUDA forbids in a callback: the process ends.
        """
        raw = getattr(session, "_sess", session)
        weakref.finalize(session, _free_after, raw, self._stream, processes.current).atexit = False

    def owned(self, result: torch.Tensor) -> torch.Tensor:
        """Copy a result that ONNX Runtime allocated on the session's stream, and could reuse too early."""
        current = torch.cuda.current_stream(self._device)
        copied = result.clone()
        if current.cuda_stream != self._stream.cuda_stream:
            self._stream.wait_stream(current)
        return copied

    def around(self, run: Run) -> Run:
        """Wrap `run` so that it can be called on any stream, with any device current.

        It raises the error that torch raised where ONNX Runtime asked for memory.
        """
        device, stream = self._device, self._stream
        address = stream.cuda_stream

        def ordered(*call: Any) -> None:
            current = torch.cuda.current_stream(device)
            if current.cuda_stream == address:
                run(*call)
                return
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    run(*call)
            finally:
                current.wait_stream(stream)

        def guarded(*call: Any) -> None:
            with torch.cuda.device(device):  # ONNX Runtime makes the session's device the current one
                ordered(*call)

        run_ordered = guarded if self._several else ordered

        def run_with_memory(*call: Any) -> None:
            TORCH_MEMORY.raised()  # a recovered error of an earlier run: a block that was too large is taken in pieces
            try:
                run_ordered(*call)
            except Exception as error:
                raised = TORCH_MEMORY.raised()
                if raised is None:
                    raise
                raise raised from error

        return run_with_memory


@cache
def _stream_apart(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_dropped: list[tuple[Any, Any]] = []
"""Sessions that may be freed, each with its stream."""


def _free_after(raw: Any, stream: Any, process: int) -> None:
    if process != processes.current:
        return  # a forked child never frees a session that it has a copy of
    _dropped.append((raw, stream))
    if torch.cuda.is_current_stream_capturing():
        return  # CUDA forbids to wait meanwhile; the next session that is dropped frees this one, too
    while _dropped:
        raw, stream = _dropped.pop()
        stream.synchronize()
