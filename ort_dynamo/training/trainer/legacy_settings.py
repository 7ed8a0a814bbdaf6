"""Takes learning rate, loss scale and optimizer attributes as the first ORTTrainer was given them, to today's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import onnx
from torch import nn

from ort_dynamo.training import amp, optim
from ort_dynamo.training.optim import _LRScheduler
from ort_dynamo.training.requirements import require
from ort_dynamo.training.train_step_info import TrainStepInfo

__all__ = ["Attributes", "Scaler", "StepRate", "StepScale", "attributes_of", "optimizer_config"]


class Scaler(Protocol):
    """A loss scaler, as far as the first ORTTrainer needs it."""

    loss_scale_: float

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Take note of an update."""


class StepRate(_LRScheduler):
    """Gives the learning rate of a step: by the number of updates so far, or as passed to the step.

    Args:
        by_step: number of updates -> learning rate; None uses `given`.
    """

    def __init__(self, by_step: Callable[[int], float] | None) -> None:
        super().__init__()
        self.given: float = 0.0
        self._by_step = by_step

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Give the learning rate of a step, as a list of one."""
        return [self.given if self._by_step is None else float(self._by_step(train_step_info.optimization_step))]


class StepScale(amp.LossScaler):
    """Gives the loss scale that was assigned, and tells the program's scaler of each update.

    Args:
        scaler: the program's; None: there is none.
    """

    def __init__(self, scaler: Scaler | None) -> None:
        super().__init__(1.0)
        self._scaler = scaler

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Tell the program's scaler whether gradients were finite."""
        if self._scaler is not None:
            self._scaler.update_loss_scale(train_step_info.all_finite)
        return self.loss_scale


Attributes = Mapping[str, float | int]

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


def attributes_of(
    model: nn.Module | onnx.ModelProto,
    frozen: Sequence[str],
    given: Callable[[str], Attributes] | None,
) -> dict[str, Attributes]:
    """Name of a weight that is trained -> its optimizer's attributes.

    Args:
        model: the owner of the weights.
        frozen: names of weights that are not trained.
        given: gives the attributes by the name; None: all have the defaults, and the result is empty.

    Raises:
        ValueError: an attribute is neither float nor int.
    """
    if given is None:
        return {}
    if isinstance(model, nn.Module):
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    else:
        names = [one.name for one in model.graph.initializer if one.data_type in _FLOATS]
    found = {name: given(name) for name in names if name not in frozen}
    if not all(isinstance(value, (float, int)) for attributes in found.values() for value in attributes.values()):
        raise ValueError("Optimizer attributes must be either float or int.")
    return found


def optimizer_config(
    name: str, attributes: Mapping[str, Attributes]
) -> optim.SGDConfig | optim.AdamConfig | optim.LambConfig:
    """Make a configuration of an optimizer, by its name, of the attributes of each weight.

    Raises:
        AssertionError: there is no such optimizer, or it has no such attribute, or not that value of it.
    """
    kinds = {"SGDOptimizer": optim.SGDConfig, "AdamOptimizer": optim.AdamConfig, "LambOptimizer": optim.LambConfig}
    require(name in kinds, f"'training_optimizer_name' must be one of {', '.join(map(repr, kinds))}")
    if name == "SGDOptimizer":
        return optim.SGDConfig()
    alike: dict[tuple[tuple[str, float | int], ...], list[str]] = {}
    for weight, own in attributes.items():
        alike.setdefault(tuple(sorted(own.items())), []).append(weight)
    groups = [{"params": weights, **_typed(dict(own))} for own, weights in alike.items() if own]
    if name == "AdamOptimizer":
        return optim.AdamConfig(params=groups)
    return optim.LambConfig(params=groups, do_bias_correction=True)  # as the operator's default; LambConfig's is False


def _typed(attributes: dict[str, Any]) -> dict[str, Any]:
    """Give attributes of the operator the types that they have in a configuration."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "do_bias_correction": bool,
        "weight_decay_mode": optim.AdamConfig.DecayMode,
        "ratio_min": float,
        "ratio_max": float,
    }
    return {key: kinds[key](value) if key in kinds else value for key, value in attributes.items()}
