"""Section 2.6 of ORTTrainer's reference: configurations of optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ort_dynamo import optim
from ort_dynamo.training.optim.config import _OptimizerConfig

GROUPED = (optim.AdamConfig, optim.LambConfig)


def message_of(make: Any, *args: Any, **settings: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        make(*args, **settings)
    return str(caught.value)


def test_defaults_are_the_old_ones() -> None:
    sgd = optim.SGDConfig()
    assert (sgd.name, sgd.lr, sgd.params, sgd.defaults) == ("SGDOptimizer", 0.001, [], {"lr": 0.001})
    adam = optim.AdamConfig()
    assert (adam.name, adam.lr) == ("AdamOptimizer", 0.001)
    before = optim.AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE
    shared = {"lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda": 0.0, "max_norm_clip": 1.0}
    assert adam.defaults == {**shared, "epsilon": 1e-8, "do_bias_correction": True, "weight_decay_mode": before}
    lamb = optim.LambConfig()
    assert (lamb.name, lamb.lr) == ("LambOptimizer", 0.001)
    ratios = {"ratio_min": -math.inf, "ratio_max": math.inf}
    assert lamb.defaults == {**shared, "epsilon": 1e-6, "do_bias_correction": False, **ratios}
    for config in (adam, lamb):
        for name, value in config.defaults.items():
            assert getattr(config, "lambda_coef" if name == "lambda" else name) == value


def test_positional_arguments_have_their_old_order() -> None:
    after = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    assert [int(mode) for mode in optim.AdamConfig.DecayMode] == [0, 1]
    adam = optim.AdamConfig([], 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, False, after)
    assert list(adam.defaults.values()) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, False, after]
    lamb = optim.LambConfig([], 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, True)
    assert list(lamb.defaults.values()) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, True]
    assert list(lamb.defaults)[4:6] == ["ratio_min", "ratio_max"]
    assert optim.SGDConfig([], 2).lr == 2.0


@pytest.mark.parametrize("kind", GROUPED)
def test_a_group_has_all_hyperparameters_and_its_own(kind: Any) -> None:
    group = {"params": ["a", "b"], "alpha": 0.1, "lambda_coef": 0.5}
    config = kind([group], alpha=0.2, beta=0.3)
    assert config.params == [{**config.defaults, "params": ["a", "b"], "alpha": 0.1, "lambda": 0.5}]
    assert group == {"params": ["a", "b"], "alpha": 0.1, "lambda_coef": 0.5}
    assert kind([{"params": ["a"], "lambda": 0.5}]).params[0]["lambda"] == 0.5


@pytest.mark.parametrize("kind", GROUPED)
def test_the_documents_spelling_of_groups_is_taken(kind: Any) -> None:
    groups = [{"params": ["model_param0"], "alpha": 0.8, "beta": 0.7}, {"params": ["p1", "p2"], "alpha": 0.0}]
    config = kind(param_groups=groups, alpha=0.9, beta=0.999)
    assert config.params == kind(groups, alpha=0.9, beta=0.999).params
    assert config.params[1]["beta"] == 0.999
    message = message_of(kind, groups, param_groups=groups)
    assert message == "'params' and 'param_groups' are two names of one argument: give one of them"


@pytest.mark.parametrize("kind", GROUPED)
def test_invalid_groups_are_refused_with_the_reason(kind: Any) -> None:
    assert message_of(kind, [{"params": ["a"], "lr": 0.1}]) == "'lr' is not supported inside params"
    shape = (
        "Each dict inside 'params' must contain a {'params' : [model parameter names]} entry "
        "and additional entries for custom hyper parameter values"
    )
    for group in ([], "a", {}, {"params": ["a"]}, {"alpha": 0.1, "beta": 0.2}):
        assert message_of(kind, [group]) == shape
    for names in ("a", [1], None):
        group = {"params": names, "alpha": 0.1}
        assert message_of(kind, [group]) == "'params' of a parameter group must be a list of names"
    unknown = message_of(kind, [{"params": ["a"], "gamma": 0.1}])
    assert unknown == "'params' has gamma hyper parameter not present at 'defaults'"
    for params in ({}, None, "a", 3):
        assert message_of(kind, params) == "'params' must be a list"


NUMBERS = [("lr", kind) for kind in (optim.SGDConfig, *GROUPED)]
NUMBERS += [(name, kind) for name in ("alpha", "beta", "lambda_coef", "epsilon") for kind in GROUPED]


@pytest.mark.parametrize(("name", "kind"), NUMBERS)
def test_numbers_are_not_below_zero(name: str, kind: Any) -> None:
    message = "lr must be a positive number" if kind is optim.SGDConfig else f"'{name}' must be a positive number"
    for value in (-1, -1e-9, math.nan, "1", None):
        assert message_of(kind, **{name: value}) == message
    assert kind(**{name: 0}).defaults["lambda" if name == "lambda_coef" else name] == 0
    if name != "lr":
        assert message_of(kind, [{"params": ["a"], name: -1}]) == message


@pytest.mark.parametrize("kind", GROUPED)
def test_the_clipped_norm_is_above_zero(kind: Any) -> None:
    assert message_of(kind, max_norm_clip=0) == "'max_norm_clip' must not be 0"
    assert message_of(kind, max_norm_clip=-1.0) == "'max_norm_clip' must be a positive number"
    assert message_of(kind, max_norm_clip="a") == "'max_norm_clip' must be a positive number"
    assert message_of(kind, [{"params": ["a"], "max_norm_clip": 0.0}]) == "'max_norm_clip' must not be 0"


@pytest.mark.parametrize("kind", GROUPED)
def test_the_correction_of_the_bias_is_a_flag(kind: Any) -> None:
    assert message_of(kind, do_bias_correction=1) == "'do_bias_correction' must be a boolean"


def test_arguments_of_an_optimizer_are_checked_for_their_type() -> None:
    assert message_of(optim.AdamConfig, weight_decay_mode=0) == "'weight_decay_mode' must be a AdamConfig.DecayMode"
    assert message_of(optim.LambConfig, ratio_min=0) == "'ratio_min' must be a valid float"
    assert message_of(optim.LambConfig, ratio_max=1) == "'ratio_max' must be a valid float"


def test_gradient_descent_takes_no_groups() -> None:
    groups = [{"params": ["a"], "lr": 0.1}]
    message = "'params' must be an empty list for SGD optimizer"
    assert message_of(optim.SGDConfig, params=groups, lr=0.002) == message
    assert message_of(optim.SGDConfig, param_groups=groups) == message


@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer", "SGDOptimizer"])
def test_the_base_takes_any_hyperparameters(name: str) -> None:
    config = _OptimizerConfig(name, [{"params": ["a"], "alpha": 0.3}], {"lr": 0.1, "alpha": 0.2})
    assert (config.name, config.lr) == (name, 0.1)
    assert config.params == [{"params": ["a"], "alpha": 0.3, "lr": 0.1}]
    assert optim.config._OptimizerConfig is optim._OptimizerConfig is _OptimizerConfig


@pytest.mark.parametrize(
    ("name", "params", "defaults", "message"),
    [
        ("AdamOptimizer", [], {"lr": -1}, "lr must be a positive number"),
        ("AdamOptimizer", [], {"lr": None}, "lr must be a positive number"),
        ("AdamOptimizer", [], {}, "'defaults' must contain a {'lr' : positive number} entry"),
        (
            *("FooOptimizer", [], {"lr": 0.001}),
            "'name' must be one of 'AdamOptimizer', 'LambOptimizer' or 'SGDOptimizer'",
        ),
        (optim.AdamConfig, [], {"lr": 0.003}, "'name' must be a string"),
        ("SGDOptimizer", [], [], "'defaults' must be a dict"),
        ("SGDOptimizer", {}, {"lr": 0.004}, "'params' must be a list"),
    ],
)
def test_the_base_class_refuses_invalid_arguments(name: Any, params: Any, defaults: Any, message: str) -> None:
    assert message_of(_OptimizerConfig, name, params, defaults) == message
