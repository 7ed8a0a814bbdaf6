"""Checks one step of a model against eager mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ort_dynamo.compilation.choose_target import placement_threads, session_device
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.options.groups import Options, parse_options
from ort_dynamo.passes.rewrites import Rewrite, watched_rewrites
from ort_dynamo.program.asked_settings import asked_settings, check_needs_none
from ort_dynamo.program.containers import content_of, put_back
from ort_dynamo.program.program_state import knows_shapes, modules_inside
from ort_dynamo.program.read_objects import modules_among, read_by
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.torch_internals.tracing.dry_run import compile_apart, in_eager, released, untouched
from ort_dynamo.torch_internals.tracing.frames import generated_function, uncompiled
from ort_dynamo.torch_internals.tracing.wrappers import zeros_in_memory
from ort_dynamo.verification.check import check
from ort_dynamo.verification.copies import UncheckableError
from ort_dynamo.verification.find_rewrite import find_rewrite
from ort_dynamo.verification.record import Recorder
from ort_dynamo.verification.repeat import FOLDER
from ort_dynamo.verification.result import Fault, Verification
from ort_dynamo.verification.step import Step

__all__ = ["verify"]


def verify(
    model: Callable[..., Any],
    /,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    folder: str | Path = FOLDER,
    **kwargs: Any,
) -> Verification:
    """Check one step of a model against eager mode, and find the first operator that differs.

    The step is a call, and the gradients of its loss. A loss is an output of one element; without one, all
    outputs get random gradients. A function may run the backward itself. Outputs, gradients of parameters and inputs,
    buffers and inputs after the call are compared. A difference counts if the result's error against float64 is
    clearly larger than eager's own.

    The model's state, its gradients, the random generators and everything compiled before are put back. So are the
    modules, optimizers, tensors and objects that a function reads. The model runs in the mode, train() or eval(), that
    it is in, and under the autocast that is on.

    Args:
        model: a module or function. A result of torch.compile(backend="ort_train") is checked with its own options.
        args: arguments of the call.
        options: torch.compile's options, for a model that is not compiled.
        dynamic: torch.compile's `dynamic`, for a model that is not compiled.
        folder: where a program is written that repeats the fault; nothing is written if nothing differs.
        kwargs: keyword arguments of the call.

    Raises:
        UnknownOptionError, InvalidOptionError: bad options.
        InvalidArgumentError: the model is compiled by another backend, or `options` or `dynamic` is given for a
            compiled one; or no arguments are given, and it needs some; or FSDP has sharded it; or an argument is a
            nested tensor or a DTensor.
    """
    asked = asked_settings("verify", model, options=options, dynamic=dynamic)
    parsed = parse_options(asked.mode, asked.options)
    inner, recorder = uncompiled(model), Recorder()
    if asked.is_own:
        inner = generated_function(inner)
    if not (args or kwargs):
        check_needs_none("verify", inner)
    read = read_by(inner, *args, *kwargs.values())
    _refuse_shards(inner, *read.values())
    modules = modules_among(read)
    step = Step(args, kwargs, modules, others=tuple(one for name, one in read.items() if name not in modules))
    with untouched(), _uncompiled_in_place(step.modules.values()), closing(recorder), released() as around:
        compiled = compile_apart(inner, backend=_backend(parsed, recorder, around), dynamic=asked.dynamic)

        def find() -> Fault | None:
            with _watched_backend(parsed, around) as (backend, compiles):
                step.observe(compile_apart(inner, backend=backend, dynamic=asked.dynamic))
                found = (find_rewrite(rewrites, recorded.runs) for rewrites, recorded in compiles)
                return next(filter(None, found), None)

        try:
            traced = compile_apart(inner, backend="aot_eager", dynamic=asked.dynamic)
            return check(step, partial(_in_eager, inner), compiled, recorder, Path(folder), find, traced)
        except UncheckableError as reason:
            expected = f"a call that can be compared with eager mode, but {reason}"
            kinds = tuple(map(type, args))
            raise InvalidArgumentError(function="verify", name="args", value=kinds, expected=expected) from reason


def _refuse_shards(*models: Any) -> None:
    """Refuse modules whose parameters FSDP has sharded.

    It puts gradients into shards by hooks of a backward pass, so the step has none. And each run of the step waits for
    all other ranks, of which some may find no difference, and go on.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    modules = (one for model in models if isinstance(model, nn.Module) for one in model.modules())
    sharded = next((one for one in modules if isinstance(one, kinds)), None)
    if sharded is not None:
        expected = "a model that FSDP has not sharded; in a sharded one the option verify=1 checks each graph"
        raise InvalidArgumentError(function="verify", name="model", value=type(sharded), expected=expected)


def _in_eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; all that torch.compile has compiled inside it runs in eager mode."""
    with in_eager():
        return function(*args, **kwargs)


def _backend(
    options: Options, recorder: Recorder, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Give a backend that compiles as ort_train does, and leaves no record of it; `around` is that of `released`."""
    apart = options.without_cuda_graphs()

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        installed_runtime()
        device = session_device(gm, example_inputs)
        compilation = Compilation(apart, device, placement_threads(apart), recorder)
        return around(zeros_in_memory(compilation.run(gm, example_inputs), example_inputs))

    return backend


@contextmanager
def _watched_backend(
    options: Options, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[tuple[Callable[..., Any], list[tuple[list[Rewrite], Recorder]]]]:
    """Give a backend like `_backend`, and the list of its compiles: changes by passes, and what runs meanwhile."""
    compiles: list[tuple[list[Rewrite], Recorder]] = []
    with ExitStack() as recording:

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            recorder = recording.enter_context(closing(Recorder()))
            with watched_rewrites() as rewrites:
                compiled = _backend(options, recorder, around)(gm, example_inputs)
            recording.enter_context(recorder.recording())
            compiles.append((rewrites, recorder))
            return compiled

        yield backend, compiles


@contextmanager
def _uncompiled_in_place(models: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules after module.compile() run as they are; all that torch.compile writes to modules is put back.

    Modules without the shapes of their parameters, such as nn.LazyLinear, get these for good.
    """
    modules = modules_inside(models)
    attributes = [(vars(module), content_of(vars(module))) for module in modules if knows_shapes(module)]
    compiled = [vars(module) for module in modules if "_compiled_call_impl" in vars(module)]
    calls = [one.pop("_compiled_call_impl") for one in compiled]
    try:
        yield
    finally:
        for container, before in attributes:
            put_back(container, before)
        for one, call in zip(compiled, calls, strict=True):
            one["_compiled_call_impl"] = call
