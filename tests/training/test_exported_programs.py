"""Exported graphs of programs with tensor literals, torch.cond and arithmetic on the size of the batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, ORTTrainerOptions
from ort_dynamo.errors import GradientGraphError, TrainingGraphError
from ort_dynamo.training import optim
from ort_dynamo.training.experimental import export_gradient_graph
from ort_dynamo.training.training_graph import export_training_graph

DESCRIPTION: dict[str, Any] = {
    "inputs": [("x", ["n", 4]), ("y", ["n"])],
    "outputs": [("loss", [], True), ("scores", ["n", 3])],
}


class Model(nn.Module):
    """A layer, and a function of its result, or of its input and two layers."""

    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def in_branches(model: Model, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: model.layer(x), lambda x: torch.tanh(model.layer(x)), (x,))


def over_the_batch(model: Model, x: Tensor) -> Tensor:
    scores = model.layer(x)
    return scores / (1 + scores.var(0, keepdim=True)) + scores.std(0, correction=0)


PROGRAMS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "a row": lambda model, x: model.layer(x) * torch.tensor([1.0, 2.0, 3.0]),
    "a scalar": lambda model, x: model.layer(x) * torch.tensor(2.0),
    "indices": lambda model, x: model.layer(x)[:, torch.tensor([2, 1, 0])],
    "a list of indices": lambda model, x: model.layer(x)[:, [2, 1, 0]],
    "a mask": lambda model, x: model.layer(x).masked_fill(torch.tensor([True, False, False]), -1.0),
    "a bfloat16 row": lambda model, x: model.layer(x) * torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16).float(),
    "branches": in_branches,
    "a variance over the batch": over_the_batch,
}


def feeds(rows: int, sign: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return sign * torch.randn(rows, 4).abs(), torch.randint(3, (rows,))


def run(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def expected(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of eager mode."""
    own = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(own(x), y)
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in own.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_training_graph_steps_as_eager_does_at_any_batch_size(name: str) -> None:
    model = Model(PROGRAMS[name])
    made = export_training_graph(
        model, DESCRIPTION, optim.SGDConfig(lr=0.5), feeds(6), loss_fn=nn.functional.cross_entropy
    )
    onnx.checker.check_model(made, full_check=True)
    for rows, sign in ((6, 1.0), (3, -1.0)):
        x, y = feeds(rows, sign)
        found = run(made.SerializeToString(), {"x": x.numpy(), "y": y.numpy()})
        loss, gradients = expected(model, x, y)
        np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
        for parameter, gradient in gradients.items():
            updated = model.get_parameter(parameter).detach() - 0.5 * gradient
            np.testing.assert_allclose(found[f"{parameter}.updated"], updated, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_graph_has_the_gradients_of_eager_at_any_batch_size(name: str, tmp_path: Path) -> None:
    model, path = Model(PROGRAMS[name]), tmp_path / "gradients.onnx"
    export_gradient_graph(model, nn.functional.cross_entropy, *feeds(6), path)
    for rows, sign in ((6, 1.0), (3, -1.0)):
        x, y = feeds(rows, sign)
        weights = {one: parameter.detach().numpy() for one, parameter in model.named_parameters()}
        found = run(path, {"input": x.numpy(), "labels": y.numpy(), **weights})
        loss, gradients = expected(model, x, y)
        np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
        for parameter, gradient in gradients.items():
            np.testing.assert_allclose(found[f"{parameter}_grad"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["a row", "branches"])
def test_a_trainer_writes_its_files(name: str, tmp_path: Path) -> None:
    paths = {"model_with_training_graph_path": str(tmp_path / "step.onnx")}
    debug = {"check_model_export": True, "graph_save_paths": paths}
    options = ORTTrainerOptions({"device": {"id": "cpu"}, "debug": debug})
    model, loss = Model(PROGRAMS[name]), nn.functional.cross_entropy
    x, y = feeds(5)
    trainer = ORTTrainer(model, DESCRIPTION, optim.SGDConfig(lr=0.1), loss, options)
    first, _ = trainer.train_step(x, y)
    given = {"x": x.numpy(), "y": y.numpy()}
    np.testing.assert_allclose(run(tmp_path / "step.onnx", given)["loss"], first.numpy(), rtol=1e-5)
    trainer.save_as_onnx(str(tmp_path / "forward.onnx"))
    second, _ = trainer.eval_step(x, y)
    np.testing.assert_allclose(run(tmp_path / "forward.onnx", given)["loss"], second.numpy(), rtol=1e-5)


def test_a_literal_of_a_dtype_that_no_session_holds_is_refused() -> None:
    model = Model(lambda model, x: (model.layer(x) * torch.tensor([1j, 2j, 3j])).real)
    with pytest.raises(
        TrainingGraphError, match=r"lift_fresh_copy\S*: dtype torch.complex64 has no ONNX Runtime tensor"
    ):
        export_training_graph(
            model, DESCRIPTION, optim.SGDConfig(lr=0.5), feeds(6), loss_fn=nn.functional.cross_entropy
        )


def test_a_size_that_has_no_form_in_onnx_is_refused_with_its_line() -> None:
    model = Model(lambda model, x: model.layer(x) + int(math.atan(x.shape[0])))
    with pytest.raises(TrainingGraphError, match=r"the number .*atan.* cannot be computed[^\n]*\n.*test_exported_pr"):
        export_training_graph(
            model, DESCRIPTION, optim.SGDConfig(lr=0.5), feeds(6), loss_fn=nn.functional.cross_entropy
        )


@pytest.mark.parametrize("part", ["forward", "gradients", "step"])
def test_a_loss_that_is_no_scalar_is_refused(part: Any, tmp_path: Path) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, labels, reduction="none")

    model, config = nn.Linear(4, 3), optim.SGDConfig(lr=0.5)
    with pytest.raises(
        TrainingGraphError, match=r"cannot be one graph: the loss has the shape \[6\], and must be a sc"
    ):
        export_training_graph(model, DESCRIPTION, config, feeds(6), loss_fn=loss, part=part)
    with pytest.raises(GradientGraphError, match=r"the loss has several elements, and must be a scalar"):
        export_gradient_graph(model, loss, *feeds(6), tmp_path / "a.onnx")
