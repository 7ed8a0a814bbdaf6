"""Checks a step's inputs against model_desc, and says so in one message if a step fails for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ort_dynamo.embedding import FALLBACK, FALLBACK_LOG
from ort_dynamo.errors import InputDtypeError, InvalidArgumentError, OrtDynamoError
from ort_dynamo.training.model_desc_validation import InputDescription, InputDescriptionTyped
from ort_dynamo.training.requirements import require
from ort_dynamo.training.torch_internals import FAKE_TENSOR_LOG

__all__ = ["GuardedSteps", "SpelledInputs", "misfit"]

_Described = Sequence[InputDescription | InputDescriptionTyped]
_Result = TypeVar("_Result")


def misfit(inputs: Sequence[Tensor], described: _Described) -> str | None:
    """Return the text of an error about the first input of another shape than model_desc says; None if all fit."""
    sizes: dict[str, int] = {}
    for tensor, one in zip(inputs, described, strict=False):
        shape = tensor.shape
        agree = len(shape) == len(one.shape) and all(
            (sizes.setdefault(size, own) if isinstance(size, str) else size) == own
            for size, own in zip(one.shape, shape, strict=True)
        )
        if not agree:
            known = [f"{name} = {size}" for name, size in sizes.items() if name in one.shape]
            expected = f"the shape {one.shape}{f' with {known[0]}' if known else ''}"
            return f"{one.name!r} of {expected}, as model_desc says"
    return None


class GuardedSteps:
    """Runs a trainer's steps.

    ONNX Runtime's trainer took other static sizes and dtypes than those of model_desc where the model does, and so does
    this one. Only a step that fails is an error. Until a step of new dtypes has run, warnings of fallbacks wait.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[torch.dtype, ...]] = set()
        self._ran: set[tuple[torch.Size, ...]] = set()  # of those that do not fit, so that their errors are others

    @torch.inference_mode(False)  # a program that evaluates in it may be the one that has the weights made
    def __call__(
        self, function: str, run: Callable[[], _Result], inputs: Sequence[Tensor], described: _Described
    ) -> _Result:
        """Run a step.

        Args:
            function: its name, for an error.
            run: runs it.
            inputs: of the step.
            described: the inputs in model_desc.

        Raises:
            AssertionError: sizes of one name differ.
            InvalidArgumentError: the step failed as no step of these shapes did before, and an input has another shape
                than model_desc says. Errors of memory are raised as they are.
        """
        expected = misfit(inputs, described)
        dtypes = tuple([one.dtype for one in inputs])
        if expected is None and dtypes in self._seen:
            return run()
        _check_named_sizes(inputs, described)
        shapes = tuple([one.shape for one in inputs])
        with _warning_afterwards():
            fits = expected is None or shapes in self._ran
            result = run() if fits else _explained(function, run, inputs, str(expected))
        self._seen.add(dtypes)
        if expected is not None:
            self._ran.add(shapes)
        return result


def _check_named_sizes(inputs: Sequence[Tensor], described: _Described) -> None:
    sizes: dict[str, int] = {}
    for tensor, one in zip(inputs, described, strict=False):
        for axis, size in zip(one.shape, tensor.shape, strict=False):
            if isinstance(axis, str):
                require(sizes.setdefault(axis, size) == size, f"Mismatch in dynamic shape {axis}")


def _explained(function: str, run: Callable[[], _Result], inputs: Sequence[Tensor], expected: str) -> _Result:
    """Run a step whose inputs do not fit, without torch's log of the operators that refuse them."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    before, log.disabled = log.disabled, True
    try:
        return run()
    except (OrtDynamoError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidArgumentError(
            function=function, name="inputs", value=SpelledInputs(inputs), expected=expected
        ) from error
    finally:
        log.disabled = before


@contextlib.contextmanager
def _warning_afterwards() -> Iterator[None]:
    """Hold warnings of fallbacks and of traces back until a step has run, and drop them if its inputs are the fault."""
    logs = [logging.getLogger(name) for name in (FALLBACK_LOG, FAKE_TENSOR_LOG)]
    held: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        is_other = record.name == FALLBACK_LOG and FALLBACK not in record.getMessage()
        if record.thread != threading.get_ident() or is_other:
            return True
        held.append(record)
        return False

    for log in logs:
        log.addFilter(passes)
    try:
        yield
    except (InputDtypeError, InvalidArgumentError):
        held.clear()
        raise
    finally:
        for log in logs:
            log.removeFilter(passes)
        for record in held:
            logging.getLogger(record.name).handle(record)


class SpelledInputs:
    """The repr of an error's value: dtypes and shapes in place of numbers."""

    def __init__(self, inputs: object) -> None:
        self._inputs = inputs

    def __repr__(self) -> str:
        if isinstance(self._inputs, Tensor):
            return _spelled(self._inputs)
        return f"[{', '.join(map(_spelled, self._inputs))}]"  # type: ignore[call-overload]


def _spelled(one: object) -> str:
    if not isinstance(one, Tensor):
        return type(one).__name__
    return f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
