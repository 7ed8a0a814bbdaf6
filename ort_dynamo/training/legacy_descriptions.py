"""The descriptions of the first ORTTrainer, that of onnxruntime.capi.ort_trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["IODescription", "ModelDescription"]


class IODescription:
    """An input or output of a model, for the first ORTTrainer.

    Args:
        name: its name.
        shape: its dimensions: an int is static, a string names a symbolic one. Empty for a scalar.
        dtype: its dtype.
        num_classes: for an integer input, the number of values it takes, from 0 on.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int | str],
        dtype: torch.dtype | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """The inputs and outputs of a model, for the first ORTTrainer.

    Args:
        inputs: the model's inputs, then the label where a loss function is given.
        outputs: the model's outputs, the loss first.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = inputs
        self.outputs_ = outputs

    def as_model_desc(self) -> dict[str, list[Any]]:
        """Give the description as the dict that today's ORTTrainer takes; the first output is the loss."""
        inputs = [(each.name_, list(each.shape_)) for each in self.inputs_]
        outputs = [(each.name_, list(each.shape_), position == 0) for position, each in enumerate(self.outputs_)]
        return {"inputs": inputs, "outputs": outputs}
