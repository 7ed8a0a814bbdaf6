"""A small model with both of its trainers, the first ORTTrainer and today's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ort_dynamo import ORTTrainer as NewTrainer
from ort_dynamo import ORTTrainerOptions
from ort_dynamo.training.ort_trainer import IODescription, ModelDescription, ORTTrainer

RATE = IODescription("Learning_Rate", [1], torch.float32)


class Net(nn.Module):
    """Two layers, with dropout if asked for."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


def net(drop: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(drop)


def cross_entropy(prediction: Tensor, label: Tensor) -> Tensor:
    return nn.functional.cross_entropy(prediction, label)


def description() -> ModelDescription:
    x = IODescription("x", ["batch", 4], torch.float32)
    label = IODescription("label", ["batch"], torch.int64, num_classes=3)
    loss = IODescription("loss", [], torch.float32)
    return ModelDescription([x, label], [loss, IODescription("prediction", ["batch", 3], torch.float32)])


def batch(step: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def legacy(
    optimizer: str = "SGDOptimizer", attributes: Any = None, model: nn.Module | None = None, **kwargs: Any
) -> Any:
    return ORTTrainer(model or net(), cross_entropy, description(), optimizer, attributes, RATE, "cpu", **kwargs)


def today(config: Any, **levels: Any) -> NewTrainer:
    options = ORTTrainerOptions({"device": {"id": "cpu"}, **levels})
    return NewTrainer(net(), description().as_model_desc(), config, cross_entropy, options)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: one for name, one in trainer.state_dict().items() if name.startswith("fc")}


def assert_same(legacy_trainer: ORTTrainer, new_trainer: NewTrainer) -> None:
    expected = new_trainer.state_dict(pytorch_format=True)
    found = legacy_trainer.state_dict(include_optimizer_state=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
