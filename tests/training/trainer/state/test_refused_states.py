"""Section 2.5 of ORTTrainer's reference: states that are refused, or warned of."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import make_trainer, weights
from trained_trainers import trained

from ort_dynamo import ORTTrainer


def without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


def with_more(state: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


ARRAY = np.zeros((2, 2), np.float32)


@pytest.fixture(scope="module")
def adam() -> tuple[ORTTrainer, dict[str, Any]]:
    trainer = trained()
    return trainer, trainer.state_dict()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("model", "full_precision"), "Missing keys: ['full_precision'] in state_dict[model]"),
        (("model", "full_precision", "fc1.bias"), "Missing keys: ['fc1.bias'] in state_dict[model][full_precision]"),
        (("optimizer", "fc1.bias"), "Missing keys: ['fc1.bias'] in state_dict[optimizer]"),
        (
            ("optimizer", "fc1.bias", "Update_Count"),
            "Missing keys: ['Update_Count'] in state_dict[optimizer][fc1.bias]",
        ),
    ],
)
def test_a_missing_key_is_refused_if_strict(adam: Any, path: tuple[str, ...], text: str) -> None:
    trainer, state = adam
    before = weights(trainer)
    with pytest.raises(RuntimeError) as raised:
        trainer.load_state_dict(without(state, *path))
    assert str(raised.value) == text
    trainer.load_state_dict(without(state, *path), strict=False)
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("model", "half"), "Unexpected keys: ['half'] in state_dict[model]"),
        (("model", "full_precision", "more"), "Unexpected keys: ['more'] in state_dict[model][full_precision]"),
        (("optimizer", "more"), "Unexpected keys: ['more'] in state_dict[optimizer]"),
        (("optimizer", "fc1.bias", "Moment_3"), "Unexpected keys: ['Moment_3'] in state_dict[optimizer][fc1.bias]"),
    ],
)
def test_an_unknown_key_is_refused_if_strict(adam: Any, path: tuple[str, ...], text: str) -> None:
    trainer, state = adam
    value: Any = {} if path == ("model", "half") else ARRAY
    with pytest.raises(RuntimeError) as raised:
        trainer.load_state_dict(with_more(state, value, *path))
    assert str(raised.value) == text
    trainer.load_state_dict(with_more(state, value, *path), strict=False)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (
            ("model", "full_precision", "fc1.weight"),
            ARRAY,
            "state_dict[model][full_precision][fc1.weight] has the shape [2, 2], where [8, 4] is expected",
        ),
        (
            ("optimizer", "fc1.weight", "Moment_2"),
            ARRAY,
            "state_dict[optimizer][fc1.weight][Moment_2] has the shape [2, 2], where [8, 4] is expected",
        ),
        (
            ("model", "full_precision", "fc1.weight"),
            "text",
            "state_dict[model][full_precision][fc1.weight] is not an array of numbers",
        ),
        (("model", "full_precision"), ARRAY, "state_dict[model][full_precision] is ndarray, where a dict is expected"),
        (
            ("optimizer", "fc1.weight", "Update_Count"),
            np.array([0]),
            "state_dict[optimizer][fc1.weight] has array([0]) for the count of updates; expected an integer >= 1",
        ),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_value_that_does_not_fit_is_refused(
    adam: Any, path: tuple[str, ...], value: Any, text: str, strict: bool
) -> None:
    trainer, state = adam
    other = with_more(state, value, *path)
    if path[1:] != ("full_precision",):
        other["model"]["full_precision"]["fc2.bias"] += 1
    before = trainer.state_dict()
    with pytest.raises(RuntimeError) as raised:
        trainer.load_state_dict(other, strict=strict)
    assert str(raised.value) == text
    after = trainer.state_dict()
    for name, one in before["model"]["full_precision"].items():
        assert np.array_equal(one, after["model"]["full_precision"][name]), "a part of a state was loaded"


@pytest.mark.parametrize("value", [None, [], "path"])
def test_a_state_that_is_no_dict_is_refused(value: Any) -> None:
    with pytest.raises(RuntimeError, match="where a dict is expected"):
        make_trainer().load_state_dict(value)


def test_a_state_of_another_optimizer_is_refused(adam: Any) -> None:
    trainer, _ = adam
    with pytest.raises(AssertionError) as raised:
        trainer.load_state_dict(trained("lamb").state_dict())
    assert str(raised.value) == "Optimizer mismatch: expected AdamOptimizer, got LambOptimizer"


def test_an_optimizer_or_a_count_of_another_kind_is_refused(adam: Any) -> None:
    trainer, state = adam
    with pytest.raises(AssertionError, match="Optimizer mismatch: expected AdamOptimizer, got "):
        trainer.load_state_dict(with_more(state, np.zeros((2, 2)), "trainer_options", "optimizer_name"))
    for count in (float("inf"), np.array(np.inf), -1, "x"):
        with pytest.raises(RuntimeError, match=r"state_dict\[train_step_info\]\[step\] is .*where a number"):
            trainer.load_state_dict(with_more(state, count, "train_step_info", "step"))


@pytest.mark.parametrize("section", ["model", "optimizer"])
def test_a_missing_section_is_warned_of_and_leaves_its_values(section: str) -> None:
    trainer, other = trained(), trained(steps=3)
    before = trainer.state_dict()
    with pytest.warns(UserWarning, match=f"Missing key: {section} in state_dict"):
        trainer.load_state_dict(without(other.state_dict(), section))
    after, given = trainer.state_dict(), other.state_dict()
    for name, source in (("model", before if section == "model" else given), ("optimizer", None)):
        expected = source or (before if section == "optimizer" else given)
        tree = torch.utils._pytree.tree_leaves
        assert all(np.array_equal(a, b) for a, b in zip(tree(after[name]), tree(expected[name]), strict=True))
    assert after["train_step_info"] == given["train_step_info"]
