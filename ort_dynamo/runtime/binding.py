"""Tensors into and out of sessions: the only module that uses private names of ONNX Runtime.

Private calls are faster than public ones, but change between releases without notice. Each process chooses once, by
the signatures of the installed build, never by its version number:

| call | the builds that have it | without it |
|---|---|---|
| `OrtValueVector.push_back(capsule, is_bool)` | to 1.31 | a bool goes as a bool |
| `OrtValueVector.push_back(capsule)` | from 1.32; a bool as uint8 is refused | the public path |
| `OrtValueVector.dlpack_at` | all tested | the public path |
| `InferenceSession.run_with_ortvaluevector` | all tested | the public path |
| `OrtDevice(kind, memory, index)` | all tested | the public path |
| `OrtDevice(kind, memory, vendor, index)` | from 1.23 | the one above: devices have no vendor there |
| `get_all_opkernel_def` | stock builds | the kernels of the nearest recorded release |
| `ExecutionOrder` | all tested | ONNX Runtime's own order: the backward holds more at once |
| `create_and_register_allocator` | all tested | an arena for each session (`arena.py`) |

The public path is `run_with_iobinding`: inputs by their address, results by `OrtValue.__dlpack__` (from 1.28 at the
latest) or `OrtValue.numpy`, which copies. It takes every dtype but, with onnxruntime-training 1.19.2, those that numpy
lacks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.runtime.installed.importing import binding, onnxruntime

__all__ = ["Crossing", "Run", "crossing", "keep_order", "kernel_definitions"]

Run = Callable[[Any, Sequence[str], Any, Sequence[str], Any, Sequence[Any]], None]
"""Run options, input names, feeds, output names, fetches, place of each output.

Fetches are empty, and get the results; or they hold memory of the results' shapes, which is written.
"""


@dataclass(frozen=True)
class Crossing:
    """The functions of the installed build that pass tensors to sessions and back.

    Attributes:
        vector: makes an empty vector of values, with `reserve(count)`, `push_back(capsule)` and `dlpack_at(index)`.
        run_of: gives the function of a session that runs it on two such vectors.
        place: gives the place of results on a torch device, for `run_of`.
        bool_is_bytes: whether a bool is pushed as uint8, followed by True, and all else followed by False.
    """

    vector: Callable[[], Any]
    run_of: Callable[[Any], Run]
    place: Callable[[torch.device], Any]
    bool_is_bytes: bool


@functools.cache
def crossing() -> Crossing:
    """Return the private crossing if the build has it as we know it, the public one otherwise."""
    private = binding()
    vector: Any = getattr(private, "OrtValueVector", None)
    pushes = _PUSH.search(_signature(vector, "push_back"))
    runs = _RUN.search(_signature(getattr(private, "InferenceSession", None), "run_with_ortvaluevector"))
    gives = _GIVE.search(_signature(vector, "dlpack_at"))
    if not (pushes and runs and gives and hasattr(vector, "reserve") and set(dir(private.OrtDevice)) >= _MEMORY):
        return Crossing(_Values, _run_with_iobinding, _named_place, bool_is_bytes=False)
    return Crossing(vector, _run_with_vectors, _device_place, bool_is_bytes=bool(pushes[1]))


_PUSH = re.compile(r"dlpack_tensor: object(, is_bool_tensor: bool = False)?\) -> None")
_RUN = re.compile(r"RunOptions, [^)]*str[^)]*OrtValue[^)]*str[^)]*OrtValue[^)]*OrtDevice\]\) -> None")
_GIVE = re.compile(r"arg0: [^,)]*\) -> object")
_MEMORY = {"cpu", "cuda", "default_memory"}


def _signature(owner: Any, method: str) -> str:
    """Give the signature that pybind writes into a method's docstring; empty if there is no method or signature."""
    return getattr(owner, method, None).__doc__ or ""


def _run_with_vectors(session: Any) -> Run:
    # The Python class around it would add a call to each run.
    return getattr(session, "_sess", session).run_with_ortvaluevector


_NVIDIA = 0x10DE
"""The PCI vendor in the devices of ONNX Runtime's CUDA provider; without it, results would be copied."""


def _device_place(device: torch.device) -> Any:
    places = binding().OrtDevice
    index = device.index or 0
    if device.type != "cuda":
        return places(places.cpu(), places.default_memory(), index)
    vendor = [_NVIDIA] if hasattr(places, "vendor_id") else []
    return places(places.cuda(), places.default_memory(), *vendor, index)


class _Values:
    """Stands in for OrtValueVector: tensors going in, or to be filled; public OrtValues coming out."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.results: Sequence[Any] = ()

    def reserve(self, count: int) -> None:
        """Do nothing: a list grows by itself."""

    def push_back(self, capsule: Any) -> None:
        self.tensors.append(from_dlpack(capsule))

    def dlpack_at(self, index: int) -> Any:
        result = self.results[index]
        if hasattr(result, "__dlpack__"):
            return result.__dlpack__()
        copied = torch.from_numpy(result.numpy())
        return copied.to(result.device_name()).__dlpack__()


def _run_with_iobinding(session: Any) -> Run:
    def run(
        options: Any,
        input_names: Sequence[str],
        feeds: _Values,
        output_names: Sequence[str],
        fetches: _Values,
        places: Sequence[tuple[str, int]],
    ) -> None:
        bound = session.io_binding()
        for name, tensor in zip(input_names, feeds.tensors, strict=True):
            _bind(bound.bind_input, name, tensor)
        if fetches.tensors:
            for name, tensor in zip(output_names, fetches.tensors, strict=True):
                _bind(bound.bind_output, name, tensor)
        else:
            for name, (place, index) in zip(output_names, places, strict=True):
                bound.bind_output(name, place, index)
        session.run_with_iobinding(bound, options)
        fetches.results = bound.get_outputs()

    return run


def _named_place(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def _bind(bind: Callable[..., None], name: str, tensor: torch.Tensor) -> None:
    place, index = _named_place(tensor.device)
    onnx_type = TORCH_TO_ONNX[tensor.dtype]
    of_numpy = onnx_type.numpy()
    is_numpys = of_numpy.isbuiltin == 1  # bfloat16 is of another package, which registers it with numpy
    element = of_numpy.type if is_numpys else onnx_type.value
    try:
        bind(name, place, index, element, list(tensor.shape), tensor.data_ptr())
    except RuntimeError as error:
        if is_numpys:
            raise
        raise TypeError(f"the public binding of this ONNX Runtime takes no {tensor.dtype}: {error}") from error


# -- questions of sessions and capabilities ---------------------------------------------------------------------------


def kernel_definitions() -> Sequence[Any] | None:
    """Every kernel of the build, with its provider, operator, versions and dtypes; None if the build does not tell."""
    ask = getattr(binding(), "get_all_opkernel_def", None)
    return None if ask is None else ask()


def keep_order(settings: Any) -> None:
    """Make the session of these SessionOptions run its nodes in the model's order, if the build can."""
    orders = getattr(onnxruntime(), "ExecutionOrder", None)
    if orders is not None:
        settings.execution_order = orders.PRIORITY_BASED  # without priorities: by index
