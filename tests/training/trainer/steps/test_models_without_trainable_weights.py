"""Tests of models that no step can train."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from row_trainers import CONFIGS, WIDTH
from small_trainers import make_options
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTTrainer, amp, export_training_graph

LOSS: dict[str, Any] = {"inputs": [("x", ["batch", WIDTH])], "outputs": [("loss", [], True)]}


class Nothing(nn.Module):
    """Has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Counting(nn.Module):
    """Has a buffer alone, which it counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mean() + self.calls


class OneLayer(nn.Module):
    """A layer, of which subclasses make a loss without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean()


class Frozen(OneLayer):
    """Has frozen parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Unread(OneLayer):
    """Computes its loss without its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Detached(OneLayer):
    """Computes its loss without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean().detach()


class Counted(OneLayer):
    """Gives a loss of integers."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) > 0).sum()


@pytest.mark.parametrize("kind", [Nothing, Counting, Frozen, Unread, Detached, Counted])
@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ("sgd", {}),
        ("lamb", {}),
        ("adam", {"batch": {"gradient_accumulation_steps": 2}}),
        ("lamb", {"mixed_precision": {"enabled": True, "loss_scaler": amp.DynamicLossScaler()}}),
    ],
    ids=["sgd", "lamb", "gathered", "scaled"],
)
def test_a_model_without_trainable_weights_gives_its_loss_and_warns(
    kind: type[nn.Module], config: str, levels: dict[str, Any]
) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    trainer = ORTTrainer(model, LOSS, CONFIGS[config](), options=make_options(**levels))
    x = torch.ones(2, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [float(trainer.train_step(x)) for _ in range(3)]
    (said,) = [str(one.message) for one in caught]
    assert "trains nothing" in said
    np.testing.assert_allclose(found, [float(plain(x)) for _ in range(3)], rtol=2e-3)
    trained = trainer.state_dict(pytorch_format=True)
    assert trained.keys() == plain.state_dict().keys()
    for name, one in plain.state_dict().items():
        assert torch.equal(trained[name], one)
    trainer.load_state_dict(trainer.state_dict())
    trainer.eval_step(x)


@pytest.mark.parametrize("kind", [Nothing, Frozen, Unread, Detached])
def test_the_training_graph_of_a_model_without_trainable_weights_is_refused(kind: type[nn.Module]) -> None:
    forward = export_training_graph(kind(), LOSS, CONFIGS["sgd"](), [torch.ones(2, WIDTH)], part="forward")
    onnx.checker.check_model(forward, full_check=True)
    with pytest.raises(ort_dynamo.errors.TrainingGraphError, match="does not depend on any trainable weight"):
        export_training_graph(kind(), LOSS, CONFIGS["sgd"](), [torch.ones(2, WIDTH)])
