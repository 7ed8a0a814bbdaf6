"""The private parts of torch that ORTModule and ORTTrainer ask for, and the backend does not; their one door to all."""

from __future__ import annotations

import inspect
import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ort_dynamo.torch_internals.fakes import FAKE_TENSOR_LOG
from ort_dynamo.torch_internals.kernels.dispatcher import forget_dispatch, python_kernels, without_python_kernels
from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_absent, namespace
from ort_dynamo.torch_internals.lookup import private
from ort_dynamo.torch_internals.pytree import is_container, tree_leaves, tree_map
from ort_dynamo.torch_internals.sizes.symbols import optimization_hint
from ort_dynamo.torch_internals.tracing.dynamo import OwnBackend, raised_by_backend
from ort_dynamo.torch_internals.tracing.program import spell_outputs
from ort_dynamo.torch_internals.tracing.skipped_code import trace_again

__all__ = [
    "AUTOGRAD_KEYS",
    "FAKE_TENSOR_LOG",
    "MOST_GRAPHS",
    "CompiledModule",
    "OpOverload",
    "after_backward",
    "breaks_graph",
    "compile_region",
    "expect_only_what_stages_send",
    "forget_compiled",
    "forget_dispatch",
    "fused_adamw",
    "guard_hooks",
    "has_hooks",
    "has_recurrent_layers",
    "held_weakly",
    "is_absent",
    "is_container",
    "may_be_dynamic",
    "namespace",
    "optimization_hint",
    "passes_through",
    "python_kernels",
    "raised_by_backend",
    "spell_outputs",
    "stopped_in_tracing",
    "tree_leaves",
    "tree_map",
    "user_place",
    "with_own_code",
    "without_python_kernels",
]

# -- Dynamo ---------------------------------------------------------------------------------------------------

_takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
_optimize = private("torch._dynamo:optimize")
_config = private("torch._dynamo.config")

MOST_GRAPHS = 64 if _takes_limit else int(getattr(_config, "recompile_limit", 8))
"""Graphs of one function that Dynamo keeps before it runs in eager: far more than sizes of one, dtypes and changes of
requires_grad make. torch up to 2.12 cannot be asked to."""


def compile_region(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    whole: bool = False,
    recurrent: bool = False,
) -> Callable[..., Any]:
    """Compile a function like torch.compile; two calls of this share the compiled graphs of the function.

    torch.compile counts `dynamic` as part of the backend, so a call with other `dynamic` does not find a graph. If
    torch lacks Dynamo's own entry, this is torch.compile, and nothing is shared. A call that ends with an error of the
    program's does not leave later calls to eager, as it does in torch.compile.

    Args:
        function: the function to compile.
        backend: the backend, as a function.
        dynamic: True makes all input sizes symbolic, False none; None those that are marked or have changed.
        whole: raise an error that `breaks_graph` recognizes if Dynamo cannot trace the call as one graph. Calls of
            loggers are left out, since they would break it.
        recurrent: trace nn.LSTM, nn.GRU and nn.RNN, which Dynamo runs in eager by default.
    """
    entry: Callable[..., Any] = _optimize or torch.compile
    own = OwnBackend(backend, "ort_train")
    settings: dict[str, Any] = {"recompile_limit": MOST_GRAPHS} if _takes_limit else {}
    if whole:
        settings["nopython" if entry is _optimize else "fullgraph"] = True
    compiled: Callable[..., Any] = entry(backend=own, dynamic=dynamic, **settings)(function)
    tracing: dict[str, Any] = {}
    if recurrent and hasattr(_config, "allow_rnn"):
        tracing["allow_rnn"] = True
    if whole and hasattr(_config, "ignore_logging_functions"):
        tracing["ignore_logging_functions"] = {*_config.ignore_logging_functions, *_logging_methods()}

    def traced(*args: Any, **kwargs: Any) -> Any:
        with _config.patch(**tracing):
            return compiled(*args, **kwargs)

    run = traced if tracing else compiled

    def region(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            trace_again(error, began)
            raise

    return region


def held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that calls a method of an object that it does not keep: whoever calls the region has to.

    Dynamo keeps every backend that it has seen until torch._dynamo.reset().
    """
    held = weakref.WeakMethod(method)

    def backend(*args: Any, **kwargs: Any) -> Any:
        found = held()
        assert found is not None, "the object that a region is compiled for lives as long as the region"
        return found(*args, **kwargs)

    return backend


def _logging_methods() -> Iterator[Callable[..., Any]]:
    """Yield the methods of logging.Logger that log, with those that a library has added, such as `warning_once`."""
    for name, method in vars(logging.Logger).items():
        if callable(method) and name.partition("_")[0] in _LEVELS:
            yield method


_LEVELS = frozenset({"critical", "debug", "error", "exception", "fatal", "info", "log", "warn", "warning"})


_compiles = private("torch._dynamo:callback_handler")


def guard_hooks() -> None:
    """Make the compile that runs guard on the hooks of modules, which Dynamo skips by default; call this in a backend.

    Dynamo reads the setting when it makes guards, after the backend. A setting of each call would double the time of a
    small module's call. If torch lacks the setting or the end of a compile, this does nothing.
    """
    global _guards_hooks
    if _compiles is None or not getattr(_config, "skip_nnmodule_hook_guards", False):
        return
    if _skip_hooks_again not in _compiles.end_callbacks:  # torch._dynamo.reset() removes it
        _compiles.register_end_callback(_skip_hooks_again)
    _guards_hooks, _config.skip_nnmodule_hook_guards = True, False


def _skip_hooks_again(*_: Any) -> None:
    global _guards_hooks
    if _guards_hooks:
        _guards_hooks, _config.skip_nnmodule_hook_guards = False, True


_guards_hooks = False
"""True until the end of a compile that guards on hooks."""


def has_recurrent_layers(module: nn.Module) -> bool:
    """Check whether a module has layers that `compile_region` traces only on demand."""
    return any(isinstance(child, nn.RNNBase) for child in module.modules())


_cannot_trace: tuple[type[BaseException], ...] = tuple(
    kind
    for name in (
        "Unsupported",
        "UserError",
        "UncapturedHigherOrderOpError",
        "CondOpArgsMismatchError",
        "RecompileError",
    )
    if (kind := private(f"torch._dynamo.exc:{name}")) is not None
)


def breaks_graph(error: BaseException) -> bool:
    """Check whether Dynamo raised this because it cannot trace a function as one graph; without its classes, never."""
    return isinstance(error, _cannot_trace)


_of_dynamo = private("torch._dynamo.exc:TorchDynamoException", ())


def stopped_in_tracing(error: BaseException) -> bool:
    """Check whether Dynamo, or torch behind it, raised this while it traced a call, which has not run then.

    Errors that a program asks Dynamo for, such as that of a graph break, are none of these.
    """
    if breaks_graph(error):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, _of_dynamo) or any(frame.f_code.co_filename == _TRACING for frame, _ in frames)


_TRACING = f"{Path(torch.__file__).parent}{os.sep}{Path('_dynamo', 'convert_frame.py')}"
"""The file whose functions trace a frame."""


def user_place(error: BaseException) -> str:
    """Find "file:line" of the program where Dynamo stopped with an error: the innermost one outside of torch.

    Without the stack that Dynamo puts into its errors it is empty.
    """
    own = _own_frames(error)
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the program in the stack that Dynamo puts into its errors, the innermost last."""
    frames = getattr(error, "real_stack", None) or ()
    return [frame for frame in frames if not frame.filename.startswith(_PACKAGES)]


def passes_through(error: BaseException, code: CodeType) -> bool:
    """Check whether an error was raised within a function of this code, as Dynamo's stack has it, or Python's."""
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    return any((frame.filename, frame.name) == (code.co_filename, code.co_name) for frame in frames)


_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


if TYPE_CHECKING:
    CompiledModule = nn.Module  # so that a user's type checker knows an ORTModule as a module
else:
    CompiledModule = private("torch._dynamo:OptimizedModule", nn.Module)
"""The class of torch.compile(module)'s result, by which accelerate recognizes and unwraps a compiled module.

If torch lacks the class, this is nn.Module, and accelerate does not recognize it."""

_reset_code = private("torch._C._dynamo.eval_frame:reset_code", lambda code: None)


def with_own_code(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Give a function that is made for one use code of its own, whose compiled graphs go when the function does.

    Dynamo keeps what it compiles of each code object, and refuses to compile one too often.

    Args:
        function: a Python function.
        name: the name of the code, which Dynamo shows; empty keeps it.
    """
    own = cast(FunctionType, function)
    own.__code__ = own.__code__.replace(co_name=name or own.__code__.co_name)
    weakref.finalize(own, forget_compiled, own.__code__).atexit = False
    return own


def forget_compiled(code: CodeType) -> None:
    """Remove the compiled graphs of a code object from Dynamo, if it will not be called again.

    A compiled graph holds the code objects that it has traced, so a short-lived one is never freed otherwise. If torch
    lacks the function, they stay until torch._dynamo.reset().
    """
    _reset_code(code)


_maybe_mark_dynamic = private("torch._dynamo:maybe_mark_dynamic", lambda tensor, axis: None)


def may_be_dynamic(tensor: torch.Tensor, axis: int) -> None:
    """Mark a size as symbolic for Dynamo, unless the program needs its value; no-op if torch lacks the mark."""
    _maybe_mark_dynamic(tensor, axis)


# -- autograd -----------------------------------------------------------------------------------------------


def after_backward(function: Callable[[], None]) -> None:
    """Register a function to be called at the end of the running backward; call this in a hook."""
    # DDP and FSDP use it; torch has no public name for it.
    Variable._execution_engine.queue_callback(function)


def has_hooks(tensor: Tensor) -> bool:
    """Check whether `register_hook` or `register_post_accumulate_grad_hook` has set a hook of a tensor's gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


_dispatch_key = private("torch._C:DispatchKey")

AUTOGRAD_KEYS: tuple[Any, ...] = tuple(
    getattr(_dispatch_key, name) for name in ("AutogradCPU", "AutogradCUDA") if hasattr(_dispatch_key, name)
)
"""The dispatch keys at which torch records gradients of tensors on the devices that we compile for."""


# -- pipelines ------------------------------------------------------------------------------------------------


def expect_only_what_stages_send(stage: Any) -> None:
    """Make a stage after the first expect values of other stages alone; its caller gives it the model's own inputs.

    Every tested version describes a model's input that such a stage reads as one that it has been given, and then
    raises for it, as schedules give inputs to the first stage alone.

    Args:
        stage: a result of `Pipe.build_stage`, before its first step.
    """
    describe = stage._create_act_recv_info

    def describe_sent() -> tuple[Any, ...]:
        described = zip(describe(), stage.node.args, strict=True)
        return tuple(value for value, node in described if node.op != "placeholder")

    stage._create_act_recv_info = describe_sent


# -- optimizers -----------------------------------------------------------------------------------------------


def _fused_adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    count: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    divisor: Tensor | None,
) -> None:
    """Update weights and moments in place by AdamW, in one pass over memory; torch.optim.AdamW has the formula.

    Args:
        weights: the weights.
        gradients: their gradients, which are overwritten if there is a divisor.
        first: first moments.
        second: second moments.
        count: the number of updates, this one included.
        lr: the learning rate.
        beta1: the decay of the first moments.
        beta2: the decay of the second moments.
        weight_decay: λ: weights are first multiplied by 1 - lr·λ.
        eps: added to the denominator.
        divisor: a 0-d tensor that gradients are divided by first.
    """
    step = torch.full((), count, dtype=torch.float32, device=weights[0].device)
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(first),
        list(second),
        [],
        [step] * len(weights),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if divisor is None else divisor.float(),
        found_inf=None,
    )


fused_adamw = _fused_adamw if hasattr(torch, "_fused_adamw_") else None
"""AdamW's kernel; None where torch has none, and the formulae run operator by operator. All tested versions have it."""
