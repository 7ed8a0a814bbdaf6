"""Dynamo: the counters it prints, errors of backends, AOTAutograd as a backend's helper, and where inputs come from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

# torch's guide to custom backends tells to import it so; without it there is no backend.
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.lookup import private

__all__ = ["OwnBackend", "aot_autograd", "counters", "is_random_number", "raised_by_backend", "unboxed"]

counters: defaultdict[str, Counter[str]] = private("torch._dynamo.utils:counters", defaultdict(Counter))
"""Dynamo's counters, by topic. Without them, counters of our own: `torch._dynamo.utils.counters` shows nothing then."""

_random_value_source = private("torch._dynamo.source:RandomValueSource", ())
_backend_failed = private("torch._dynamo.exc:BackendCompilerFailed", ())
_not_registered = private("torch._dynamo.exc:InvalidBackend", ())
_Wrapper: Any = private("torch:_TorchCompileWrapper", object)


class OwnBackend(_Wrapper):  # type: ignore[misc]
    """A function that Dynamo takes for a registered backend.

    After a compile, Dynamo keeps weak references to all parameters if the backend is none of the registered ones, and
    torch.utils.swap_tensors refuses such parameters. It takes what torch.compile wraps a backend in for a registered
    one, if it wraps one. Without that class of torch, this is a plain backend.
    """

    def __init__(self, function: Callable[..., Any], registered: str) -> None:
        """Make one that calls `function`, and has the name of a registered backend, if that is installed."""
        self._function = function
        if _Wrapper is object:
            return
        try:
            super().__init__(registered, None, None, None)
        except _not_registered:
            super().__init__(function, None, None, None)

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph."""
        return self._function(gm, inputs)

    def __eq__(self, other: object) -> bool:
        """Compare the functions: Dynamo finds the graphs of equal backends."""
        return isinstance(other, OwnBackend) and self._function is other._function

    def __hash__(self) -> int:
        return hash(self._function)


def is_random_number(placeholder: Node) -> bool:
    """Check whether an input of Dynamo's graph is a number that the program drew with Python's `random`.

    Dynamo marks placeholders with their sources. Without the mark or its class, no: the number is then rounded to the
    dtype that Dynamo traced it with.
    """
    return isinstance(getattr(placeholder, "_dynamo_source", None), _random_value_source)


def raised_by_backend(error: BaseException) -> BaseException | None:
    """Give the backend's error inside of Dynamo's error; None if the error is not the backend's."""
    inner: BaseException | None = getattr(error, "inner_exception", None) or error.__cause__
    return inner if isinstance(error, _backend_failed) else None


def unboxed(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return AOTAutograd's result, marked as a function that takes its inputs one by one.

    AOTAutograd copies the mark of the boxed function inside, and the minifier would hand over a single list.
    """
    if getattr(compiled, "_boxed_call", False):
        compiled._boxed_call = False  # type: ignore[attr-defined]
    return compiled
