"""Opens ONNX Runtime sessions."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch

from ort_dynamo.errors import InvalidOptionError, SessionError, SessionMemoryError
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.options.groups import SessionSettings, flushes_denormals
from ort_dynamo.runtime.arena import ARENA
from ort_dynamo.runtime.binding import keep_order
from ort_dynamo.runtime.data_errors import is_of_memory, is_of_the_program
from ort_dynamo.runtime.installed.capabilities import omitted_optimizers, waiting_threads
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.installed.providers import not_loaded, provider_options
from ort_dynamo.runtime.installed.severity import errors_only
from ort_dynamo.runtime.kernels.kernel_compiler import KernelStore
from ort_dynamo.runtime.kernels.session_kernels import register_kernels, session_kernels
from ort_dynamo.runtime.processes import keep_alive_at_exit, profiles_until_exit
from ort_dynamo.runtime.session_attributes import set_attributes
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY
from ort_dynamo.targets.target import Target

__all__ = ["CannotBeRecordedError", "open_session", "optimize"]


_UNKNOWN_OPTION = re.compile("unknown provider option|failed to (parse|map)", re.IGNORECASE)
"""The error of ONNX Runtime's ProviderOptionsParser for an unknown option, or an unknown value of one."""

_NOT_LOADED = re.compile(
    "CUDA wasn.?t able to be loaded|Failed to load (shared )?library|"
    "CUDA Provider not available|driver version is insufficient|no CUDA-capable device"
)
"""Errors of ONNX Runtime, or of CUDA through it, when the provider or its device is not available."""

_LEFT_TO_THE_CPU = re.compile("assigned to the default CPU EP")


class CannotBeRecordedError(Exception):
    """A session cannot be recorded in a CUDA graph; whoever compiles it does without."""


def open_session(
    built: BuiltGraph,
    target: Target,
    device: torch.device,
    stream: SessionStream | None = None,
    store: KernelStore | None = None,
) -> Any:
    """Return an onnxruntime InferenceSession of a built graph, on the provider of `target` alone.

    Args:
        built: the model, under 2 GiB, and the settings of its session. ONNX Runtime orders nodes depth first from the
            last result; with `built.in_order` they run in the model's order.
        target: the target that the model was lowered for.
        device: the torch device of its tensors.
        stream: the stream that it computes on, if its device has streams.
        store: the store of compiled kernels.

    Raises:
        CannotBeRecordedError: it should be recorded in a CUDA graph, but a node of it runs on the CPU.
        InvalidOptionError: the provider does not know one of provider_options.
        ProviderNotAvailableError: the provider is there but does not load.
        SessionError: ONNX Runtime refused the model.
        SessionMemoryError: there is too little memory.
    """
    settings = _session_settings(built.session, target)
    if built.in_order:
        keep_order(settings)
    return _open(built, settings, target, device, stream, store)


def optimize(built: BuiltGraph, target: Target, device: torch.device) -> bytes:
    """Return the model of `built` as ONNX Runtime's optimizers leave it, serialised, to be opened with them disabled.

    Has the arguments and errors of `open_session`. The result may hold operators of ONNX Runtime's internal domains, so
    it is for this runtime and machine only. Fused operators keep their functions, which the optimizers leave out.

    Raises:
        OSError: the temporary folder cannot hold the model.
    """
    settings = _session_settings(built.session, target)
    with tempfile.TemporaryDirectory(prefix="ort_dynamo-") as folder:
        settings.optimized_model_filepath = os.path.join(folder, "optimized.onnx")
        try:
            _open(built, settings, target, device)
        except SessionError:
            Path(folder, "optimized.onnx").write_bytes(built.model)  # a full disk is no refusal of the model
            raise
        optimized = Path(settings.optimized_model_filepath).read_bytes()
    return _with_functions(optimized, built.model) if built.kernels else optimized


def _with_functions(optimized: bytes, model: bytes) -> bytes:
    """Return a model with the functions of its source model that its nodes call."""
    made, before = onnx.ModelProto.FromString(optimized), onnx.ModelProto.FromString(model)
    called = {(node.domain, node.op_type) for node in made.graph.node}
    made.functions.extend(one for one in before.functions if (one.domain, one.name) in called)
    return made.SerializeToString()


def _open(
    built: BuiltGraph,
    settings: Any,
    target: Target,
    device: torch.device,
    stream: SessionStream | None = None,
    store: KernelStore | None = None,
) -> Any:
    options = built.session
    if target.facts.computes_on_streams:
        stream = stream or SessionStream(device, dict(options.provider_options))
    given = provider_options(device, options, stream.address if stream else "")
    providers: list[Any] = [(target.provider, given)]
    if device.type != "cpu" and not options.cuda_graphs:
        providers.append("CPUExecutionProvider")  # shape arithmetic runs there
    register_kernels(settings, session_kernels(built, target, device, store), store)
    TORCH_MEMORY.raised()  # an error that an earlier run recovered from
    try:
        with (
            _denormals_kept(),
            _quiet(given, options),
            contextlib.nullcontext() if stream is None else stream.opening(),
        ):
            if stream is not None and TORCH_MEMORY.serves(dict(options.provider_options)):
                TORCH_MEMORY.register(target.provider, device)
                settings.add_session_config_entry("session.use_env_allocators", "1")
            session = onnxruntime().InferenceSession(
                built.model,
                settings,
                providers=providers,
                disabled_optimizers=omitted_optimizers(built.dtypes, target),
                enable_fallback=0,  # to the CPU, with a line on stdout: the provider's own error is to be heard
            )
    except Exception as error:  # pybind exposes about ten unrelated exception classes
        if is_of_the_program(error):
            raise
        raise _explained(error, built, target, device) from error
    if target.provider not in session.get_providers():
        raise not_loaded(target, device)
    if stream is not None:
        stream.hold(session)
        keep_alive_at_exit(session)
    if settings.enable_profiling:
        profiles_until_exit(session)
    return session


@contextlib.contextmanager
def _denormals_kept() -> Iterator[None]:
    """Keep torch.set_flush_denormal's choice for this thread: the first session of a process sets one of its own."""
    flushes = flushes_denormals()
    try:
        yield
    finally:
        if flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)


def _quiet(given: dict[str, str], options: SessionSettings) -> contextlib.AbstractContextManager[None]:
    """Silence a warning that releases since 1.26 print for each session that names its device.

    It warns that no plugin provides the device, but none is needed. A program that sets the log severity of the session
    still sees it.
    """
    asked = any(attribute == "log_severity_level" for attribute, _ in options.session_options)
    return errors_only() if "device_id" in given and not asked else contextlib.nullcontext()


def _explained(error: Exception, built: BuiltGraph, target: Target, device: torch.device) -> Exception:
    """Return the error of ours for one that was raised where a session was opened."""
    options, said = built.session, str(error)
    if (raised := TORCH_MEMORY.raised()) is not None:
        return raised
    if options.cuda_graphs and _LEFT_TO_THE_CPU.search(said):
        return CannotBeRecordedError(f"{target.provider} leaves a node of {built.name} to the CPU")
    if options.provider_options and _UNKNOWN_OPTION.search(said):
        value, expected = dict(options.provider_options), f"what {target.provider} takes, which says: {error}"
        return InvalidOptionError(name="session_options['provider_options']", value=value, expected=expected)
    if _NOT_LOADED.search(said):
        return not_loaded(target, device, error)
    if is_of_memory(said):
        return SessionMemoryError(what=f"no session of the {built.name} graph can be opened", place="", error=error)
    return SessionError(
        package=target.package, version=target.version, provider=target.provider, graph=built.name, error=error
    )


def _session_settings(options: SessionSettings, target: Target) -> Any:
    levels = onnxruntime().GraphOptimizationLevel
    settings = onnxruntime().SessionOptions()
    settings.graph_optimization_level = {
        "disable": levels.ORT_DISABLE_ALL,
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        "all": levels.ORT_ENABLE_ALL,
    }[options.graph_optimization]
    settings.log_severity_level = 3  # errors only: warnings speak of ONNX Runtime's choices, not of the user's model
    settings.intra_op_num_threads = options.intra_op_num_threads
    settings.inter_op_num_threads = 1
    if target.facts.shares_an_arena:
        ARENA.register()
        if ARENA.registered:
            settings.add_session_config_entry("session.use_env_allocators", "1")
        # Memory patterns plan one block per run. The arena would have to grow to have it contiguous.
        settings.enable_mem_pattern = False
        # Nor is a buffer kept for a later result of exactly its size, which holds it until then: the arena finds one.
        settings.enable_mem_reuse = False
        for name, value in waiting_threads().items():
            settings.add_session_config_entry(f"session.{name}", value)
    if options.flushes_denormals:
        settings.add_session_config_entry("session.set_denormal_as_zero", "1")
    if options.cuda_graphs:
        # A graph replays the launches on the device. The CPU's part would run once.
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    settings.use_deterministic_compute = options.deterministic
    set_attributes(settings, options.session_options)
    return settings
