"""The part of a trainer that runs: a model on its device, with compiled steps."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule

from ort_dynamo.embedding import CompileRecord, Options, compile_recorded, in_a_line, warn_program
from ort_dynamo.errors import InputDtypeError, OrtDynamoError, TrainingGraphError
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.torch_internals import (
    compile_region,
    has_recurrent_layers,
    held_weakly,
    may_be_dynamic,
    passes_through,
    raised_by_backend,
    user_place,
    with_own_code,
)
from ort_dynamo.training.trainer.distributed.process_group import Together, ZeroUpdate
from ort_dynamo.training.trainer.model_with_loss import PREFIX, CombinedModel
from ort_dynamo.training.trainer.split_step import SplitStep
from ort_dynamo.training.trainer.training_state import TrainingState
from ort_dynamo.training.trainer.whole_step import StepKind, WholeStep

__all__ = ["RunningModel", "naming_inputs", "naming_label"]


class RunningModel:
    """A model with its loss, its training state and its compiled steps.

    Args:
        combined: model and loss, on their device.
        state: the trained state of the model.
        description: names the sizes that may change.
        options: how to compile.
        device: where it trains.
        one_session: whether a whole step is compiled as one graph, where the model can be.
        deterministic: whether steps run under torch.use_deterministic_algorithms(True).
        clips: whether gradients are clipped to the norm that the optimizer has.
        gathers: over how many steps gradients are gathered.
        scales: whether the loss is scaled.
        together: the processes that train the model; several ask for steps as forward and backward.
        zero: divides updates among processes; None where each does all of it.
    """

    def __init__(
        self,
        combined: CombinedModel,
        state: TrainingState,
        description: _ORTTrainerModelDesc,
        options: Options,
        device: torch.device,
        *,
        one_session: bool,
        deterministic: bool,
        clips: bool,
        gathers: int,
        scales: bool,
        together: Together,
        zero: ZeroUpdate | None = None,
    ) -> None:
        self._together = together
        self.zero = zero
        self.combined = combined
        self.state = state
        self.options = options
        self.device = device
        self._recurrent = has_recurrent_layers(combined)
        self._description = description
        self._one_session = one_session
        self._deterministic = deterministic
        self._kinds = {
            updates: StepKind(updates=updates, gathers=gathers, scales=scales, clips=clips) for updates in (True, False)
        }
        self._was_training = [module.training for module in combined.modules()] if combined.model.training else None
        self._training: bool | None = None
        self._split: SplitStep | None = None
        self._said_nothing_trains = False
        self._begin()

    def _begin(self) -> None:
        self._whole = {
            updates: WholeStep(
                partial(self._entry, "train"), PREFIX, self.state, self.options, kind, recurrent=self._recurrent
            )
            for updates, kind in self._kinds.items()
        }
        self.records: list[CompileRecord] = []
        self._evaluated = self._region(self._entry("evaluate"))
        self._predicted = self._region(self._entry("predict", predicts=True))

    @property
    def in_one_session(self) -> bool:
        """True if a whole step is one graph."""
        return self._one_session

    @property
    def shares_layers(self) -> bool:
        """True if other processes have parts of this model's layers."""
        return self._together.shares_layers

    @property
    def own_names(self) -> set[str] | None:
        """The entries of the model's state_dict that this process alone has of a pipeline; None without one."""
        return None

    @property
    def keeps_gradients_apart(self) -> bool:
        """True if accumulated gradients are local to this process until an update."""
        return self._together.postpones

    @property
    def kind(self) -> StepKind:
        """The kind of a step that updates the weights."""
        return self._kinds[True]

    def change_steps(self, *, gathers: int, clips: bool) -> None:
        """Let later steps have other tasks; the number of steps for an update changes after the accumulation that runs.

        Args:
            gathers: over how many steps gradients are gathered.
            clips: whether gradients are clipped.
        """
        if self.state.reached:
            gathers = self.kind.gathers
        if (gathers, clips) != (self.kind.gathers, self.kind.clips):
            kinds = self._kinds.items()
            self._kinds = {updates: dataclasses.replace(kind, gathers=gathers, clips=clips) for updates, kind in kinds}
            self.state.make_gathered(gathers > 1)
            self._begin()

    def evaluate_in_torch(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode as torch does without a compiler."""
        self._set_mode(training=False)
        with torch.no_grad():
            _, outputs = self.combined(*inputs)
        return list(outputs)

    def regrouped(self) -> None:
        """Take note that the state is another: processes get their parts, and steps are compiled anew."""
        if self.zero is not None:
            self.zero.step()
        self._split = None
        self._begin()

    def train(self, inputs: Sequence[Tensor], lr: float, scale: float, *, updates: bool) -> tuple[list[Tensor], bool]:
        """Run a training step; gives the outputs of model_desc, and whether all gradients were finite."""
        self._set_mode(training=True)
        self._mark(inputs)
        with self._settings():
            if not self._one_session:
                return self._train_apart(inputs, lr, scale, updates)
            whole = self._whole[updates]
            try:
                (_, outputs), all_finite = whole(inputs, lr, scale)
            except Exception as error:
                if whole.has_begun:
                    self._raise(error, inputs)
                result = self._train_apart(inputs, lr, scale, updates)  # raises the program's own errors once more
                self._one_session = False
                if self._split is not None and not self._split.trained_nothing:
                    _warn_step_is_split(error)
                return result
            return list(outputs), all_finite

    def _train_apart(
        self, inputs: Sequence[Tensor], lr: float, scale: float, updates: bool
    ) -> tuple[list[Tensor], bool]:
        """Run a training step as forward, backward and update."""
        if self._split is None:
            self._split = self._build_step()
        try:
            (_, outputs), all_finite = self._split(inputs, lr, scale, self._kinds[updates])
        except Exception as error:
            self._raise(error, inputs)
        if self._split.trained_nothing and not self._said_nothing_trains:
            self._said_nothing_trains = True
            warn_program(_NOTHING_TRAINS)
        return list(outputs), all_finite

    def _build_step(self) -> SplitStep:
        return SplitStep(
            self._entry("train"), self.state, self.options, self._together, self.zero, recurrent=self._recurrent
        )

    def evaluate(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode; gives the outputs of model_desc."""
        _, outputs = self._run_evaluating(self._evaluated, inputs)
        return list(outputs)

    def predict(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode without the label; gives the outputs of model_desc but the loss."""
        return list(self._run_evaluating(self._predicted, inputs))

    def _run_evaluating(self, region: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        self._set_mode(training=False)
        self._mark(inputs)
        with self._settings(), torch.no_grad():
            try:
                return region(*inputs)
            except Exception as error:
                self._raise(error, inputs)

    def _raise(self, error: Exception, inputs: Sequence[Tensor]) -> NoReturn:
        """Raise the backend's error, where Dynamo has put it into one of its own, with the inputs that it is about."""
        raised = raised_by_backend(error)
        inner = raised if isinstance(raised, Exception) else error
        names = [described.name for described in self._description.inputs]
        named = naming_inputs(inner, names, inputs, self.combined.parameters())
        loss_fn = self.combined.loss_fn
        if named is inner and loss_fn is not None and passes_through(error, CombinedModel.compute_loss.__code__):
            named = naming_label(inner, loss_fn, names[-1], inputs[-1])
        if isinstance(named, TypeError) and (reason := self.combined.misfit(inputs)):
            named.add_note(reason)
        if named is error:
            raise error
        raise named from error

    def _region(self, called: Callable[..., Any]) -> Callable[..., Any]:
        dynamic = False if self.shares_layers else None  # as in SplitStep
        return compile_region(called, held_weakly(self._compile), dynamic=dynamic, recurrent=self._recurrent)

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, record = compile_recorded(gm, example_inputs, self.options)
        self.records.append(record)
        return compiled

    def _entry(self, name: str, *, predicts: bool = False) -> Callable[..., Any]:
        """Return a function with code of its own: its compiled graphs go when it does."""
        combined = self.combined

        def call(*inputs: Any) -> Any:
            return combined.predict(*inputs) if predicts else combined(*inputs)

        return with_own_code(call, name)

    def _set_mode(self, *, training: bool) -> None:
        if self._training is training:
            return
        self._training = training
        if not training:
            self.combined.eval()
        elif self._was_training is None:
            self.combined.train()
        else:
            for module, mode in zip(self.combined.modules(), self._was_training, strict=True):
                module.training = mode

    def _mark(self, inputs: Sequence[Tensor]) -> None:
        if self.shares_layers:
            return
        for tensor, described in zip(inputs, self._description.inputs, strict=False):
            for axis, size in enumerate(described.shape[: tensor.dim()]):
                if isinstance(size, str):
                    may_be_dynamic(tensor, axis)

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        if not self._deterministic:
            yield
            return
        before, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def _warn_step_is_split(error: Exception) -> None:
    """Warn the program, at its call of train_step, that a step cannot be one graph, with the reason and the line."""
    raised = raised_by_backend(error) or error
    reason = raised.facts["reason"] if isinstance(raised, TrainingGraphError) else in_a_line(str(raised))
    place = user_place(error)
    message = (
        "The training step of this model cannot be one graph, so forward, backward and update run apart: "
        f"{reason or type(raised).__name__}{f' ({place})' if place else ''}"
    )
    warn_program(message)


_NOTHING_TRAINS = (
    "This step trains nothing: the loss depends on no parameter of the model that requires a gradient. train_step "
    "gives the outputs and changes no weight."
)


_SPELLED = {
    torch.float64: "Double|double|Float64",
    torch.float32: "Float|float|Float32",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long|long|Int64",
    torch.int32: "Int|int|Int32",
    torch.int16: "Short|short",
    torch.int8: "Char|char|signed char",
    torch.uint8: "Byte|unsigned char",
    torch.bool: "Bool|bool",
}
"""dtype -> how torch's errors spell it."""


def naming_inputs(
    error: Exception, names: Sequence[str], inputs: Sequence[Tensor], parameters: Iterable[Tensor]
) -> Exception:
    """Give the error to raise for one that a step raised: with the inputs that have a dtype in its text, or itself.

    Args:
        error: an error of torch or a session.
        names: of the inputs, as model_desc has them.
        inputs: of the step.
        parameters: of the model: a dtype that these have is no mistake.
    """
    if isinstance(error, OrtDynamoError) or not isinstance(error, RuntimeError):
        return error
    usual = {parameter.dtype for parameter in parameters}
    named = [
        f"{name!r} is {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in zip(names, inputs, strict=False)
        if isinstance(tensor, Tensor) and tensor.dtype not in usual and _is_spelled(tensor.dtype, str(error))
    ]
    if not named:
        return error
    weights = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in usual))
    advice = (
        f"The trainer got an input of a dtype that the model does not take: {', '.join(named)}, "
        f"and the model's weights are {weights or 'none'}. Convert the input with .to()."
    )
    return InputDtypeError(error=error, advice=advice)


def naming_label(error: Exception, loss_fn: Callable[..., Any], name: str, label: Any) -> Exception:
    """Give the error to raise for one that a loss function raised: with the label if its dtype is in the text.

    Args:
        error: an error of torch or a session.
        loss_fn: the loss function.
        name: of the label, as model_desc has it.
        label: the label of the step.
    """
    if isinstance(error, OrtDynamoError) or not isinstance(error, RuntimeError) or not isinstance(label, Tensor):
        return error
    text = str(error)
    # "dtype=torch.float32" is of Dynamo's list of arguments.
    if not _is_spelled(label.dtype, text) and not re.search(rf"(?<!=){re.escape(str(label.dtype))}\b", text):
        return error
    called = loss_fn.__name__ if isinstance(loss_fn, FunctionType) else type(loss_fn).__name__
    dtype = str(label.dtype).removeprefix("torch.")
    advice = f"The loss function {called} raised this for the input {name!r} of dtype {dtype}."
    return InputDtypeError(error=error, advice=advice)


def _is_spelled(dtype: torch.dtype, text: str) -> bool:
    return dtype in _SPELLED and re.search(rf"\b(?:{_SPELLED[dtype]})\b", text) is not None
