"""Section 2.3 of ORTTrainer's reference: a trainer's arguments, and those that it refuses."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
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

from ort_dynamo import ORTTrainer, ORTTrainerOptions, optim
from ort_dynamo.testing import assert_close

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


def test_hooks_of_parameters_are_warned_of() -> None:
    model = Mlp()
    model.fc1.weight.register_hook(lambda gradient: gradient * 2)
    model.fc2.bias.register_post_accumulate_grad_hook(lambda weight: None)
    model.fc2.weight.register_hook(lambda gradient: gradient * 2).remove()
    trainer = make_trainer(model=model)
    data = batches(2)
    with pytest.warns(
        UserWarning, match=r"calls no hooks of parameters\. These have some: fc1\.weight, fc2\.bias$"
    ) as said:
        trainer.train_step(*data[0])
    assert [one.filename for one in said] == [__file__]
    trainer.train_step(*data[1])


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
