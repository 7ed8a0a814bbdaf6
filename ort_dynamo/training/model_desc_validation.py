"""The description of a model's inputs and outputs that an ORTTrainer is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cerberus
import torch

from ort_dynamo.training.document_errors import DocumentErrors, did_you_mean, unsorted_keys
from ort_dynamo.training.requirements import require

__all__ = [
    "ALL_FINITE_IO_DESCRIPTION_NAME",
    "GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME",
    "LEARNING_RATE_IO_DESCRIPTION_NAME",
    "LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME",
    "InputDescription",
    "InputDescriptionTyped",
    "OutputDescription",
    "OutputDescriptionTyped",
    "_ORTTrainerModelDesc",
]

LEARNING_RATE_IO_DESCRIPTION_NAME = "__learning_rate"
ALL_FINITE_IO_DESCRIPTION_NAME = "__all_finite"
LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME = "__loss_scale_input_name"
GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME = "__gradient_accumulation_name"

_Shape = list[int | str]
_Complain = Callable[[Any, str], None]


class InputDescription(NamedTuple):
    """An input; in its shape an int is a static dimension, a string names a symbolic one."""

    name: str
    shape: _Shape


class InputDescriptionTyped(NamedTuple):
    """An input whose dtype is known."""

    name: str
    shape: _Shape
    dtype: torch.dtype


class OutputDescription(NamedTuple):
    """An output; in its shape an int is a static dimension, a string names a symbolic one."""

    name: str
    shape: _Shape
    is_loss: bool


class OutputDescriptionTyped(NamedTuple):
    """An output with a known dtype; with mixed precision it is dtype_amp, if that is set."""

    name: str
    shape: _Shape
    is_loss: bool
    dtype: torch.dtype
    dtype_amp: torch.dtype | None


class _ORTTrainerModelDesc:
    """Description of a model, checked.

    Args:
        model_desc: `{"inputs": [(name, shape)], "outputs": [(name, shape) or (name, shape, is_loss)]}`, with at least
            one input and one output. A shape is a list of ints, static dimensions, and strings, names of symbolic ones;
            that of a scalar is empty. All names differ. At most one output is the loss.

    Attributes:
        inputs: an InputDescription for each input, an InputDescriptionTyped once its dtype is known.
        outputs: an OutputDescription for each output, an OutputDescriptionTyped once its dtype is known.
        learning_rate: description of the learning rate, float32 of shape [1].

    Raises:
        ValueError: "Invalid model_desc: ..." with all that is wrong, by its place.
    """

    _InputDescription = InputDescription
    _InputDescriptionTyped = InputDescriptionTyped
    _OutputDescription = OutputDescription
    _OutputDescriptionTyped = OutputDescriptionTyped

    def __init__(self, model_desc: Mapping[str, Any]) -> None:
        if not isinstance(model_desc, Mapping):
            raise ValueError(f"Invalid model_desc: expected a dict with 'inputs' and 'outputs', got {model_desc!r}")
        if odd := unsorted_keys(model_desc):
            raise ValueError(f"Invalid model_desc: {odd}")
        schema = _schema()
        validator = cerberus.Validator(schema, error_handler=DocumentErrors)
        if not validator.validate(dict(model_desc)):
            raise ValueError(f"Invalid model_desc: {validator.errors}{did_you_mean(validator.errors, schema)}")
        names = Counter(name for kind in ("inputs", "outputs") for name, *_ in model_desc[kind])
        if repeated := [name for name, count in names.items() if count > 1]:
            spelled = ", ".join(map(repr, repeated))
            raise ValueError(f"Invalid model_desc: give each input and output a name of its own; {spelled} is repeated")
        self.inputs: list[InputDescription | InputDescriptionTyped] = [
            InputDescription(name, list(shape)) for name, shape in model_desc["inputs"]
        ]
        self.outputs: list[OutputDescription | OutputDescriptionTyped] = [
            OutputDescription(name, list(shape), *(is_loss or [False]))
            for name, shape, *is_loss in model_desc["outputs"]
        ]
        self.learning_rate: InputDescriptionTyped = InputDescriptionTyped(
            LEARNING_RATE_IO_DESCRIPTION_NAME, [1], torch.float32
        )
        self._gradient_accumulation: OutputDescriptionTyped | None = None
        self._all_finite: OutputDescriptionTyped | None = None
        self._loss_scale_input: InputDescriptionTyped | None = None

    @property
    def loss_index(self) -> int | None:
        """Position of the loss in the outputs, if one is the loss."""
        return next((position for position, output in enumerate(self.outputs) if output.is_loss), None)

    def add_type_to_input_description(self, index: int, dtype: torch.dtype) -> None:
        """Set the dtype of an input, by its position.

        Raises:
            AssertionError: index is no int from 0 up, or dtype no dtype.
            IndexError: there is no such input.
        """
        require(isinstance(index, int) and index >= 0, "input 'index' must be a positive int")
        require(isinstance(dtype, torch.dtype), "input 'dtype' must be a torch.dtype type")
        name, shape, *_ = self.inputs[index]
        self.inputs[index] = InputDescriptionTyped(name, shape, dtype)

    def add_type_to_output_description(
        self, index: int, dtype: torch.dtype, dtype_amp: torch.dtype | None = None
    ) -> None:
        """Set the dtype of an output, by its position, and the dtype that it has with mixed precision.

        Raises:
            AssertionError: index is no int from 0 up, or a dtype no dtype.
            IndexError: there is no such output.
        """
        require(isinstance(index, int) and index >= 0, "output 'index' must be a positive int")
        require(isinstance(dtype, torch.dtype), "output 'dtype' must be a torch.dtype type")
        known = dtype_amp is None or isinstance(dtype_amp, torch.dtype)
        require(known, "output 'dtype_amp' must be either None or torch.dtype type")
        name, shape, is_loss, *_ = self.outputs[index]
        self.outputs[index] = OutputDescriptionTyped(name, shape, is_loss, dtype, dtype_amp)

    @property
    def gradient_accumulation(self) -> OutputDescriptionTyped | None:
        """Description of the output that says whether gradients were accumulated; a name is assigned to it."""
        return self._gradient_accumulation

    @gradient_accumulation.setter
    def gradient_accumulation(self, name: str) -> None:
        self._gradient_accumulation = OutputDescriptionTyped(_named(name, "output"), [1], False, torch.bool, None)

    @property
    def all_finite(self) -> OutputDescriptionTyped | None:
        """Description of the output that says whether gradients are finite; a name is assigned to it."""
        return self._all_finite

    @all_finite.setter
    def all_finite(self, name: str) -> None:
        self._all_finite = OutputDescriptionTyped(_named(name, "output"), [1], False, torch.bool, None)

    @property
    def loss_scale_input(self) -> InputDescriptionTyped | None:
        """Description of the input for the loss scale; a name is assigned to it."""
        return self._loss_scale_input

    @loss_scale_input.setter
    def loss_scale_input(self, name: str) -> None:
        self._loss_scale_input = InputDescriptionTyped(_named(name, "input"), [], torch.float32)

    def __repr__(self) -> str:
        lines = ["Model description:", "Inputs:"]
        lines += [f"\t{position}: {each}" for position, each in enumerate(self.inputs)]
        lines += ["Outputs:"]
        lines += [f"\t{position}: {each}" for position, each in enumerate(self.outputs)]
        for name in ("learning_rate", "all_finite", "loss_scale_input", "gradient_accumulation"):
            if getattr(self, name) is not None:
                lines.append(f"{name}: {getattr(self, name)}")
        return "\n".join(lines)


def _named(name: object, kind: str) -> str:
    require(isinstance(name, str) and len(name) > 0, f"'name' is an invalid {kind} name")
    return str(name)


def _schema() -> dict[str, Any]:
    """Give the schema of a description; it counts losses, and so serves one."""
    losses = 0

    def check_output(field: Any, value: Any, complain: _Complain) -> None:
        nonlocal losses
        if not isinstance(value, tuple) or len(value) not in (2, 3):
            complain(field, "must be a tuple with size 2 or 3")
        if isinstance(value, (tuple, list)) and len(value) == 3:
            if not isinstance(value[2], bool):
                complain(field, "the third element of the tuple (aka is_loss) must be a boolean")
            else:
                losses += value[2]
                if losses > 1:
                    complain(field, "only one is_loss can bet set to True")
        _check_name_and_shape(field, value, complain)

    def described(check: Callable[[Any, Any, _Complain], None]) -> dict[str, Any]:
        return {"type": "list", "required": True, "minlength": 1, "schema": {"check_with": check}}

    return {"inputs": described(_check_input), "outputs": described(check_output)}


def _check_input(field: Any, value: Any, complain: _Complain) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        complain(field, "must be a tuple with size 2")
    _check_name_and_shape(field, value, complain)


def _check_name_and_shape(field: Any, value: Any, complain: _Complain) -> None:
    if not isinstance(value, (tuple, list)) or len(value) < 2:
        return  # its size is complained of
    if not isinstance(value[0], str):
        complain(field, "the first element of the tuple (aka name) must be a string")
    if not isinstance(value[1], list):
        complain(field, "the second element of the tuple (aka shape) must be a list")
        return
    for dimension in value[1]:
        if not isinstance(dimension, (str, int)) or isinstance(dimension, bool):
            complain(field, "each shape must be either a string or integer")
