"""The four functions before `ORTTrainer.save_checkpoint`, on a trainer that only has a state."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from old_checkpoints import assert_same, trainer_state

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training.checkpoint import (
    experimental_load_checkpoint,
    experimental_load_state_dict,
    experimental_save_checkpoint,
    experimental_state_dict,
)

pytestmark = pytest.mark.filterwarnings("ignore:experimental_:DeprecationWarning")


class Trainer:
    """A stand-in with the attributes of ORTTrainer that the functions use."""

    def __init__(self, state: dict[str, Any] | None = None, stage: int = 0, rank: int = 0, size: int = 1) -> None:
        self.state = state or {}
        self.strict: bool | None = None
        zero = SimpleNamespace(stage=stage)
        distributed = SimpleNamespace(deepspeed_zero_optimization=zero, world_rank=rank, world_size=size)
        self.options = SimpleNamespace(distributed=distributed)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        self.state, self.strict = state, strict


def states_only(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in ("model", "optimizer")}


def lamb_state() -> dict[str, Any]:
    state = trainer_state()
    for states in state["optimizer"].values():
        del states["Update_Count"]
    state["optimizer"]["shared_optimizer_state"] = {"step": np.array([5])}
    return state


@pytest.mark.parametrize("make", [trainer_state, lamb_state])
def test_a_flat_dictionary_has_all_tensors_by_their_old_names(make: Callable[[], dict[str, Any]]) -> None:
    flat = experimental_state_dict(Trainer(make()))
    assert_same(flat["linear.weight"], torch.from_numpy(make()["model"]["full_precision"]["linear.weight"]))
    assert_same(flat["Moment_2_scale"], torch.from_numpy(make()["optimizer"]["scale"]["Moment_2"]))
    assert ("Step" in flat) == (make is lamb_state) == ("Update_Count_scale" not in flat)
    assert list(experimental_state_dict(Trainer(make()), include_optimizer_state=False)) == list(
        make()["model"]["full_precision"]
    )
    loaded = Trainer()
    experimental_load_state_dict(loaded, flat, strict=True)
    assert_same(loaded.state, states_only(make()))
    assert loaded.strict is True


def test_a_flat_dictionary_is_a_copy() -> None:
    trainer = Trainer(trainer_state())
    experimental_state_dict(trainer)["linear.weight"].zero_()
    assert_same(trainer.state, trainer_state())


def test_deprecation_warning_names_the_replacement() -> None:
    with pytest.warns(DeprecationWarning, match=r"^experimental_state_dict\(\) will be deprecated soon. Please use"):
        experimental_state_dict(Trainer())


def test_a_name_that_two_tensors_would_have_is_refused() -> None:
    state = trainer_state()
    state["model"]["full_precision"]["Moment_1_scale"] = np.ones(1)
    with pytest.raises(ValueError, match="'Moment_1_scale' is the name of both"):
        experimental_state_dict(Trainer(state))


@pytest.mark.parametrize("include", [True, False])
def test_a_checkpoint_comes_back(include: bool, tmp_path: Path) -> None:
    more = {"epoch": 3, "nested": {"rng": torch.arange(3), "names": ["a", ("b", None)]}}
    experimental_save_checkpoint(Trainer(trainer_state()), tmp_path, "run", more, include)
    assert os.listdir(tmp_path) == ["run.ort.pt"]
    assert "model" not in more
    loaded = Trainer()
    assert_same(experimental_load_checkpoint(loaded, tmp_path, "run"), more)
    expected = states_only(trainer_state())
    assert_same(loaded.state, expected if include else {"model": expected["model"]})
    assert loaded.strict is False


def test_a_checkpoint_is_replaced_with_a_warning(tmp_path: Path) -> None:
    experimental_save_checkpoint(Trainer(trainer_state()), tmp_path)
    with pytest.warns(UserWarning, match="ORT_checkpoint.ort.pt already exists, overwriting."):
        experimental_save_checkpoint(Trainer(lamb_state()), tmp_path)
    loaded = Trainer()
    assert experimental_load_checkpoint(loaded, tmp_path, strict=True) == {}
    assert_same(loaded.state, states_only(lamb_state()))
    assert loaded.strict is True


def zero_trainers(mixed_precision: bool) -> list[Trainer]:
    """Split flattened moments, and mixed precision's weights, between two ranks; rank 0 has weights of one element."""
    trainers = []
    for rank in range(2):
        state = trainer_state(rank, 2, 1)
        weights = state["model"]["full_precision"]
        state["partition_info"] = {name: {"original_dim": np.array(w.shape)} for name, w in weights.items()}
        for name, states in state["optimizer"].items():
            for tree, key in [(states, "Moment_1"), (states, "Moment_2")] + [(weights, name)] * mixed_precision:
                tree[key] = np.array_split(tree[key].reshape(-1), 2)[rank]
        trainers.append(Trainer(state, 1, rank, 2))
    return trainers


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_the_files_of_a_zero_run_load_on_each_rank_and_together(mixed_precision: bool, tmp_path: Path) -> None:
    for trainer in zero_trainers(mixed_precision):
        experimental_save_checkpoint(trainer, tmp_path, checkpoint_state_dict={"epoch": 3})
    assert sorted(os.listdir(tmp_path)) == ["ORT_checkpoint.ZeRO.0.1.ort.pt", "ORT_checkpoint.ZeRO.1.1.ort.pt"]
    for rank, trainer in enumerate(zero_trainers(mixed_precision)):
        loaded = Trainer(None, 1, rank, 2)
        with pytest.warns(UserWarning, match="Found more than one file with prefix ORT_checkpoint in directory"):
            assert experimental_load_checkpoint(loaded, tmp_path) == {"epoch": 3}
        expected = {**states_only(trainer.state), "partition_info": trainer.state["partition_info"]}
        assert_same(loaded.state, expected)
    loaded = Trainer()
    with pytest.warns(UserWarning, match="Attempting to load ZeRO checkpoint"):
        assert experimental_load_checkpoint(loaded, tmp_path) == {"epoch": 3}
    assert_same(loaded.state, states_only(trainer_state()))


def test_the_files_of_an_old_zero_run_load(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    for rank in range(2):
        half = weight.reshape(-1)[rank * 3 : rank * 3 + 3]
        old = {
            "w_fp16": weight.half(),
            f"w_view_{rank}": half,
            f"Moment_1_w_view_{rank}": half + 1,
            f"Update_Count_w_view_{rank}": torch.tensor([4]),
        }
        torch.save({"model": old}, tmp_path / f"old.ZeRO.{rank}.1.ort.pt")
    loaded = Trainer()
    with pytest.warns(UserWarning, match="Found more than one file"):
        experimental_load_checkpoint(loaded, tmp_path, "old")
    moments = {"Moment_1": weight.numpy() + 1, "Update_Count": np.array([4])}
    assert_same(loaded.state, {"model": {"full_precision": {"w": weight.numpy()}}, "optimizer": {"w": moments}})


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"checkpoint_dir \(.*nowhere\) directory doesn't exist"):
        experimental_save_checkpoint(Trainer(), tmp_path / "nowhere")
    with pytest.raises(AssertionError, match=r"^No checkpoint found with prefix 'ORT_checkpoint' at"):
        experimental_load_checkpoint(Trainer(), tmp_path)
    for rank in (0, 2):
        torch.save({"model": {}}, tmp_path / f"ORT_checkpoint.ZeRO.{rank}.2.ort.pt")
    with (
        pytest.warns(UserWarning, match="Found more than one"),
        pytest.raises(AssertionError, match=r"Couldn't find .*ZeRO\.1\.2.*Please make sure .* rank 1 of 3"),
    ):
        experimental_load_checkpoint(Trainer(None, 1, 1, 3), tmp_path)
    with (
        pytest.warns(UserWarning, match="Found more than one"),
        pytest.raises(AssertionError, match="Could not find 2 files"),
    ):
        experimental_load_checkpoint(Trainer(), tmp_path)


class Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def test_nothing_is_unpickled_that_could_run(tmp_path: Path) -> None:
    torch.save({"model": {}, "trap": Trap(tmp_path / "sprung")}, tmp_path / "a.ort.pt")
    (tmp_path / "b.ort.pt").write_bytes(pickle.dumps({"model": Trap(tmp_path / "sprung")}))
    for prefix in "ab":
        with pytest.raises(CheckpointFileError, match="cannot read it without running code"):
            experimental_load_checkpoint(Trainer(), tmp_path, prefix)
    assert not (tmp_path / "sprung").exists()


def test_unloadable_state_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="checkpoint_state_dict has a value"):
        experimental_save_checkpoint(Trainer(), tmp_path, checkpoint_state_dict={"trap": Trap(tmp_path / "sprung")})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "content", [{"model": [1]}, {"model": {"a": 1}}, [1], {"model": {}, "partition_info": 1}, b"x"]
)
def test_a_file_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "ORT_checkpoint.ort.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointFileError, match=r"Cannot load the checkpoint .*ORT_checkpoint\.ort\.pt"):
        experimental_load_checkpoint(Trainer(), tmp_path)
