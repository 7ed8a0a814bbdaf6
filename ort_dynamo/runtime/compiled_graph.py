"""Runs a session on torch's tensors, without copying them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _from_dlpack, _to_dlpack  # the plain C calls: torch.from_dlpack costs ten times as much
from torch._subclasses import FakeTensor

from ort_dynamo.boundary import ValueSpec, inverse, laid_out
from ort_dynamo.errors import ExecutionError, IndexOutOfBoundsError, IntegerDivisionByZeroError
from ort_dynamo.runtime.importing import binding as onnxruntime_binding
from ort_dynamo.target import ZERO_DIVISOR

__all__ = ["CompiledGraph"]

_OUT_OF_BOUNDS = re.compile(r"out of (data )?bounds|out of range|invalid (index|indice) found", re.IGNORECASE)
"""How the kernels of Gather and Scatter and their kin say it."""

_BY_ZERO = re.compile(rf"Name:'{ZERO_DIVISOR}")


def _kind(message: str) -> type[ExecutionError]:
    if _BY_ZERO.search(message):
        return IntegerDivisionByZeroError
    return IndexOutOfBoundsError if _OUT_OF_BOUNDS.search(message) else ExecutionError


class CompiledGraph:
    """A session with its calling convention: torch values in, a tuple of tensors out.

    Inputs go in by DLPack. One whose memory is not what its spec says (a gradient with other strides, a slice) is
    copied first. Outputs are owned by ONNX Runtime's arena and held by torch until the last reference is gone; they
    come back with the dtype, shape and dimension order of their spec. Safe to call from several threads.
    """

    def __init__(
        self, session: Any, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec], device: torch.device
    ) -> None:
        binding = onnxruntime_binding()
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.device = device
        self._binding = binding
        self._session = session  # keeps the raw session alive
        self._run = session._sess.run_with_ortvaluevector
        self._run_options = binding.RunOptions()
        self._stream: int | None = None
        kind = binding.OrtDevice.cuda() if device.type == "cuda" else binding.OrtDevice.cpu()
        place = binding.OrtDevice(kind, binding.OrtDevice.default_memory(), device.index or 0)
        self._places = [place] * len(outputs)
        self._input_names = [value.name for value in session.get_inputs()]
        self._output_names = [value.name for value in session.get_outputs()]
        self._feeds = [_Feed(spec) for spec in inputs]
        self._fetches = [_Fetch(spec) for spec in outputs]
        if device.type == "cuda":
            # torch's stream is the session's: order on the stream is all the synchronisation that is needed.
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            self._stream = torch.cuda.current_stream(device).cuda_stream

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Run on `values`, one per input spec: tensors on the session's device, or Python numbers.

        Raises:
            ExecutionError: ONNX Runtime stopped; IndexOutOfBoundsError if at an index in the data,
                IntegerDivisionByZeroError if at a divisor.
        """
        if self._stream is not None and torch.cuda.current_stream(self.device).cuda_stream != self._stream:
            return self._run_on_own_stream(values)
        return self._run_here(values)

    def _run_here(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        if torch._C._len_torch_dispatch_stack() and any(isinstance(value, FakeTensor) for value in values):
            return self._fake()
        feeds = self._binding.OrtValueVector()
        feeds.reserve(len(values))
        for feed, value in zip(self._feeds, values, strict=True):
            feed.push(feeds, value)
        fetches = self._binding.OrtValueVector()
        try:
            self._run(self._run_options, self._input_names, feeds, self._output_names, fetches, self._places)
        except Exception as error:  # pybind exposes about ten unrelated exception classes
            raise _kind(str(error))(error=error) from error
        return tuple(fetch.take(fetches, index) for index, fetch in enumerate(self._fetches))

    def _fake(self) -> tuple[torch.Tensor, ...]:
        """The results' fake tensors, under the program's own FakeTensorMode: its inputs have no memory to read."""
        shapes = [result.shape for result in self._session.get_outputs()]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise ExecutionError(error="the inputs are fake tensors, and a result's size is symbolic")
        made = (torch.empty(s, dtype=o.dtype, device=self.device) for s, o in zip(shapes, self.outputs, strict=True))
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


class _Feed:
    """Hands one value to ONNX Runtime."""

    def __init__(self, spec: ValueSpec) -> None:
        self._order = spec.order
        self._number = spec.dtype if spec.is_number else None
        self._is_bool = spec.dtype is torch.bool

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
        if self._is_bool:
            value = value.view(torch.uint8)
        feeds.push_back(_to_dlpack(value), self._is_bool)


class _Fetch:
    """Takes one result from ONNX Runtime."""

    def __init__(self, spec: ValueSpec) -> None:
        self._inverse = inverse(spec.order)
        self._strides = spec.strides
        self._is_bool = spec.dtype is torch.bool

    def take(self, fetches: Any, index: int) -> torch.Tensor:
        tensor: torch.Tensor = _from_dlpack(fetches.dlpack_at(index))
        if self._is_bool and tensor.dtype is not torch.bool:
            tensor = tensor.view(torch.bool)
        return self.arranged(tensor)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as it comes out of the session, with the dimensions and strides of the spec."""
        if self._inverse:
            return tensor.permute(self._inverse)
        if self._strides:
            return laid_out(tensor, self._strides)
        return tensor
