"""Section 2.3 of ORTTrainer's reference: a trainer's arguments, and those that it refuses."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import DESC, Mlp, PlainLoop, assert_same_weights, batches, classify, losses, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, ORTTrainerOptions, optim
from ort_dynamo.errors import TrainingGraphError
from ort_dynamo.testing import TOLERANCES, assert_close

SGD = optim.SGDConfig(lr=0.1)
NO_LOSS = {"inputs": DESC["inputs"], "outputs": [("loss", []), ("predictions", ["batch", 3])]}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"model": None},
            AssertionError,
            "'model' is required and must be either a 'torch.nn.Module' or ONNX model",
        ),
        ({"model_desc": None}, AssertionError, "'model_desc' must be a 'dict'"),
        ({"model_desc": [DESC]}, AssertionError, "'model_desc' must be a 'dict'"),
        (
            {"optim_config": None},
            AssertionError,
            "'optim_config' is required and must be any of 'AdamConfig', 'LambConfig' or 'SGDConfig'",
        ),
        (
            {"optim_config": {"name": "SGDOptimizer"}},
            AssertionError,
            "'optim_config' is required and must be any of 'AdamConfig', 'LambConfig' or 'SGDConfig'",
        ),
        ({"loss_fn": 1}, AssertionError, "'loss_fn' must be either 'None' or a callable with two parameters"),
        (
            {"loss_fn": lambda prediction: prediction},
            AssertionError,
            "'loss_fn' must be either 'None' or a callable with two parameters",
        ),
        (
            {"loss_fn": lambda a, b, c: a},
            AssertionError,
            "'loss_fn' must be either 'None' or a callable with two parameters",
        ),
        ({"options": {}}, AssertionError, "'options' must be either 'None' or 'ORTTrainerOptions'"),
        ({"model": 1}, ValueError, "'model' must be either 'torch.nn.Module' or 'onnx.ModelProto'"),
        ({"model_desc": NO_LOSS}, AssertionError, "Only one loss output is supported (0 were specified)"),
        ({"model_desc": {"inputs": []}}, ValueError, "Invalid model_desc: "),
        ({"optim_config": optim.SGDConfig}, AssertionError, "'optim_config' is required and must be any of "),
    ],
)
def test_an_argument_of_another_kind_is_refused(arguments: dict[str, Any], error: Any, text: str) -> None:
    given = {"model": Mlp(), "model_desc": DESC, "optim_config": SGD, "loss_fn": classify, **arguments}
    with pytest.raises(error) as raised:
        ORTTrainer(**given)
    assert str(raised.value).startswith(text)


def test_a_description_with_two_losses_is_refused() -> None:
    desc = {"inputs": DESC["inputs"], "outputs": [("a", [], True), ("b", [], True)]}
    with pytest.raises(ValueError, match="only one is_loss can bet set to True"):
        ORTTrainer(Mlp(), desc, SGD)


def test_a_loss_function_of_torchs_may_have_further_parameters_with_defaults() -> None:
    trainer, own = make_trainer(loss_fn=torch.nn.functional.cross_entropy), make_trainer()
    (x, y) = batches(1)[0]
    assert_close(trainer.train_step(x, y)[0], own.train_step(x, y)[0], "losses")


def test_making_a_trainer_runs_nothing() -> None:
    class Untouched(Mlp):
        def forward(self, input1: Tensor) -> Tensor:
            raise AssertionError("it ran")

    trainer = make_trainer(model=Untouched())
    assert trainer._onnx_model is None
    assert trainer._training_session is None
    assert trainer.loss_fn is classify


def test_weights_have_the_names_of_the_model() -> None:
    trainer = make_trainer()
    trainer.train_step(*batches(1)[0])
    assert list(trainer.state_dict(pytorch_format=True)) == list(Mlp().state_dict())
    assert trainer._training_session is not None
    assert {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"} <= trainer._training_session.get_state().keys()


def test_inputs_are_given_by_place_by_name_or_as_one_list() -> None:
    calls: list[Callable[[ORTTrainer, Tensor, Tensor], Any]] = [
        lambda trainer, x, y: trainer.train_step(x, y),
        lambda trainer, x, y: trainer.train_step(label=y, input1=x),
        lambda trainer, x, y: trainer.train_step(x, label=y),
        lambda trainer, x, y: trainer.train_step([x, y]),
        lambda trainer, x, y: trainer.train_step((x, y)),
    ]
    (x, y) = batches(1)[0]
    trainer = make_trainer(optim.SGDConfig(lr=0.0))
    found = [call(trainer, x, y)[0] for call in calls]
    assert all(torch.equal(found[0], one) for one in found)
    for call in (lambda: trainer.train_step(x), lambda: trainer.train_step(x, y, y), lambda: trainer.train_step()):
        with pytest.raises(AssertionError, match=r"model_desc has 2 inputs, and [013] are given"):
            call()
    with pytest.raises(AssertionError, match=r"no inputs \['labels'\]"):
        trainer.train_step(x, labels=y)
    with pytest.raises(AssertionError, match="the input 'label' is str, not a tensor"):
        trainer.train_step(x, "label")
    assert trainer._train_step_info.step == len(calls)


def test_forward_may_have_keyword_parameters_in_another_order() -> None:
    class Swapped(Mlp):
        def forward(self, *, scale: Tensor, input1: Tensor) -> Tensor:
            return super().forward(input1) * scale

    desc = {"inputs": [("input1", ["batch", 4]), ("scale", []), ("label", ["batch"])], "outputs": DESC["outputs"]}
    torch.manual_seed(1)
    trainer = make_trainer(model=Swapped(), desc=desc)
    x, y = batches(1)[0]
    twice = trainer.eval_step(x, 2.0, y)[1]
    assert_close(twice, 2 * make_trainer().eval_step(x, y)[1], "predictions")


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = Mlp()
    before = copy.deepcopy(model.state_dict())
    trainer = make_trainer(model=model)
    losses(trainer, batches(2))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert model.training
    assert not np.array_equal(weights(trainer)["fc1.weight"], before["fc1.weight"].numpy())


def test_changes_of_the_model_before_the_first_step_count() -> None:
    model = Mlp()
    trainer = make_trainer(optim.SGDConfig(lr=0.0), model)
    with torch.no_grad():
        model.fc1.weight.fill_(0.5)
    trainer.train_step(*batches(1)[0])
    assert (weights(trainer)["fc1.weight"] == 0.5).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_trainers_that_are_made_and_seeded_alike_are_equal(dropout: float) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        trainer = make_trainer(optim.AdamConfig(lr=0.01), Mlp(dropout))
        torch.manual_seed(7)
        found.append((losses(trainer, batches(3)), weights(trainer)))
    (losses1, weights1), (losses2, weights2) = found
    assert losses1 == losses2
    assert all(np.array_equal(one, weights2[name]) for name, one in weights1.items())


class Uncopied(Mlp):
    """Cannot be copied or pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_trained_itself_with_a_warning() -> None:
    torch.manual_seed(1)
    model = Uncopied()
    plain = Mlp()
    plain.load_state_dict(model.state_dict())
    expected = PlainLoop(plain, SGD)
    trainer = make_trainer(model=model)
    data = batches(2)
    with pytest.warns(UserWarning, match="This model cannot be deep copied") as said:
        trainer.train_step(*data[0])
    assert len(said) == 1
    assert said[0].filename == __file__
    trainer.train_step(*data[1])
    for batch in data:
        expected.step(*batch)
    assert_same_weights(trainer, expected.weights)
    assert np.array_equal(weights(trainer)["fc1.weight"], model.fc1.weight.detach().numpy())


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


# -- the model's results -----------------------------------------------------------------------------------------------


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


def test_a_described_output_that_is_no_tensor_is_refused() -> None:
    class Odd(Mlp):
        def forward(self, input1: Tensor) -> Any:
            return "prediction", super().forward(input1)

    trainer = make_trainer(model=Odd(), loss_fn=lambda found, y: classify(found[1], y))
    with pytest.raises(TrainingGraphError, match="the model returns str; expected a tensor"):
        trainer.train_step(*batches(1)[0])


# -- modes -------------------------------------------------------------------------------------------------------------


class Normed(Mlp):
    """With a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(8)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(self.bn(self.fc1(input1)))


def test_a_layer_in_evaluation_mode_stays_in_it() -> None:
    model = Normed()
    model.bn.eval()
    trainer = make_trainer(model=model)
    (x, y), *rest = batches(2)
    trainer.train_step(x, y)
    trainer.eval_step(x, y)
    trainer.train_step(*rest[0])
    found = weights(trainer)
    assert (found["bn.running_mean"] == 0).all()
    assert found["bn.num_batches_tracked"] == 0
    assert not model.bn.training
    assert model.training


def test_a_model_that_is_given_in_evaluation_mode_is_trained_in_training_mode() -> None:
    trainer = make_trainer(model=Normed().eval())
    trainer.train_step(*batches(1)[0])
    assert weights(trainer)["bn.num_batches_tracked"] == 1


def test_a_group_that_names_nothing_of_the_model_is_warned_of() -> None:
    config = optim.AdamConfig([{"params": ["fc1.weight", "fc1.wait"], "alpha": 0.5}])
    trainer = make_trainer(config)
    with pytest.warns(UserWarning, match=r"groups name parameters that the model does not have: \['fc1.wait'\]"):
        trainer.train_step(*batches(1)[0])


def test_no_options_are_the_defaults_on_a_device_that_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = ORTTrainer(Mlp(), DESC, SGD, classify)
    loss, _ = trainer.train_step(*batches(1)[0])
    assert loss.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert trainer.options._validated_opts.keys() == ORTTrainerOptions()._validated_opts.keys()
