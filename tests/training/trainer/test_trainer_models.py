"""Section 2.3 of ORTTrainer's reference: weights and results that a trainer's model may have."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from small_trainers import (
    DESC,
    SGD,
    Mlp,
    PlainLoop,
    assert_same_weights,
    batches,
    classify,
    losses,
    make_trainer,
    weights,
)
from torch import Tensor, nn

from ort_dynamo import ORTModule, optim
from ort_dynamo.errors import TrainingGraphError
from ort_dynamo.testing import TOLERANCES, assert_close


class Unread(Mlp):
    """Has an input that it does not read."""

    def forward(self, input1: Tensor, unread: Tensor) -> Tensor:
        return super().forward(input1)


@pytest.mark.parametrize("one_session", [True, False])
def test_an_input_that_is_not_read_is_accepted(one_session: bool) -> None:
    desc = {"inputs": [("input1", ["b", 4]), ("unread", [1]), ("label", ["b"])], "outputs": DESC["outputs"]}
    torch.manual_seed(1)
    trainer = make_trainer(model=Unread(), desc=desc, one_session=one_session)
    torch.manual_seed(1)
    plain = PlainLoop(Mlp(), SGD)
    for x, y in batches(2):
        trainer.train_step(x, torch.zeros(1), y)
        plain.step(x, y)
    assert_same_weights(trainer, plain.weights)


@pytest.mark.parametrize("one_session", [True, False])
def test_an_ortmodule_trains_as_the_module_in_it(
    one_session: bool, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    trainer = make_trainer(model=ORTModule(Mlp()), one_session=one_session)
    torch.manual_seed(1)
    plain = PlainLoop(Mlp(), SGD)
    for x, y in batches(2):
        trainer.train_step(x, y)
        plain.step(x, y)
    assert not [one for one in recwarn if "cannot be one graph" in str(one.message)]
    assert_same_weights(trainer, plain.weights)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    initializers = {one.name for one in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert initializers >= set(plain.weights)


@pytest.mark.parametrize("one_session", [True, False])
def test_a_weight_that_requires_no_gradient_stays(one_session: bool) -> None:
    torch.manual_seed(1)
    model = Mlp()
    model.fc1.requires_grad_(False)
    before = model.fc1.weight.clone()
    trainer = make_trainer(optim.AdamConfig(lr=0.1, lambda_coef=0.1), model, one_session=one_session)
    losses(trainer, batches(2))
    assert np.array_equal(weights(trainer)["fc1.weight"], before.numpy())
    assert not np.array_equal(weights(trainer)["fc2.weight"], model.fc2.weight.detach().numpy())
    assert trainer.state_dict()["optimizer"].keys() == {"fc2.weight", "fc2.bias"}
    assert "fc1.weight" not in trainer._training_session.get_state()  # type: ignore[union-attr]


class UnusedWeight(Mlp):
    """Has a weight that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


@pytest.mark.parametrize("one_session", [True, False])
def test_a_weight_that_the_loss_does_not_depend_on_stays(one_session: bool) -> None:
    model = UnusedWeight()
    trainer = make_trainer(optim.AdamConfig(lr=0.1, lambda_coef=0.1), model, one_session=one_session)
    losses(trainer, batches(2))
    assert np.array_equal(weights(trainer)["other.weight"], model.other.weight.detach().numpy())
    assert not np.array_equal(weights(trainer)["fc1.weight"], model.fc1.weight.detach().numpy())


class Tied(nn.Module):
    """One matrix by two names, the second of which is read first, and one vector that is read by its second alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.bias = nn.Parameter(torch.full((3,), 0.1))
        self.last = nn.Linear(4, 3)
        self.last.bias = self.bias

    def forward(self, input1: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.second(input1)))))


@pytest.mark.parametrize(
    ("group", "one_session"),
    [
        ("second.weight", True),
        pytest.param("first.weight", True, marks=pytest.mark.slow),
        ("first.weight", False),
        pytest.param("second.weight", False, marks=pytest.mark.slow),
    ],
)
def test_tied_weights_are_one_weight_by_all_its_names(group: str, one_session: bool) -> None:
    torch.manual_seed(1)
    config = optim.AdamConfig([{"params": [group], "lambda_coef": 0.5}], lr=0.01)
    model = Tied()
    trainer = make_trainer(config, model, one_session=one_session)
    plain = PlainLoop(model, optim.AdamConfig([{"params": ["first.weight"], "lambda_coef": 0.5}], lr=0.01))
    for batch in batches(3):
        trainer.train_step(*batch)
        plain.step(*batch)
    assert_same_weights(trainer, plain.weights)
    found = weights(trainer)
    assert np.array_equal(found["first.weight"], found["second.weight"])
    assert np.array_equal(found["bias"], found["last.bias"])
    assert {"first.weight", "bias"} <= trainer.state_dict()["optimizer"].keys()
    assert not {"second.weight", "last.bias"} & trainer.state_dict()["optimizer"].keys()


def test_tied_narrow_weights_have_one_master_by_all_names() -> None:
    trainer = make_trainer(optim.SGDConfig(lr=1e-4), Tied().bfloat16(), loss_fn=lambda p, y: classify(p.float(), y))
    x, y = batches(1)[0]
    trainer.train_step(x.bfloat16(), y)
    found = weights(trainer)
    assert np.array_equal(found["first.weight"], found["second.weight"])
    assert np.array_equal(found["bias"], found["last.bias"])


@dataclass
class Kind:
    """A kind of model output: how the tensors are wrapped, and where a loss_fn finds the prediction."""

    wrap: Callable[[Tensor, Tensor], Any]
    prediction: Callable[[Any], Tensor]


def model_output(prediction: Tensor, hidden: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=prediction, hidden_states=(hidden,))


Named = namedtuple("Named", ["prediction", "hidden"])


KINDS = {
    "a tuple": Kind(lambda p, h: (p, h), lambda found: found[0]),
    "a list in a tuple": Kind(lambda p, h: ([p], None, h), lambda found: found[0][0]),
    "a dict": Kind(lambda p, h: {"p": p, "h": h}, lambda found: found["p"]),
    "a named tuple": Kind(Named, lambda found: found.prediction),
    "a ModelOutput": Kind(model_output, lambda found: found.logits),
}


class Returning(Mlp):
    """Returns its tensors in some container."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input1: Tensor) -> Any:
        hidden = torch.tanh(self.fc1(input1))
        return self.kind.wrap(self.fc2(hidden), hidden)


@pytest.mark.parametrize(
    ("name", "mixed"),
    [
        ("a list in a tuple", False),
        ("a ModelOutput", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in KINDS if name != "a list in a tuple"),
        pytest.param("a named tuple", True, marks=pytest.mark.slow),
    ],
)
def test_a_model_may_return_any_container(name: str, mixed: bool) -> None:
    kind = KINDS[name]
    outputs = [*DESC["outputs"], ("hidden", ["batch", 8])]
    torch.manual_seed(1)
    model = Returning(kind)
    trainer = make_trainer(
        model=model,
        desc={"inputs": DESC["inputs"], "outputs": outputs},
        loss_fn=lambda found, y: classify(kind.prediction(found), y),
        mixed_precision={"enabled": mixed},
    )
    x, y = batches(1)[0]
    loss, prediction, hidden = trainer.train_step(x, y)
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=mixed):
        expected = torch.tanh(model.fc1(x))
        logits = model.fc2(expected)
    narrow = torch.float16 if mixed else torch.float32
    assert_close(hidden, expected.to(narrow), "hidden")
    assert_close(prediction, logits.to(narrow), "prediction")
    assert_close(loss, classify(logits.float(), y), "loss", TOLERANCES[narrow])
    assert not loss.requires_grad


class WithLoss(Mlp):
    """Gives its loss at some place of its outputs."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, input1: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.fc1(input1))
        prediction = self.fc2(hidden)
        outputs = [prediction, hidden]
        outputs.insert(self.place, classify(prediction, label))
        return tuple(outputs)


@pytest.mark.parametrize(
    ("place", "one_session"),
    [
        (0, False),
        (1, True),
        (2, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_a_models_own_loss_may_be_any_of_its_outputs(place: int, one_session: bool) -> None:
    outputs: list[tuple[Any, ...]] = [("predictions", ["batch", 3]), ("hidden", ["batch", 8])]
    outputs.insert(place, ("loss", [], True))
    torch.manual_seed(1)
    model = WithLoss(place)
    desc = {"inputs": DESC["inputs"], "outputs": outputs}
    trainer = make_trainer(model=model, desc=desc, loss_fn=None, one_session=one_session)
    torch.manual_seed(1)
    plain = PlainLoop(Mlp(), SGD)
    for batch in batches(2):
        found = trainer.train_step(*batch)
        assert [one.dim() for one in found] == [0 if at == place else 2 for at in range(3)]
        assert found[place].item() == pytest.approx(plain.step(*batch), rel=2e-5)
    assert_same_weights(trainer, plain.weights)


def test_outputs_that_are_not_described_are_left_out() -> None:
    class More(Mlp):
        def forward(self, input1: Tensor) -> Any:
            return super().forward(input1), input1 * 2, object

    trainer = make_trainer(model=More(), loss_fn=lambda found, y: classify(found[0], y))
    assert len(trainer.train_step(*batches(1)[0])) == 2


def test_too_few_outputs_are_refused() -> None:
    desc = {"inputs": DESC["inputs"], "outputs": [*DESC["outputs"], ("more", [])]}
    with pytest.raises(TrainingGraphError, match="the model returns 1 tensors, and model_desc has 2 outputs of it"):
        make_trainer(desc=desc).train_step(*batches(1)[0])


@pytest.mark.parametrize("one_session", [True, False])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda loss: loss.expand(2), r"the loss has the shape \[2\], and must be a scalar"),
        (lambda loss: loss * 1j, r"the loss is torch.complex64, and must be real"),
        (lambda loss: 3.0, r"loss_fn returns float; expected a tensor"),
        (lambda loss: (loss, loss), r"loss_fn returns tuple; expected a tensor"),
    ],
    ids=["shape", "complex", "number", "tuple"],
)
def test_a_loss_that_is_no_real_scalar_is_refused(
    change: Callable[[Tensor], Any], text: str, one_session: bool
) -> None:
    trainer = make_trainer(one_session=one_session, loss_fn=lambda found, y: change(classify(found, y)))
    with pytest.raises(TrainingGraphError, match=text):
        trainer.train_step(*batches(1)[0])


@pytest.mark.parametrize("one_session", [True, False])
def test_a_loss_may_have_a_dimension_of_one_element(one_session: bool) -> None:
    batch = batches(1)[0]
    trainer = make_trainer(one_session=one_session, loss_fn=lambda found, y: classify(found, y).reshape(1))
    assert trainer.train_step(*batch)[0].numel() == 1


def test_a_described_output_that_is_no_tensor_is_refused() -> None:
    class Odd(Mlp):
        def forward(self, input1: Tensor) -> Any:
            return "prediction", super().forward(input1)

    trainer = make_trainer(model=Odd(), loss_fn=lambda found, y: classify(found[1], y))
    with pytest.raises(TrainingGraphError, match="the model returns str; expected a tensor"):
        trainer.train_step(*batches(1)[0])


LOG = logging.getLogger(__name__)


class Logging(Mlp):
    """Logs as many models of transformers do."""

    def forward(self, input1: Tensor) -> Tensor:
        LOG.warning("the model runs")
        LOG.info("with %s rows", input1.shape[0])
        return super().forward(input1)


@pytest.mark.parametrize("one_session", [True, False])
def test_a_model_that_logs_is_one_graph(one_session: bool) -> None:
    torch.manual_seed(1)
    trainer = make_trainer(model=Logging(), one_session=one_session)
    torch.manual_seed(1)
    plain = PlainLoop(Mlp(), SGD)
    for x, y in batches(2):
        trainer.train_step(x, y)
        plain.step(x, y)
    assert_same_weights(trainer, plain.weights)


@pytest.mark.parametrize("one_session", [True, False])
def test_a_label_without_a_loss_function_is_told(one_session: bool) -> None:
    trainer = make_trainer(loss_fn=None, one_session=one_session)
    with pytest.raises(TypeError) as raised:
        trainer.train_step(*batches(1)[0])
    (note,) = raised.value.__notes__
    assert note.startswith("Mlp.forward() cannot take 2 inputs")
    assert "give loss_fn" in note
