"""Runs a session on torch's tensors, without copying them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ort_dynamo.boundary import ValueSpec, inverse, laid_out
from ort_dynamo.build import BuiltGraph
from ort_dynamo.runtime import processes
from ort_dynamo.runtime.binding import Crossing, crossing
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.runtime.processes import own_session
from ort_dynamo.runtime.session import open_session
from ort_dynamo.target import Target
from ort_dynamo.torch_internals.dispatcher import sees_calls
from ort_dynamo.torch_internals.dlpack import from_dlpack, to_dlpack
from ort_dynamo.torch_internals.fakes import FakeTensor

__all__ = ["CompiledGraph", "Stopped", "open_graph"]


class Stopped(Exception):  # noqa: N818
    """ONNX Runtime stopped; its words. Whoever knows where the graph comes from makes an error of it."""


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
    """

    def __init__(self, built: BuiltGraph, opened: Callable[[], Any], device: torch.device) -> None:
        how = crossing()
        self.built = built
        self.device = device
        self._vector = how.vector
        self._run_of = how.run_of
        self._opened = opened
        self._open()
        self._run_options = onnxruntime().RunOptions()
        self._run_options.log_severity_level = 4  # an error is raised; ONNX Runtime need not print it, too
        self._stream: int | None = None
        self._places = [how.place(device)] * len(built.outputs)
        self._input_names = [value.name for value in self._session.get_inputs()]
        self._output_names = [value.name for value in self._session.get_outputs()]
        self._feeds = [_Feed(spec, how) for spec in built.inputs]
        self._fetches = [
            _Fetch(spec, may_be_empty=not all(isinstance(size, int) and size for size in value.shape))
            for spec, value in zip(built.outputs, self._session.get_outputs(), strict=True)
        ]
        if device.type == "cuda":
            # torch's stream is the session's: order on the stream is all the synchronisation that is needed.
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            self._stream = torch.cuda.current_stream(device).cuda_stream

    def _open(self) -> None:
        self._session = own_session(self._opened)  # keeps the raw session alive
        self._run = self._run_of(self._session)
        self._process = processes.current

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Run on `values`, one per input spec: tensors on the session's device, or Python numbers.

        Raises:
            Stopped: ONNX Runtime did not come to the end.
        """
        if self._stream is not None and torch.cuda.current_stream(self.device).cuda_stream != self._stream:
            return self._run_on_own_stream(values)
        return self._run_here(values)

    def _run_here(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        if sees_calls() and any(isinstance(value, FakeTensor) for value in values):
            return self._fake()
        if self._process != processes.current:
            self._open()
        feeds = self._vector()
        feeds.reserve(len(values))
        for feed, value in zip(self._feeds, values, strict=True):
            feed.push(feeds, value)
        fetches = self._vector()
        try:
            self._run(self._run_options, self._input_names, feeds, self._output_names, fetches, self._places)
        except Exception as error:  # pybind exposes about ten unrelated exception classes
            raise Stopped(str(error)) from error
        return tuple(fetch.take(fetches, index) for index, fetch in enumerate(self._fetches))

    def _fake(self) -> tuple[torch.Tensor, ...]:
        """The results' fake tensors, under the program's own FakeTensorMode: its inputs have no memory to read."""
        shapes = [result.shape for result in self._session.get_outputs()]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise Stopped("the inputs are fake tensors, and a result's size is symbolic")
        made = (
            torch.empty(s, dtype=o.dtype, device=self.device) for s, o in zip(shapes, self.built.outputs, strict=True)
        )
        return tuple(fetch.arranged(tensor) for fetch, tensor in zip(self._fetches, made, strict=True))

    def _run_on_own_stream(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        own = torch.cuda.ExternalStream(self._stream, self.device)  # type: ignore[no-untyped-call]
        own.wait_stream(current)
        with torch.cuda.stream(own):
            results = self._run_here(values)
        current.wait_stream(own)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(own)
        return results


def open_graph(built: BuiltGraph, target: Target, device: torch.device) -> CompiledGraph:
    """What was built, opened in a session on `device`; raises what `open_session` does."""
    return CompiledGraph(built, partial(open_session, built, target, device), device)


class _Feed:
    """Hands one value to ONNX Runtime."""

    def __init__(self, spec: ValueSpec, how: Crossing) -> None:
        self._order = spec.order
        self._number = spec.dtype if spec.is_number else None
        # Given wherever it is a parameter, though it has a default: pybind takes longer to find that.
        self._is_bool = spec.dtype is torch.bool if how.bool_is_bytes else None

    def push(self, feeds: Any, value: Any) -> None:
        if self._number is not None:
            value = torch.tensor(value, dtype=self._number)
        elif self._order:
            value = value.permute(self._order)
        if not value.is_contiguous():
            value = value.contiguous()
        elif not value.numel():
            value = value.new_empty(value.shape)  # contiguous to torch with any strides, not to ONNX Runtime
        if value.is_neg():  # DLPack hands over the memory and drops the bit that negates it
            value = value.resolve_neg()
        if self._is_bool is None:
            feeds.push_back(to_dlpack(value))
            return
        if self._is_bool:
            value = value.view(torch.uint8)
        feeds.push_back(to_dlpack(value), self._is_bool)


class _Fetch:
    """Takes one result from ONNX Runtime."""

    def __init__(self, spec: ValueSpec, *, may_be_empty: bool) -> None:
        self._inverse = inverse(spec.order)
        self._strides = spec.strides
        self._is_bool = spec.dtype is torch.bool
        self._may_be_empty = may_be_empty

    def take(self, fetches: Any, index: int) -> torch.Tensor:
        tensor: torch.Tensor = from_dlpack(fetches.dlpack_at(index))
        if self._is_bool and tensor.dtype is not torch.bool:
            tensor = tensor.view(torch.bool)
        if self._may_be_empty and not tensor.numel():
            tensor = tensor.new_empty(tensor.shape)  # onnxruntime 1.32 gives it strides of 0
        return self.arranged(tensor)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as it comes out of the session, with the dimensions and strides of the spec."""
        if self._inverse:
            return tensor.permute(self._inverse)
        if self._strides:
            return laid_out(tensor, self._strides)
        return tensor
