"""Runs a wrapped module: a compiled region for training, and one for inference."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.embedding import CompileRecord, RunWatch, compile_recorded, find_gaps, forget_compiles, make_options
from ort_dynamo.errors import (
    FallbackRefusedError,
    InvalidOptionError,
    NotCompiledError,
    ProviderNotAvailableError,
    RuntimeNotInstalledError,
    SeveralRuntimesError,
)
from ort_dynamo.training.ortmodule.custom_gradients import custom_gradients, registered_gradients
from ort_dynamo.training.ortmodule.data_types import check_devices, check_inputs, check_outputs, module_device
from ort_dynamo.training.ortmodule.debug_options import DebugOptions
from ort_dynamo.training.ortmodule.environment import Settings
from ort_dynamo.training.ortmodule.fallback import (
    FallbackManager,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
    wrap_exception,
)
from ort_dynamo.training.ortmodule.feature_log import FirstRun, log_first_run
from ort_dynamo.training.ortmodule.graph_optimizer_registry import graph_optimizers, registered_optimizers
from ort_dynamo.training.ortmodule.saved_models import SavedModels
from ort_dynamo.training.ortmodule.step_report import StepReport
from ort_dynamo.training.torch_internals import (
    MOST_GRAPHS,
    compile_region,
    forget_compiled,
    guard_hooks,
    has_recurrent_layers,
    raised_by_backend,
    stopped_in_tracing,
    tree_leaves,
)

__all__ = ["ExecutionManager"]

_SIZED = (torch.Tensor, int, float)


class _Thread(threading.local):
    """The state of one thread.

    Attributes:
        running: the execution whose call runs; the backend passes it the records of compiles.
    """

    running: ExecutionManager | None = None


_thread = _Thread()


@dataclass(frozen=True)
class _Backend:
    """The backend of all ORTModules with the same settings.

    Dynamo keeps every backend that it has seen, so this holds no module.

    Attributes:
        settings: the settings of the compile.
        module_name: the class of the wrapped module, for registered graph optimizers.
        folder: the folder of saved models, or None.
        registered: the number of registered graph optimizers and gradients: graphs that were compiled without the
            newest are not reused.
    """

    settings: Settings
    module_name: str
    folder: str | None
    registered: tuple[int, int]

    __name__ = "ort_train"  # Dynamo's logs and errors call a backend by it

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        guard_hooks()
        devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        device = "cuda" if "cuda" in devices else "cpu"
        options = make_options(
            {
                **self.settings.options(),
                "extra_passes": graph_optimizers(self.module_name, device),
                "provider_options": self.settings.provider_options() if device == "cuda" else {},
                "save_onnx": self.folder,
                # Who saves models wants the graph, whole.
                **({"placement": "onnxruntime"} if self.folder is not None else {}),
            },
        )
        with custom_gradients():
            compiled, record = compile_recorded(gm, example_inputs, options)
        if _thread.running is not None:
            _thread.running.note(record)
        return compiled

    def reset(self) -> None:
        """Forget all compiled graphs, as torch._dynamo.reset() asks for."""
        forget_compiles()


_backend = cache(_Backend)


class ExecutionManager:
    """Compiles and runs a module in one mode, training or inference.

    The first call is compiled for its sizes. So is a later call of these sizes, once: a module may have changed what
    its graph depends on. Other calls reuse a graph, or are compiled for any size of the dimensions that have changed.
    Sizes 0 and 1 have separate graphs, as always in torch.compile.

    Args:
        module: the user's module.
        is_training: the mode.
        debug_options: the messages and models to write.
        settings: the settings of the compile.
        fallback_manager: handles models that cannot run; both modes of a module share one.
        logger: ORTModule's.
    """

    def __init__(
        self,
        module: nn.Module,
        is_training: bool,
        debug_options: DebugOptions,
        settings: Settings,
        fallback_manager: FallbackManager,
        logger: logging.Logger,
    ) -> None:
        self._module = module
        self._mode = "training" if is_training else "inference"
        self._debug_options = debug_options
        self._runtime_options = settings
        self._fallback_manager = fallback_manager
        self._logger = logger
        self._records: list[CompileRecord] = []
        self._report = StepReport(module, logger) if settings.print_memory_stat_by_step else None
        save = debug_options.save_onnx_models
        self._saved = SavedModels(save, self._mode, settings.onnx_opset_version, logger) if save.save else None
        folder = self._saved.folder if self._saved else None
        registered = registered_optimizers(), registered_gradients()
        backend = _backend(settings, type(module).__name__, folder, registered)
        self._code = _Code.of(type(module), self._mode)
        entry = _entry(module, self._code)
        self._for_first_sizes = _region(entry, backend, module, dynamic=False)
        self._for_other_sizes = _region(entry, backend, module, dynamic=None)
        self._settled: set[Callable[..., Any]] = set()  # regions whose last call compiled nothing
        self._has_run = False
        self._first_sizes: list[Any] | None = None

    @property
    def _device(self) -> torch.device | None:
        return module_device(self._module)

    def note(self, record: CompileRecord) -> None:
        """Keep the record of a compile in the running call."""
        self._records.append(record)
        self._code.graphs += 1

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            ORTModuleFallbackException: one of its kinds, where it cannot run and no policy sends it back to PyTorch.
        """
        if self._fallback_manager.is_pending():
            return self._fallback_manager.fallback(*inputs, **kwargs)
        running, _thread.running = _thread.running, self
        before = None
        try:
            check_inputs(self._module.forward, inputs, kwargs)
            if self._report is not None:
                self._report.before_forward()
            region = self._region_for(inputs, kwargs)
            before = None if region in self._settled else _State(self._module)
            outputs = (self._later if self._has_run else self._first)(region, inputs, kwargs)
            if self._records:
                self._settled.discard(region)
                self._save_compiled()
            else:
                self._settled.add(region)
        except Exception as error:
            known = self._in_family(error, inputs, kwargs)
            if known is None and not stopped_in_tracing(error):
                raise
            if before is not None:
                before.put_back()  # PyTorch runs the module again
            if known is None:
                return self._fallback_manager.attempt(error, *inputs, **kwargs)
            self._fallback_manager.handle_exception(known)
            return self._fallback_manager.fallback(*inputs, **kwargs)
        finally:
            _thread.running = running
        if self._report is not None:
            self._report.after_forward(outputs)
        return outputs

    def _region_for(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the compiled region that serves the sizes of a call."""
        if not self._has_run or (self._first_sizes is not None and self._first_sizes == _sizes(inputs, kwargs)):
            return self._for_first_sizes
        return self._for_other_sizes

    def _first(self, region: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run for the first time, and log the record of the compile."""
        begin, clock = time.time(), time.perf_counter()
        with RunWatch() as watch:
            outputs = region(*inputs, **kwargs)
        seconds = time.perf_counter() - clock
        check_outputs(outputs)
        gaps = find_gaps(begin)
        nothing_ran = not watch.seen and next(self._module.parameters(), None) is not None
        if gaps.skipped and nothing_ran and not self._runtime_options.fallback_policy.takes_eager_nodes:
            reasons = "".join(f"\n  {note}" for note in gaps.skipped)
            error = NotCompiledError(name=type(self._module).__name__, reasons=reasons)
            raise wrap_exception(ORTModuleTorchModelException, error)
        # A break inside of the forward ends two frames: first the one that calls it, then its own.
        breaks = {(note.where, note.reason): note for note in gaps.breaks}
        pieces = tuple(dict.fromkeys((*breaks.values(), *gaps.skipped)))
        for piece in pieces:
            self._logger.warning("%s runs in pieces: %s", type(self._module).__name__, piece)
        run = FirstRun(self._mode, tuple(self._records), seconds, pieces)
        log_first_run(self._logger, self._debug_options.logging.log_level, self._runtime_options, run)
        self._has_run, self._first_sizes = True, _sizes(inputs, kwargs)
        return outputs

    def _later(self, region: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run, and check the results if the call compiled.

        If these do not fit, calls after this one run in PyTorch. This call has changed buffers and random generators
        already, so it keeps its results.
        """
        outputs = region(*inputs, **kwargs)
        if self._records:
            self._first_sizes = None
            try:
                check_outputs(outputs)
            except ORTModuleIOError as error:
                self._fallback_manager.handle_exception(error)
                self._fallback_manager.note()
        return outputs

    def _save_compiled(self) -> None:
        records, self._records = self._records, []
        if self._saved is not None:
            for record in records:
                self._saved.write(record)

    def _in_family(
        self, error: Exception, inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ORTModuleFallbackException | None:
        """Return the exception of ORTModule's family that `error` is, or None: then it is the program's."""
        self._records.clear()
        if isinstance(error, ORTModuleFallbackException):
            return error
        raised = raised_by_backend(error)
        if isinstance(raised, InvalidOptionError):
            raise raised from error
        if isinstance(raised, (RuntimeNotInstalledError, SeveralRuntimesError, ProviderNotAvailableError)):
            return wrap_exception(ORTModuleInitException, raised)
        if isinstance(raised, Exception):
            reason = _REFUSED.format(**raised.facts) if isinstance(raised, FallbackRefusedError) else raised
            message = f"There was an error while exporting the PyTorch model to ONNX: \n\n{reason}"
            made = wrap_exception(ORTModuleONNXModelException, RuntimeError(message))
            made.__cause__ = raised
            return made
        if isinstance(error, RuntimeError):
            try:
                check_devices(self._module, inputs, kwargs)
            except ORTModuleFallbackException as known:
                known.__cause__ = error
                return known
        return None


_REFUSED = (
    "{count} node(s) of the {role} graph cannot run in ONNX Runtime:\n{nodes}\n"
    "Set the environment variable ORTMODULE_FALLBACK_POLICY=FALLBACK_UNSUPPORTED_ONNX_MODEL (a default policy) to run "
    "just these nodes in eager mode."
)
"""FallbackRefusedError's message to a program that has no options."""


class _Code:
    """The code of functions that call modules of one class, in one mode.

    Dynamo stores compiled graphs with the code. So a second module of the class with the same structure and hooks
    reuses the graphs of the first, as in torch.compile. If there are many graphs, the next module gets new code, so
    that none reaches Dynamo's recompile limit.

    Attributes:
        code: the code object.
        graphs: the number of graphs compiled from it.
    """

    _newest: ClassVar[WeakKeyDictionary[type, dict[str, _Code]]] = WeakKeyDictionary()

    def __init__(self, name: str) -> None:
        self.code = _calls_module(None).__code__.replace(co_name=name)
        self.graphs = 0
        # Dynamo's graphs hold the code that they were traced from: without this they hold one another for ever.
        weakref.finalize(self, forget_compiled, self.code).atexit = False

    @classmethod
    def of(cls, kind: type, mode: str) -> _Code:
        """Return the code for another module of a class."""
        newest = cls._newest.setdefault(kind, {})
        if mode not in newest or newest[mode].graphs > MOST_GRAPHS // 4:
            newest[mode] = cls(kind.__name__)
        return newest[mode]


def _calls_module(module: Any) -> FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return cast(FunctionType, call)


def _entry(module: nn.Module, code: _Code) -> Callable[..., Any]:
    call = _calls_module(module)
    call.__code__ = code.code
    return call


def _sizes(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the shapes of all tensors of a call, and its numbers."""
    leaves = tree_leaves((inputs, kwargs))
    return [one.shape if isinstance(one, torch.Tensor) else one for one in leaves if isinstance(one, _SIZED)]


def _region(
    entry: Callable[..., Any], backend: Callable[..., Any], module: nn.Module, *, dynamic: bool | None
) -> Callable[..., Any]:
    recurrent = has_recurrent_layers(module)
    return compile_region(entry, backend, dynamic=dynamic, recurrent=recurrent)


class _State:
    """Random generators and buffers as they were before a call, which changes them beside its results.

    A module may write to a buffer or replace it. Buffers of torch's lazy modules that have no values yet are left out:
    the call initializes them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not isinstance(buffer, nn.UninitializedBuffer)
        ]
        self._cpu = torch.get_rng_state()
        devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def put_back(self) -> None:
        """Put it back."""
        with torch.no_grad():
            for owner, name, buffer, copy in self._buffers:
                buffer.copy_(copy)
                owner._buffers[name] = buffer
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
