"""Dynamo: its entry, the counters it prints, AOTAutograd as a backend's helper, and where inputs come from."""

from __future__ import annotations

import inspect
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

# torch's guide to custom backends tells to import it so; without it there is no backend.
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Node

from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "CompiledModule",
    "aot_autograd",
    "breaks_graph",
    "compile_region",
    "counters",
    "forget_compiled",
    "has_recurrent_layers",
    "is_random_number",
    "may_be_dynamic",
    "most_graphs",
    "raised_by_backend",
    "user_place",
]

counters: defaultdict[str, Counter[str]] = private("torch._dynamo.utils:counters", defaultdict(Counter))
"""Dynamo's counters, by topic. Without them, counters of our own: `torch._dynamo.utils.counters` shows nothing then."""

_random_value_source = private("torch._dynamo.source:RandomValueSource", ())


def is_random_number(placeholder: Node) -> bool:
    """Whether an input of Dynamo's graph is a number that the program drew with Python's `random`.

    Dynamo marks placeholders with their sources. Without the mark or its class, no: the number is then rounded to the
    dtype that Dynamo traced it with.
    """
    return isinstance(getattr(placeholder, "_dynamo_source", None), _random_value_source)


_takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
_optimize = private("torch._dynamo:optimize")
_config = private("torch._dynamo.config")
_backend_failed = private("torch._dynamo.exc:BackendCompilerFailed", ())


def compile_region(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    recompile_limit: int,
    whole: bool = False,
    recurrent: bool = False,
) -> Callable[..., Any]:
    """Compile a function as torch.compile does, so that two calls of this share what is compiled of the function.

    torch.compile takes `dynamic` for a part of the backend: a graph with fixed sizes is then not found by a call that
    would make dynamic ones. Without Dynamo's own entry it is torch.compile, and they share nothing.

    Args:
        function: what to compile.
        backend: the backend, as a function.
        dynamic: whether all sizes of inputs are symbols, or none; None: those that are marked, or have changed.
        recompile_limit: how many graphs of one function are kept before it runs in eager, if `most_graphs` gave it.
        whole: whether a call that Dynamo cannot trace as one graph raises what `breaks_graph` knows.
        recurrent: whether to trace nn.LSTM, nn.GRU and nn.RNN, which Dynamo leaves to eager by its own setting.
    """
    entry: Callable[..., Any] = _optimize or torch.compile
    settings: dict[str, Any] = {"recompile_limit": recompile_limit} if _takes_limit else {}
    if whole:
        settings["nopython" if entry is _optimize else "fullgraph"] = True
    compiled: Callable[..., Any] = entry(backend=backend, dynamic=dynamic, **settings)(function)
    if not (recurrent and hasattr(_config, "allow_rnn")):
        return compiled

    def traced(*args: Any, **kwargs: Any) -> Any:
        with _config.patch(allow_rnn=True):
            return compiled(*args, **kwargs)

    return traced


def has_recurrent_layers(module: nn.Module) -> bool:
    """Whether a module has layers that `compile_region` traces only if it is told to."""
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
    """Whether Dynamo raised this because it cannot trace a function as one graph; without its classes, never."""
    return isinstance(error, _cannot_trace)


def user_place(error: BaseException) -> str:
    """Find "file:line" of the program where Dynamo stopped with an error: the innermost one outside of torch.

    Without the stack that Dynamo puts into its errors it is empty.
    """
    frames = list(getattr(error, "real_stack", None) or ())
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGES)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


def most_graphs(wanted: int) -> int:
    """How many graphs of one function Dynamo keeps if it is asked for `wanted`: torch up to 2.12 cannot be asked."""
    return wanted if _takes_limit else int(getattr(_config, "recompile_limit", 8))


CompiledModule: type[Any] = private("torch._dynamo:OptimizedModule", nn.Module)
"""The class of what torch.compile(module) gives, by which others know a module that is compiled: accelerate unwraps it
to save what is inside. Without torch's class it is nn.Module, and nobody knows."""

_reset_code = private("torch._C._dynamo.eval_frame:reset_code", lambda code: None)


def forget_compiled(code: CodeType) -> None:
    """Have Dynamo forget what it compiled of a code object, which nobody will call any more.

    What it compiles holds the code objects that it has traced, so one with a short life is never freed otherwise.
    Without torch's function they stay until torch._dynamo.reset().
    """
    _reset_code(code)


def raised_by_backend(error: BaseException) -> BaseException | None:
    """What a backend raised, of the error that Dynamo makes of it; None for errors of anybody else."""
    inner: BaseException | None = getattr(error, "inner_exception", None) or error.__cause__
    return inner if isinstance(error, _backend_failed) else None


_maybe_mark_dynamic = private("torch._dynamo:maybe_mark_dynamic", lambda tensor, axis: None)


def may_be_dynamic(tensor: torch.Tensor, axis: int) -> None:
    """Have Dynamo take a size of a tensor for a symbol, unless the program needs the number; without it, a number."""
    _maybe_mark_dynamic(tensor, axis)
