"""ORTModule's exceptions, and the policies that run a model in PyTorch if ORTModule cannot run it.

ORTModule had two states: all of a model in ONNX Runtime, or all of it in PyTorch. Here an operator that ONNX Runtime
cannot run falls back to eager mode, alone. A policy still decides whether that is allowed
(docs/how_to/migrating_from_ortmodule.md).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from enum import IntFlag
from typing import Any

__all__ = [
    "DEFAULT_POLICY",
    "FallbackManager",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "_FallbackPolicy",
    "wrap_exception",
]


class ORTModuleFallbackException(Exception):  # noqa: N818  # ORTModule's name
    """Base of all that a fallback policy can answer."""


class ORTModuleInitException(ORTModuleFallbackException):
    """ONNX Runtime is not installed, or not usable."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """Parameters or inputs are on more than one device."""


class ORTModuleIOError(ORTModuleFallbackException):
    """An input or a result is of a type that ORTModule does not take."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """ORTModule cannot wrap the module, or a wrapped module does not support the call."""


class ORTModuleONNXModelException(ORTModuleFallbackException):
    """The model, or a node of it, cannot be converted to an ONNX model for ONNX Runtime."""


class _FallbackPolicy(IntFlag):
    """Conditions under which a model runs in PyTorch; join flags by `|`. The name is ORTModule's."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def is_set(self, policy: _FallbackPolicy) -> bool:
        """Check whether `policy` is among these; FALLBACK_DISABLE puts out all others."""
        return not self.is_disabled() and policy in self

    def is_disabled(self) -> bool:
        """Check whether FALLBACK_DISABLE is among these."""
        return _FallbackPolicy.FALLBACK_DISABLE in self

    def answers(self, exception: ORTModuleFallbackException) -> bool:
        """Check whether one of these sends a model back to PyTorch because of `exception`."""
        return any(self.is_set(policy) for policy in _ANSWERED_BY.get(type(exception), _FORCED))

    @property
    def takes_eager_nodes(self) -> bool:
        """Check whether a node that ONNX Runtime cannot take may run in eager."""
        return self.answers(ORTModuleONNXModelException())


_FORCED = (_FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD, _FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD)

_ANSWERED_BY: dict[type[ORTModuleFallbackException], tuple[_FallbackPolicy, ...]] = {
    ORTModuleDeviceException: (*_FORCED, _FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE),
    ORTModuleIOError: (*_FORCED, _FallbackPolicy.FALLBACK_UNSUPPORTED_DATA),
    ORTModuleTorchModelException: (
        *_FORCED,
        _FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL,
        _FallbackPolicy.FALLBACK_BAD_INITIALIZATION,
    ),
    ORTModuleONNXModelException: (*_FORCED, _FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL),
    ORTModuleInitException: (_FallbackPolicy.FALLBACK_BAD_INITIALIZATION,),
}

DEFAULT_POLICY = (
    _FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)


def wrap_exception(
    new_exception: type[ORTModuleFallbackException], raised_exception: Exception
) -> ORTModuleFallbackException:
    """Make an exception of the family whose message and cause are another one's."""
    made = new_exception(raised_exception)
    made.__cause__ = raised_exception
    return made


class FallbackManager:
    """Handles exceptions, and runs a model in PyTorch if a policy says so.

    Args:
        module: the user's module.
        policy: the exceptions that make the model run in PyTorch.
        retry: try ONNX Runtime again at the next call; otherwise the model stays in PyTorch.
    """

    def __init__(self, module: Callable[..., Any], policy: _FallbackPolicy, retry: bool) -> None:
        self.policy = policy
        self.retry = retry
        self._module = module
        self._exception: ORTModuleFallbackException | None = None
        self._said = False
        self._for_good = False

    def handle_exception(self, exception: ORTModuleFallbackException, *, for_good: bool = False) -> None:
        """Make the next `fallback` run the model in PyTorch, or raise `exception` if no policy covers it.

        Args:
            exception: the reason why it cannot run in ONNX Runtime.
            for_good: a retry cannot help, since the reason is a property of the module.
        """
        if not self.policy.answers(exception):
            raise exception
        self._exception = exception
        self._for_good = for_good

    def is_pending(self) -> bool:
        """Check whether the model was sent back to PyTorch."""
        return self._exception is not None

    def note(self) -> None:
        """Log why the model runs in PyTorch: once, or with `retry` at each such call."""
        assert self._exception is not None
        if not self._said:
            self._said = True
            text = "".join(traceback.format_exception(self._exception))
            warnings.warn(
                f"Fallback to PyTorch due to exception {type(self._exception)} was triggered. "
                f"See details below:\n\n{text}",
                UserWarning,
                stacklevel=2,
            )
        if self.retry and not self._for_good:
            self._said, self._exception = False, None

    def attempt(self, error: Exception, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in PyTorch after an error of its tracing. If it runs there, it stays there.

        Otherwise the call is wrong: its exception is raised as in PyTorch, and the next call runs in ONNX Runtime.

        Args:
            error: the error of the tracing.
            inputs: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
        """
        try:
            outputs = self._module(*inputs, **kwargs)
        except Exception as own:
            raise own from own.__cause__  # without the other error around it
        self.handle_exception(wrap_exception(ORTModuleTorchModelException, error))
        self.note()
        return outputs

    def fallback(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in PyTorch, and give its result."""
        self.note()
        return self._module(*inputs, **kwargs)
