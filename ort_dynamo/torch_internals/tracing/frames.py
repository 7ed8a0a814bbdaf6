"""Read Dynamo's results for the frames that it looked at, and the compiled modules that it never looks into."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ort_dynamo.torch_internals.lookup import private
from ort_dynamo.torch_internals.tracing.callers import (
    Caller,
    backend_module,
    caller_of,
    class_name,
    module_number,
    resumed_at,
    uncompiled,
)
from ort_dynamo.torch_internals.tracing.graph_breaks import GraphBreak, current_compile_id, end_attempt, logged_breaks

__all__ = [
    "CompileSettings",
    "Frame",
    "UntracedModule",
    "by_function",
    "compile_settings",
    "current_compile_id",
    "entered_codes",
    "frames",
    "generated_function",
    "is_compiled_function",
    "module_number",
    "resumed_at",
    "uncompiled",
    "untraced_modules",
    "watch_attempts",
    "why_untraced",
    "wrap_compiled_call",
]

_LIMIT = 1024  # torch keeps 64, fewer than a large model has graph breaks

_metrics_of = private("torch._dynamo.utils:get_compilation_metrics")
_kept = private("torch._dynamo.utils:_compilation_metrics")
_set_limit = private("torch._dynamo.utils:set_compilation_metrics_limit")
_check_verbose = private("torch._dynamo.trace_rules:check_verbose")
_dynamo_utils = private("torch._dynamo.utils")
_external_utils = private("torch._dynamo.external_utils")
_innermost_backend = private("torch._dynamo.eval_frame:innermost_backend")
_optimized_module = private("torch._dynamo.eval_frame:OptimizedModule")
_exceptions = private("torch._dynamo.exc")

if _set_limit is not None and (getattr(_kept, "maxlen", None) or _LIMIT) < _LIMIT:
    _set_limit(_LIMIT)


@dataclass(frozen=True)
class Frame:
    """One attempt of Dynamo to compile one function of the program.

    Attributes:
        compile_id: torch's name for the attempt, such as "0/1"; the number before the slash is the function's.
        function: the function's name; the code after a graph break has one that begins with "torch_dynamo_resume_in".
        begins: the file and line of the function.
        where: "file:line" of the function, or of the line that Dynamo could not trace.
        failure: why Dynamo skipped the function, which then runs in eager; None if it did not.
        breaks: the place and reason of each graph break in the function.
        operators: the number of operators of its graph, for any backend; 0 without a graph.
        recompiled: the failed guard of the attempt before; None for a first attempt.
        began: the start, in seconds since the epoch.
        limit: the setting of torch._dynamo.config whose limit was reached, so that calls run in eager if no earlier
            attempt fits; None if no limit was reached. With a limit, `failure` is set, too.
        caller: the caller of the function; None if it is unknown.
        raised: True if torch raises the failure to the caller, so that the function does not run at all.
    """

    compile_id: str
    function: str
    begins: tuple[str, int]
    where: str
    failure: str | None
    breaks: tuple[GraphBreak, ...]
    operators: int
    recompiled: str | None
    began: float
    limit: str | None = None
    caller: Caller | None = None
    raised: bool = False

    @property
    def is_resumed(self) -> bool:
        """True if this frame continues a function after a graph break."""
        return resumed_at(self.function) is not None

    @property
    def is_wrapper(self) -> bool:
        """True if the function is Dynamo's own, around a module of torch's or another callable object."""
        return self.begins[0] == getattr(_external_utils, "__file__", None)


def frames(since: float) -> tuple[Frame, ...]:
    """Return the frames that Dynamo began to compile at or after `since` (seconds since the epoch), the oldest first.

    They come from torch's compilation metrics, which keep the last 1,024. If torch lacks these, there are none.
    """
    every = (_frame(metrics) for metrics in (_metrics_of() if _metrics_of else ()) if _is_frame(metrics))
    return tuple(frame for frame in every if frame.began >= since)


def _is_frame(metrics: Any) -> bool:
    # Backwards and pieces of graphs have entries as well; they name no function. Nor do attempts beyond the limit.
    return bool(getattr(metrics, "co_name", None)) or _limit(metrics) is not None


def _limit(metrics: Any) -> str | None:
    reason = getattr(metrics, "fail_reason", None) or ""
    if not reason.startswith(_LIMIT_REACHED):
        return None
    found = _SETTING.search(reason)
    return found[1] if found else "recompile_limit"


_LIMIT_REACHED = "Dynamo recompile limit exceeded"
_SETTING = re.compile(r"torch\._dynamo\.config\.(\w+)")


def _frame(metrics: Any) -> Frame:
    def of(name: str) -> Any:
        return getattr(metrics, name, None)

    caller, limit = caller_of(of("recompile_user_contexts")), _limit(metrics)
    begins = (of("co_filename") or "", of("co_firstlineno") or 0)
    if limit and caller:
        begins = caller.begins
    file = of("fail_user_frame_filename") or begins[0]
    line = of("fail_user_frame_lineno") or begins[1]
    failure = (of("fail_reason") or of("fail_type")) if of("fail_type") else None
    return Frame(
        compile_id=str(of("compile_id")),
        function=of("co_name") or (caller.function if caller else "") or "a function",
        begins=begins,
        where=f"{file}:{line}",
        failure=failure,
        breaks=_breaks(metrics, f"{file}:{line}") if failure is None else (),
        operators=of("graph_op_count") or 0,
        recompiled=of("recompile_reason"),
        began=(of("start_time_us") or 0) / 1e6,
        limit=limit,
        caller=caller,
        raised=failure is not None and _is_raised(of("fail_type"), of("config_suppress_errors"), caller),
    )


def _breaks(metrics: Any, where: str) -> tuple[GraphBreak, ...]:
    """Return the graph breaks of an attempt: as Dynamo logged them, else the reasons why it began anew."""
    reasons = sorted(getattr(metrics, "restart_reasons", None) or ())
    return logged_breaks(metrics) or tuple(GraphBreak(reason, where) for reason in reasons)


def _is_raised(kind: str, suppressed: bool | None, caller: Caller | None) -> bool:
    """Check whether torch raises a failure to the program: all but graph breaks where one graph is not asked for."""
    found = getattr(_exceptions, kind, None)
    left_to_eager = tuple(getattr(_exceptions, name) for name in _LEFT_TO_EAGER if hasattr(_exceptions, name))
    if isinstance(found, type) and issubclass(found, left_to_eager):
        return caller is not None and caller.fullgraph
    return not suppressed


_LEFT_TO_EAGER = ("Unsupported", "UserError")


def watch_attempts(tell: Callable[[Frame], None]) -> bool:
    """Call `tell` at the end of each later attempt of Dynamo, for every backend.

    Dynamo hands its record of an attempt to a function that does nothing in the releases of torch, and is there for
    logs; it is wrapped.

    Returns:
        Whether this torch has that function.
    """
    log = getattr(_dynamo_utils, "log_compilation_event", None)
    if log is None:
        return False

    @functools.wraps(log)
    def log_and_tell(metrics: Any) -> None:
        log(metrics)
        end_attempt(metrics)
        if _is_frame(metrics):
            tell(_frame(metrics))

    _dynamo_utils.log_compilation_event = log_and_tell
    return True


def by_function(seen: Sequence[Frame]) -> tuple[tuple[Frame, ...], ...]:
    """Group the attempts by function: those of the function, and of the code after its graph breaks.

    Dynamo makes a function of its own of the code after a break, whose name says in which function and at which line it
    begins; that one is the nearest above of its name in its file.
    """
    begins: dict[tuple[str, str], set[int]] = {}
    places = []
    for frame in seen:
        file, line = frame.begins
        name, at = resumed_at(frame.function) or (frame.function, line)
        if not frame.is_resumed:
            begins.setdefault((file, name), set()).add(at)
        places.append((file, name, at))
    groups: dict[tuple[str, str, int], list[Frame]] = {}
    for frame, (file, name, at) in zip(seen, places, strict=True):
        begin = max((line for line in begins.get((file, name), ()) if line <= at), default=at)
        groups.setdefault((file, name, begin), []).append(frame)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True)
class UntracedModule:
    """A module that was compiled in place, by `module.compile()`, and whose own code Dynamo never traces.

    Attributes:
        name: its class.
        reason: Dynamo's reason.
    """

    name: str
    reason: str


def untraced_modules(home: str) -> tuple[UntracedModule, ...]:
    """Those of the modules alive whose own code Dynamo skips, though a backend of ours compiled them in place.

    Dynamo says nothing of the frames that it skips by rule, such as the forward of nn.Sequential, so they are found by
    looking at all objects, after those that nothing holds were collected: this takes some tenths of a second in a large
    program. Without torch's rules, none.

    Args:
        home: the name of the module that the backend's function is in.
    """
    if _check_verbose is None:
        return ()
    gc.collect()
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module) and backend_module(_callback(one)) == home:
            reason = why_untraced(one)
            if reason is not None:
                found.append(UntracedModule(class_name(one), reason))
    return tuple(found)


def why_untraced(module: nn.Module) -> str | None:
    """Give Dynamo's reason to skip the forward of a module that was compiled in place, or None."""
    call = module.__dict__.get("_compiled_call_impl")
    if call is None or _check_verbose is None or _calls_inlined(call):
        return None
    result = _check_verbose(type(module).forward)
    return (result.reason or "no reason given") if result.skipped else None


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Check whether torch.compile has made `function` from another one."""
    return hasattr(function, "_torchdynamo_orig_callable")


def generated_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a result of torch.compile(function); return anything else unchanged."""
    written: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return written


@dataclass(frozen=True)
class CompileSettings:
    """The arguments that a compiled function or module was compiled with.

    Attributes:
        backend: the backend's name; its Python name where torch does not tell.
        home: the Python module of the backend's function.
        mode: the mode, or None.
        options: the options, or None.
        dynamic: whether sizes are dynamic; None leaves it to Dynamo.
    """

    backend: str
    home: str
    mode: str | None
    options: Mapping[str, Any] | None
    dynamic: bool | None


def compile_settings(model: Any) -> CompileSettings | None:
    """Return the arguments that torch.compile got for a function or a module; None if it is not compiled."""
    call = model
    if isinstance(model, nn.Module):
        is_result = _optimized_module is not None and isinstance(model, _optimized_module)
        call = vars(model).get("forward" if is_result else "_compiled_call_impl")
    callback = None if call is None else _held(call, "callback")
    if callback is None:
        return None
    inner = _innermost_backend(callback) if _innermost_backend else callback
    given = getattr(inner, "kwargs", {})
    name = getattr(inner, "compiler_name", None) or getattr(inner, "__name__", type(inner).__name__)
    return CompileSettings(
        backend=str(name),
        home=backend_module(callback),
        mode=given.get("mode"),
        options=given.get("options"),
        dynamic=getattr(inner, "dynamic", None),
    )


def wrap_compiled_call(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None] | None:
    """Wrap the compiled call of a compiled module.

    Args:
        module: the result of torch.compile(module), or a module after module.compile().
        wrap: compiled call -> the function that replaces it.

    Returns:
        A function that removes the wrapper; None if the module is not compiled.
    """
    attribute = "forward" if _optimized_module and isinstance(module, _optimized_module) else "_compiled_call_impl"
    call = module.__dict__.get(attribute)
    if call is None:
        return None
    setattr(module, attribute, wrap(call))
    return lambda: setattr(module, attribute, call)


def entered_codes(model: Any, call: Callable[..., Any]) -> frozenset[tuple[str, tuple[str, int]]]:
    """Give the functions through which a compiled call can enter a model, as in `Frame.function` and `Frame.begins`.

    Args:
        model: the compiled model, or the compiled function.
        call: its compiled call.
    """
    inner = getattr(model, "_torchdynamo_orig_callable", None)
    functions = (_held(call, "fn"), inner, getattr(uncompiled(model), "forward", None))
    codes = (getattr(function, "__code__", None) for function in functions)
    return frozenset((code.co_name, (code.co_filename, code.co_firstlineno)) for code in codes if code is not None)


def _callback(module: nn.Module) -> object:
    """Return Dynamo's callback of a module compiled in place, or None."""
    return _held(module.__dict__.get("_compiled_call_impl"), "callback")


def _calls_inlined(call: Any) -> bool:
    """Check whether a module's compiled call enters the module through an inner function of Dynamo's.

    None of Dynamo's rules leaves the module out there. torch 2.15 does so for the modules that its rules leave out;
    older ones do not.
    """
    code = getattr(_held(call, "fn"), "__code__", None)
    return code is not None and code.co_filename == getattr(_external_utils, "__file__", None)


def _held(call: Any, name: str) -> Any:
    """Find the value that the closure of torch's wrapper around a compiled call holds under `name`, or None."""
    while call is not None and "callback" not in (names := _free_names(call)):
        call = getattr(call, "__wrapped__", None)
    return call.__closure__[names.index(name)].cell_contents if call is not None and name in names else None


def _free_names(function: Callable[..., Any]) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_freevars", ())
