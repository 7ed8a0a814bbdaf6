"""Parameters with the name of another input or output of an exported file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, ORTTrainerOptions
from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.training import optim
from ort_dynamo.training.experimental import export_gradient_graph
from ort_dynamo.training.training_graph import export_training_graph

DESCRIPTION: dict[str, Any] = {
    "inputs": [("x", ["n", 4]), ("y", ["n"])],
    "outputs": [("loss", [], True), ("scores", ["n", 3])],
}
BATCH = (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
CONFIG = optim.AdamConfig(lr=0.1)


class Scaled(nn.Module):
    """A layer behind a factor, which is a parameter or buffer with a name of choice."""

    def __init__(self, name: str, *, is_buffer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.name = name
        factor = torch.ones(4)
        self.register_buffer(name, factor) if is_buffer else self.register_parameter(name, nn.Parameter(factor))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * getattr(self, self.name))


def export(model: nn.Module, description: dict[str, Any] = DESCRIPTION, **given: Any) -> onnx.ModelProto:
    return export_training_graph(model, description, CONFIG, BATCH, loss_fn=nn.functional.cross_entropy, **given)


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("part", ["forward", "gradients", "step"])
@pytest.mark.parametrize("name", ["x", "y", "loss", "scores"])
def test_a_name_of_model_desc_may_not_be_a_tensors(name: str, part: Any, is_buffer: bool, tmp_path: Path) -> None:
    message = (
        "export_training_graph() cannot take the names in model_desc=['x', 'y', 'loss', 'scores']: expected names "
        f"other than {name!r}, since the file has a parameter or buffer of the model under this name."
    )
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        export(Scaled(name, is_buffer=is_buffer), part=part, path=tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.parametrize("name", ["learning_rate", "loss_scale", "all_finite", "Update_Count"])
def test_a_name_of_the_training_step_may_not_be_a_tensors(name: str) -> None:
    message = f"cannot take model=<class '.*Scaled'>: expected no parameter or buffer called {name!r}, since the file"
    with pytest.raises(InvalidArgumentError, match=message):
        export(Scaled(name))
    onnx.checker.check_model(export(Scaled(name), part="forward"), full_check=True)


@pytest.mark.parametrize("name", ["learning_rate", "layer.weight.Moment_1", "all_finite", "layer.weight.updated"])
def test_a_name_of_the_training_step_may_not_be_in_model_desc(name: str) -> None:
    outputs = [("loss", [], True), (name, ["n", 3])]
    message = rf"expected names other than {name!r}, since the file has the training step under this name"
    with pytest.raises(InvalidArgumentError, match=message):
        export(Scaled("factor"), {**DESCRIPTION, "outputs": outputs})


@pytest.mark.parametrize("name", ["input", "labels", "output", "loss", "layer.bias_grad", "factor_grad"])
def test_a_name_of_the_gradient_graph_may_not_be_a_tensors(name: str, tmp_path: Path) -> None:
    model = Scaled("factor")
    module, _, own = name.rpartition(".")
    model.get_submodule(module).register_parameter(own, nn.Parameter(torch.ones(4)))
    with pytest.raises(InvalidArgumentError, match=f"export_gradient_graph.* no parameter or buffer called {name!r}"):
        export_gradient_graph(model, nn.functional.cross_entropy, *BATCH, tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.parametrize("name", ["x", "scores"])
def test_a_trainer_trains_such_a_model_and_refuses_to_write_it(name: str, tmp_path: Path) -> None:
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    trainer = ORTTrainer(Scaled(name), DESCRIPTION, CONFIG, nn.functional.cross_entropy, options)
    assert trainer.train_step(*BATCH)[0].isfinite()
    with pytest.raises(InvalidArgumentError, match=rf"ORTTrainer\(\) cannot take the names .* other than {name!r}"):
        trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    options.debug.graph_save_paths.model_with_training_graph_path = str(tmp_path / "b.onnx")
    trainer = ORTTrainer(Scaled(name), DESCRIPTION, CONFIG, nn.functional.cross_entropy, options)
    with pytest.raises(InvalidArgumentError, match=rf"ORTTrainer\(\) cannot take the names .* other than {name!r}"):
        trainer.train_step(*BATCH)


@pytest.mark.parametrize("name", ["const_0", "mul", "sum_1", "_tensor_constant0", "batch"])
def test_other_names_are_those_of_the_file(name: str) -> None:
    made = export(Scaled(name))
    onnx.checker.check_model(made, full_check=True)
    assert name in {one.name for one in made.graph.input}
