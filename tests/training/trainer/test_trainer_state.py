"""Section 2.5 of ORTTrainer's reference: states and checkpoints."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import adam_step
from small_trainers import Mlp, batches, losses, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, amp, optim
from ort_dynamo.errors import CheckpointFileError

ROOT = Path(__file__).resolve().parents[3]
CONFIGS: dict[str, Any] = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig([{"params": ["fc1.weight"], "alpha": 0.8}], lr=0.01, lambda_coef=0.01),
    "lamb": lambda: optim.LambConfig(lr=0.01),
}
WEIGHTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


class Normed(nn.Module):
    """With buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(self.drop(self.bn(self.fc1(input1))))


def trained(config: str = "adam", steps: int = 2, **arguments: Any) -> ORTTrainer:
    trainer = make_trainer(CONFIGS[config](), **arguments)
    losses(trainer, batches(steps))
    return trainer


# -- the contents of a state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "keys"),
    [("sgd", None), ("adam", {"Moment_1", "Moment_2", "Update_Count"}), ("lamb", {"Moment_1", "Moment_2"})],
)
def test_a_state_has_the_old_schema(config: str, keys: set[str] | None) -> None:
    state = trained(config).state_dict()
    assert state.keys() == {"model", "optimizer", "trainer_options", "train_step_info"}
    assert state["model"].keys() == {"full_precision"}
    assert tuple(state["model"]["full_precision"]) == WEIGHTS
    assert {one.dtype for one in state["model"]["full_precision"].values()} == {np.dtype(np.float32)}
    assert state["trainer_options"] == {
        "mixed_precision": False,
        "zero_stage": 0,
        "world_rank": 0,
        "world_size": 1,
        "optimizer_name": {"sgd": "SGDOptimizer", "adam": "AdamOptimizer", "lamb": "LambOptimizer"}[config],
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
    }
    assert state["train_step_info"] == {"optimization_step": 2, "step": 2}
    optimizer = dict(state["optimizer"])
    if config == "lamb":
        shared = optimizer.pop("shared_optimizer_state")
        assert shared.keys() == {"step"}
        assert (shared["step"].dtype, shared["step"].tolist()) == (np.int64, [3])
    assert optimizer.keys() == (set() if keys is None else set(WEIGHTS))
    for name, own in optimizer.items():
        assert own.keys() == keys
        assert own["Moment_1"].shape == own["Moment_2"].shape == state["model"]["full_precision"][name].shape
        if config == "adam":
            assert (own["Update_Count"].dtype, own["Update_Count"].tolist()) == (np.int64, [3])


def test_a_state_of_mixed_precision_has_float32_weights_and_the_scale() -> None:
    state = trained(mixed_precision={"enabled": True}).state_dict()
    assert state["trainer_options"]["mixed_precision"] is True
    assert {one.dtype for one in state["model"]["full_precision"].values()} == {np.dtype(np.float32)}
    assert state["loss_scaler"] == {"loss_scale": 2.0**16, "stable_steps": 2}


@pytest.mark.parametrize(
    "section",
    [{"loss_scale": "much"}, {"loss_scale": None}, {"loss_scale": 0.0}, {"loss_scale": float("nan")}]
    + [{"loss_scale": 2.0, "stable_steps": count} for count in (-1, None, float("inf"))],
    ids=str,
)
def test_a_scale_that_is_none_is_refused_and_changes_nothing(section: dict[str, Any]) -> None:
    trainer = trained(mixed_precision={"enabled": True})
    before = weights(trainer)
    state = trained(steps=3, mixed_precision={"enabled": True}).state_dict()
    with pytest.raises(RuntimeError, match=r"state_dict\[loss_scaler\] is "):
        trainer.load_state_dict({**state, "loss_scaler": section})
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())
    assert trainer._train_step_info.step == 2


def test_a_module_loads_a_state_in_torchs_format() -> None:
    trainer = trained(model=Normed(), utils={"frozen_weights": ["fc2.bias"]})
    state = trainer.state_dict(pytorch_format=True)
    assert all(isinstance(one, Tensor) for one in state.values())
    model = Normed()
    model.load_state_dict(state)
    model.eval()
    x, y = batches(1)[0]
    torch.testing.assert_close(trainer.eval_step(x, y)[1], model(x).detach())
    assert "fc2.bias" not in trainer.state_dict()["optimizer"]
    assert "fc2.bias" in state


def test_a_state_is_a_copy() -> None:
    trainer = trained(batch={"gradient_accumulation_steps": 3})
    state, before = trainer.state_dict(), trainer.state_dict()
    losses(trainer, batches(3))
    tree = torch.utils._pytree.tree_leaves
    assert all(np.array_equal(a, b) for a, b in zip(tree(state), tree(before), strict=True))
    assert state["gathered_gradients"].keys() == set(WEIGHTS)
    state["model"]["full_precision"]["fc1.bias"][:] = 7
    assert (weights(trainer)["fc1.bias"] != 7).all()


def test_before_the_first_step_the_state_is_empty_or_the_one_that_waits() -> None:
    trainer = make_trainer()
    text = "Please run train_step or eval_step at least once before calling ORTTrainer.state_dict"
    with pytest.warns(UserWarning, match=text):
        assert trainer.state_dict() == {}
    state = trained("sgd").state_dict()
    trainer.load_state_dict(state)
    with pytest.warns(UserWarning, match=text):
        assert trainer.state_dict() == state


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "deferred"), [("sgd", True), ("adam", False), ("lamb", True)])
def test_a_loaded_trainer_goes_on_like_the_one_that_saved(config: str, deferred: bool) -> None:
    first = trained(config, model=Normed())
    state = first.state_dict()
    second = make_trainer(CONFIGS[config](), Normed())
    data = batches(3, seed=5)
    if not deferred:
        second.eval_step(*data[0])
    second.load_state_dict(state)
    found = []
    for trainer in (first, second):
        torch.manual_seed(9)
        found.append((losses(trainer, data), weights(trainer), trainer.state_dict()["train_step_info"]))
    assert found[0][0] == found[1][0]
    assert found[0][2] == found[1][2] == {"optimization_step": 5, "step": 5}
    assert all(np.array_equal(one, found[1][1][name]) for name, one in found[0][1].items())


def test_a_deferred_state_that_does_not_fit_is_refused_at_each_step() -> None:
    trainer = make_trainer(CONFIGS["adam"]())
    trainer.load_state_dict({"model": {"full_precision": {}}, "optimizer": {}, "train_step_info": {}})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Missing keys: "):
            trainer.train_step(*batches(1)[0])
    trainer.load_state_dict(trained().state_dict())
    trainer.train_step(*batches(1)[0])
    assert trainer._train_step_info.step == 3


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


def test_the_first_files_name_of_full_precision_is_known() -> None:
    state = trained().state_dict()
    state["model"]["fp32"] = state["model"].pop("full_precision")
    trainer = make_trainer(CONFIGS["adam"]())
    trainer.load_state_dict(state)
    trainer.eval_step(*batches(1)[0])
    assert np.array_equal(weights(trainer)["fc1.weight"], state["model"]["fp32"]["fc1.weight"])


@pytest.mark.parametrize("one_session", [True, False])
def test_weights_may_have_different_counts_of_updates(one_session: bool) -> None:
    config = optim.AdamConfig(lr=0.01, max_norm_clip=1e9)
    trainer = make_trainer(config, one_session=one_session)
    x, y = batches(1)[0]
    trainer.train_step(x, y)
    state = trainer.state_dict()
    state["optimizer"]["fc1.weight"]["Update_Count"][:] = 7
    trainer.load_state_dict(state)
    model = Mlp()
    model.load_state_dict(trainer.state_dict(pytorch_format=True))
    nn.functional.cross_entropy(model(x), y).backward()
    trainer.train_step(x, y)
    found, after = weights(trainer), trainer.state_dict()["optimizer"]
    for name, parameter in model.named_parameters():
        count = 7 if name == "fc1.weight" else 2
        moments = [state["optimizer"][name][key] for key in ("Moment_1", "Moment_2")]
        assert parameter.grad is not None
        w, *_ = adam_step(parameter.detach(), *moments, count, parameter.grad, lr=0.01)
        np.testing.assert_allclose(found[name], w, rtol=2e-5, atol=2e-6)
        assert after[name]["Update_Count"] == [count + 1]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_users_dict_and_is_not_overwritten(tmp_path: Path) -> None:
    trainer = trained()
    path = tmp_path / "checkpoint.ortcp"
    trainer.save_checkpoint(path, {"epoch": 3, "names": ["a", "b"]})
    with pytest.raises(FileExistsError):
        trainer.save_checkpoint(path)
    other = make_trainer(CONFIGS["adam"]())
    assert other.load_checkpoint(str(path)) == {"epoch": 3, "names": ["a", "b"]}
    other.eval_step(*batches(1)[0])
    tree = torch.utils._pytree.tree_leaves
    states = zip(tree(other.state_dict()), tree(trainer.state_dict()), strict=True)
    assert all(np.array_equal(a, b) for a, b in states)


def test_a_checkpoint_without_optimizer_states_keeps_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.ortcp"
    trained(steps=3).save_checkpoint(path, include_optimizer_states=False)
    trainer = trained()
    before = trainer.state_dict()["optimizer"]["fc1.bias"]["Moment_1"]
    with pytest.warns(UserWarning, match="Missing key: optimizer in state_dict"):
        assert trainer.load_checkpoint(path) == {}
    assert np.array_equal(trainer.state_dict()["optimizer"]["fc1.bias"]["Moment_1"], before)
    assert trainer._train_step_info.step == 3


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trainer = trained("sgd")
    before = weights(trainer)
    path = tmp_path / "checkpoint.ortcp"
    trainer.save_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[-40] ^= 255
    path.write_bytes(content)
    with pytest.raises(CheckpointFileError):
        trainer.load_checkpoint(path)
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())


MATRIX = [(config, scaled, gathers) for config in CONFIGS for scaled in (False, True) for gathers in (1, 5)]
SAMPLE = [("adam", True, 5)]


def of_combination(config: str, scaled: bool, gathers: int) -> ORTTrainer:
    mixed = {"enabled": True, "loss_scaler": amp.DynamicLossScaler(up_scale_window=4)} if scaled else {}
    return make_trainer(
        CONFIGS[config](), Normed(), mixed_precision=mixed, batch={"gradient_accumulation_steps": gathers}
    )


def goes_on(trainer: ORTTrainer) -> list[str]:
    """The next 20 losses, to the last bit."""
    torch.manual_seed(13)
    return [loss.hex() for loss in losses(trainer, batches(20, seed=17))]


@pytest.mark.parametrize(
    "combinations", [SAMPLE, pytest.param(MATRIX, marks=pytest.mark.slow)], ids=["sample", "matrix"]
)
def test_training_goes_on_in_a_new_process_bit_for_bit(tmp_path: Path, combinations: list[Any]) -> None:
    expected = []
    for index, combination in enumerate(combinations):
        trainer = of_combination(*combination)
        losses(trainer, batches(7))  # in the middle of five gathered steps
        trainer.save_checkpoint(tmp_path / f"{index}.ortcp")
        expected.append(goes_on(trainer))
    assert all(len(set(one)) == 20 for one in expected)
    (tmp_path / "combinations.json").write_text(json.dumps(combinations))
    paths = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def _in_a_new_process(folder: Path) -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else torch.get_num_threads())
    found = []
    for index, combination in enumerate(json.loads((folder / "combinations.json").read_text())):
        torch.manual_seed(99)
        trainer = of_combination(*combination)
        trainer.load_checkpoint(folder / f"{index}.ortcp")
        found.append(goes_on(trainer))
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    _in_a_new_process(Path(sys.argv[1]))
