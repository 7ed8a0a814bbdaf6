"""Section 2.5 of ORTTrainer's reference: the contents of a state, and loading one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from formulas import adam_step
from small_trainers import FORMS, Mlp, assert_same_weights, batches, losses, make_trainer, weights
from torch import Tensor, nn
from trained_trainers import CONFIGS, WEIGHTS, Normed, Scaled, trained

from ort_dynamo import optim

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


def test_a_module_loads_its_extra_state_and_buffers_of_small_floats() -> None:
    state = trained("sgd", model=nn.Sequential(Scaled(3.0))).state_dict(pytorch_format=True)
    assert state["0.small"].tolist() == [0.5, 3.0]
    model = nn.Sequential(Scaled())
    model.load_state_dict(state)
    assert model[0].factor == 3.0
    assert torch.equal(model[0].small.float(), Scaled().small.float())


@pytest.mark.parametrize("deferred", [False, True])
def test_extra_state_is_loaded(deferred: bool) -> None:
    first = trained("sgd", model=nn.Sequential(Scaled(3.0)))
    second = make_trainer(CONFIGS["sgd"](), model=nn.Sequential(Scaled()))
    batch = batches(1)[0]
    if not deferred:
        second.eval_step(*batch)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.eval_step(*batch)[1], first.eval_step(*batch)[1])
    given = first.state_dict()
    given["extra_state"]["other._extra_state"] = None
    with pytest.raises(RuntimeError, match=r"Unexpected keys: \['other._extra_state'\] in state_dict\[extra_state\]"):
        second.load_state_dict(given)
    second.load_state_dict(given, strict=False)


@pytest.mark.parametrize("section", [None, {}])
def test_extra_state_that_is_missing_stays(section: dict[str, Any] | None) -> None:
    trainer = trained("sgd", model=nn.Sequential(Scaled(3.0)))
    given = trainer.state_dict()
    del given["extra_state"]
    if section is None:
        with pytest.warns(UserWarning, match=r"^Missing key: extra_state in state_dict$"):
            trainer.load_state_dict(given)
    else:
        given["extra_state"] = section
        with pytest.raises(RuntimeError, match=r"Missing keys: \['0._extra_state'\] in state_dict\[extra_state\]"):
            trainer.load_state_dict(given)
    trainer.load_state_dict(given, strict=False)
    assert trainer.state_dict()["extra_state"]["0._extra_state"]["factor"] == 3.0


def test_extra_state_that_a_module_cannot_take_is_unexpected() -> None:
    class Giving(Normed):
        def get_extra_state(self) -> int:
            return 3

    trainer = trained("sgd", model=Giving())
    with pytest.raises(RuntimeError, match=r"Unexpected keys: \['_extra_state'\] in state_dict\[extra_state\]"):
        trainer.load_state_dict(trainer.state_dict())
    trainer.load_state_dict(trainer.state_dict(), strict=False)


@FORMS
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_state_of_an_accumulation_is_loaded_whichever_ran_before(steps: int, one_session: bool) -> None:
    data = batches(9)
    first = make_trainer(CONFIGS["adam"](), one_session=one_session, batch={"gradient_accumulation_steps": 3})
    losses(first, data[:4])
    second = make_trainer(CONFIGS["adam"](), one_session=one_session, batch={"gradient_accumulation_steps": steps})
    losses(second, data[5:6])
    second.options.batch.gradient_accumulation_steps = 3
    second.load_state_dict(first.state_dict())
    assert losses(second, data[4:]) == losses(first, data[4:])
    assert_same_weights(second, weights(first))


@FORMS
def test_a_copy_ends_an_accumulation_with_the_number_that_it_began_with(one_session: bool) -> None:
    data = batches(9)
    trainer = make_trainer(CONFIGS["adam"](), one_session=one_session, batch={"gradient_accumulation_steps": 2})
    losses(trainer, data[:3])
    trainer.options.batch.gradient_accumulation_steps = 3
    other, state = copy.deepcopy(trainer), trainer.state_dict()
    assert state["trainer_options"]["gradient_accumulation_steps"] == 2
    assert losses(other, data[3:]) == losses(trainer, data[3:])
    state["trainer_options"]["gradient_accumulation_steps"] = 0
    with pytest.raises(RuntimeError, match=r"\[gradient_accumulation_steps\] is 0, where a number >= 1 is expected"):
        trainer.load_state_dict(state)


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
        found = trainer.state_dict()
    assert found.keys() == state.keys()
    tree = torch.utils._pytree.tree_leaves
    assert all(np.array_equal(a, b) for a, b in zip(tree(found), tree(state), strict=True))


@pytest.mark.parametrize("as_tensors", [False, True], ids=["arrays", "tensors"])
def test_a_state_that_waits_is_a_copy(as_tensors: bool) -> None:
    first, second = trained("sgd"), make_trainer(CONFIGS["sgd"]())
    expected, state = weights(first), first.state_dict()
    section = state["model"]["full_precision"]
    if as_tensors:
        section.update({name: torch.from_numpy(one) for name, one in section.items()})
    second.load_state_dict(state)
    with pytest.warns(UserWarning, match="not initialized yet"):
        waits = second.state_dict()
    for one in (*section.values(), *waits["model"]["full_precision"].values()):
        one *= 0
    waits["model"]["full_precision"].clear()
    section.clear()
    second.eval_step(*batches(1)[0])
    assert all(np.array_equal(one, expected[name]) for name, one in weights(second).items())


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
