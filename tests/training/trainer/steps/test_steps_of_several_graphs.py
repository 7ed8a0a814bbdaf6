"""Tests of models that train in a forward and a backward graph, with a warning of the reason."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from row_trainers import CONFIGS, ROWS, WIDTH, plain_losses, rows, squares
from small_trainers import make_options
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTTrainer, export_training_graph


class Branching(nn.Module):
    """Asks for numbers: no trace can take it as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.positive = nn.Linear(WIDTH, 1)
        self.other = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.positive if bool(x.sum() > 0) else self.other
        return layer(self.drop(x)).squeeze(-1)


class AsksSymbol(Branching):
    """Puts a number that a trace does not know into an operator's arguments."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x).transpose(0, 1).unsqueeze(1)
        is_causal = bool((x > 1e9).all())
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=is_causal)
        return self.positive(y.squeeze(1).transpose(0, 1)).squeeze(-1)


class Disabled(Branching):
    """Calls a function that is disabled for Dynamo."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.compiler.disable(self.positive)(self.drop(x)).squeeze(-1)


@pytest.mark.parametrize("kind", [Branching, AsksSymbol, Disabled])
@pytest.mark.parametrize("config", ["sgd", "lamb"])
def test_the_reason_for_several_graphs_is_warned_of_once(kind: type[Branching], config: str) -> None:
    model = kind()
    data = [rows(seed=seed) for seed in range(3)]
    torch.manual_seed(4)
    expected = plain_losses(copy.deepcopy(model), 0.1, data)
    trainer = ORTTrainer(model, ROWS, CONFIGS[config](), squares, make_options())
    torch.manual_seed(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [float(trainer.train_step(*batch)[0]) for batch in data]
    (said,) = [str(one.message) for one in caught if "cannot be one graph" in str(one.message)]
    assert [one.filename for one in caught if "cannot be one graph" in str(one.message)] == [__file__]
    line = kind.forward.__code__.co_firstlineno
    places = [f"{Path(__file__).name}:{number}" for number in range(line, line + 6)]
    assert "run apart: " in said
    assert any(place in said for place in places)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)  # the generator advanced as far as in eager
    if config == "sgd":
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_exporting_a_step_of_several_graphs_is_refused() -> None:
    for kind in (Branching, AsksSymbol):
        with pytest.raises(ort_dynamo.errors.TrainingGraphError, match="one graph"):
            export_training_graph(kind(), ROWS, CONFIGS["sgd"](), rows(), loss_fn=squares)


def test_an_error_of_the_programs_is_raised_and_the_next_step_is_one_graph() -> None:
    trainer = ORTTrainer(
        nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(-2)), ROWS, CONFIGS["sgd"](), squares, make_options()
    )
    x, target = rows()
    with pytest.raises(RuntimeError):
        trainer.train_step(x[..., :-1], target)
    trainer.train_step(x.view(3, 5, WIDTH), target.view(3, 5))
    assert trainer._running is not None
    assert trainer._running.in_one_session


def test_gradients_gathered_over_branches_are_all_applied() -> None:
    model = Branching()
    model.drop.p = 0.0
    inputs = [torch.ones(1, 1, WIDTH), -torch.ones(1, 1, WIDTH)]
    target = torch.zeros(1, 1)
    options = make_options(batch={"gradient_accumulation_steps": 2})
    trainer = ORTTrainer(model, ROWS, CONFIGS["sgd"](), squares, options)
    with pytest.warns(UserWarning, match="cannot be one graph"):
        trainer.train_step(inputs[0], target)
    trainer.train_step(inputs[1], target)
    loss = sum(squares(model(x), target) for x in inputs) / 2
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    found = trainer.state_dict(pytorch_format=True)
    for (name, before), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(found[name], before.detach() - 0.1 * gradient)
