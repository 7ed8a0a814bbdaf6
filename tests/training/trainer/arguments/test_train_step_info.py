"""Section 2.5 of ORTTrainer's reference: the facts about a step."""

from __future__ import annotations

from typing import Any

import pytest

from ort_dynamo import TrainStepInfo, optim

CONFIG = optim.LambConfig()


def test_a_step_starts_with_nothing_done() -> None:
    info = TrainStepInfo(CONFIG)
    assert info.optimizer_config is CONFIG
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (True, [], 0, 0)
    info.fetches.append("loss")
    assert TrainStepInfo(CONFIG).fetches == []


def test_a_step_info_keeps_its_arguments() -> None:
    info = TrainStepInfo(optimizer_config=CONFIG, all_finite=False, fetches=["a", "b"], optimization_step=123, step=456)
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (False, ["a", "b"], 123, 456)


@pytest.mark.parametrize("value", [-1, "Hello", None])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer_config", "optimizer_config must be a optim._OptimizerConfig"),
        ("all_finite", "all_finite must be a bool"),
        ("fetches", "fetches must be a list of str"),
        ("optimization_step", "optimization_step must be a positive int"),
        ("step", "step must be a positive int"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, message: str, value: Any) -> None:
    settings: dict[str, Any] = {"optimizer_config": CONFIG, name: value}
    with pytest.raises(AssertionError) as caught:
        TrainStepInfo(**settings)
    assert str(caught.value) == message
