"""The files of several ranks as one state."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from old_checkpoints import assert_same, old_user_dict, trainer_state, write_old_file

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training.checkpoint import aggregate_checkpoints, load_state, save_state

MOMENTS = ("Moment_1", "Moment_2")
MEGATRON = {"linear.weight": 0, "linear.bias": 0, "projection.weight": 1}
"""Weight -> its split: 0 by columns, 1 by rows. Others are whole."""


def whole_state() -> dict[str, Any]:
    state = trainer_state()
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    state["model"]["full_precision"]["projection.weight"] = weight
    moments = {"Moment_1": weight + 0.5, "Moment_2": weight * 2, "Update_Count": np.array([5])}
    state["optimizer"]["projection.weight"] = moments
    return state


def rank_states(zero: bool, horizontal: int, data: int, mixed_precision: bool = False) -> list[dict[str, Any]]:
    """Split the whole state as ranks had it: Megatron's part first, of which ZeRO takes flat pieces."""
    whole = whole_state()
    ranks = []
    for rank in range(horizontal * data):
        index, replica = rank % horizontal, rank // horizontal
        info: dict[str, Any] = {}
        state: dict[str, Any] = {
            "model": {"full_precision": {}},
            "optimizer": {},
            "trainer_options": trainer_state(rank, horizontal * data, int(zero), horizontal)["trainer_options"],
            "train_step_info": dict(whole["train_step_info"]),
        }
        state["trainer_options"]["mixed_precision"] = mixed_precision

        def part(name: str, value: Any, by_zero: bool, index: int = index, replica: int = replica) -> Any:
            row = MEGATRON.get(name, -1) if horizontal > 1 else -1
            if row >= 0:
                value = np.split(value, horizontal, 0 if row else -1)[index]
            return np.array_split(value.reshape(-1), data)[replica] if by_zero else value

        for name, value in whole["model"]["full_precision"].items():
            row = MEGATRON.get(name, -1) if horizontal > 1 else -1
            if zero or row >= 0:
                info[name] = {"original_dim": np.array(value.shape), "megatron_row_partition": np.array([row])}
            state["model"]["full_precision"][name] = part(name, value, zero and mixed_precision)
            states = whole["optimizer"][name].items()
            state["optimizer"][name] = {k: part(name, v, zero) if k in MOMENTS else v for k, v in states}
        ranks.append({**state, "partition_info": info})
    return ranks


def files(states: Sequence[dict[str, Any]], old: bool = False) -> list[Any]:
    made = []
    for state in states:
        made.append(io.BytesIO())
        if old:
            write_old_file(made[-1], state)
        else:
            save_state(made[-1], state, {}, True)
    return made


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("mixed_precision", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("zero", "horizontal", "data"),
    [(True, 1, 2), (True, 1, 3), (False, 2, 1), (False, 2, 2), (True, 2, 2), (True, 1, 1)],
)
def test_the_ranks_of_a_run_are_the_whole_state(
    zero: bool, horizontal: int, data: int, mixed_precision: bool, old: bool
) -> None:
    expected = whole_state()
    expected["trainer_options"]["mixed_precision"] = mixed_precision
    paths = files(rank_states(zero, horizontal, data, mixed_precision), old)[::-1]
    assert_same(load_state(paths), (expected, {}))
    assert_same(aggregate_checkpoints(paths, pytorch_format=False), expected)
    weights = {name: torch.from_numpy(value) for name, value in expected["model"]["full_precision"].items()}
    assert_same(aggregate_checkpoints(paths), weights)


def test_the_files_of_plain_data_parallel_ranks_are_one_state() -> None:
    ranks = [trainer_state(rank, 2) for rank in range(2)]
    assert_same(aggregate_checkpoints(files(ranks), pytorch_format=False), trainer_state())


def test_a_lamb_step_and_a_state_without_optimizer_aggregate() -> None:
    ranks = rank_states(True, 1, 2)
    for state in ranks:
        for states in state["optimizer"].values():
            del states["Update_Count"]
        state["optimizer"]["shared_optimizer_state"] = {"step": np.array([7])}
    found, _ = load_state(files(ranks))
    assert_same(found["optimizer"]["shared_optimizer_state"], {"step": np.array([7])})
    for state in ranks:
        del state["optimizer"]
    assert "optimizer" not in load_state(files(ranks))[0]


def test_the_values_that_one_rank_says_are_those_of_rank_0() -> None:
    paths = []
    for rank, state in enumerate(rank_states(True, 1, 2)):
        paths.append(io.BytesIO())
        state["loss_scaler"] = {"loss_scale": 2.0**rank}
        save_state(paths[-1], state, {"rank": rank}, True)
    state, user_dict = load_state(paths[::-1])
    assert user_dict == {"rank": 0}
    assert state["loss_scaler"] == {"loss_scale": 1.0}
    assert aggregate_checkpoints(paths, pytorch_format=False)["user_dict"] == {"rank": 0}


def test_a_pickle_of_old_ranks_is_not_run_by_aggregation() -> None:
    pickled = old_user_dict({"a": 1})
    paths = files([{**state, "user_dict": pickled} for state in rank_states(True, 1, 2)], old=True)
    assert aggregate_checkpoints(paths, pytorch_format=False)["user_dict"] == pickled
    with pytest.raises(CheckpointFileError, match="is a pickle"):
        load_state(paths)
    assert load_state(paths, allow_pickle=True)[1] == {"a": 1}


def test_values_that_differ_by_rank_are_left_out_with_a_warning() -> None:
    ranks = [{**state, "random": {"cpu": np.arange(3)}} for state in rank_states(True, 1, 2)]
    with pytest.warns(
        UserWarning, match="The aggregated state leaves out values that differ from rank to rank: random"
    ):
        found, _ = load_state(files(ranks))
    assert "random" not in found


def test_weights_that_are_nan_everywhere_are_equal() -> None:
    ranks = rank_states(True, 1, 2)
    for state in ranks:
        state["model"]["full_precision"]["scale"] = np.array([np.nan], np.float32)
    assert np.isnan(load_state(files(ranks))[0]["model"]["full_precision"]["scale"]).all()


def test_a_missing_or_repeated_rank_is_named(tmp_path: Any) -> None:
    paths = [tmp_path / f"rank{rank}" for rank in range(3)]
    for path, state in zip(paths, rank_states(True, 1, 3), strict=True):
        save_state(path, state, {}, True)
    with pytest.raises(AssertionError, match=r"^Unexpected rank in file at path .*rank2. Expected 1, got 2$"):
        aggregate_checkpoints([paths[0], paths[2]])
    with pytest.raises(AssertionError, match=r"^Unexpected rank in file at path .*rank1. Expected 2, got 1$"):
        aggregate_checkpoints([*paths[:2], paths[1]])
    with pytest.raises(AssertionError, match=r"^Expected number of files to load: 3, got 2$"):
        aggregate_checkpoints(paths[:2])
    with pytest.raises(AssertionError, match=r"^Expected number of files to load: at least 1, got 0$"):
        aggregate_checkpoints([])


def set_option(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["trainer_options"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_option("mixed_precision", True), "Mixed precision state mismatch among checkpoint files. File: <BytesIO>"),
        (set_option("world_size", 3), "World size state mismatch among checkpoint files. File: <BytesIO>"),
        (set_option("zero_stage", 0), "Zero stage mismatch among checkpoint files. File: <BytesIO>"),
        (set_option("optimizer_name", "X"), "Optimizer name mismatch among checkpoint files. File: <BytesIO>"),
        (set_option("data_parallel_size", 1), "Data parallel size mismatch among checkpoint files. File: <BytesIO>"),
        (lambda state: state.pop("trainer_options"), "Missing information: trainer_options"),
        (lambda state: state.pop("partition_info"), "Missing information: partition_info"),
        (lambda state: state["train_step_info"].update(step=9), "Train step info mismatch among checkpoint files"),
        (lambda s: s["model"]["full_precision"].update(scale=np.ones(1, "f4")), "Value mismatch for model state scale"),
        (
            lambda s: s["optimizer"]["scale"].update(Update_Count=np.array([6])),
            "Value mismatch for model state scale and optimizer state Update_Count",
        ),
        (
            lambda s: s["optimizer"]["linear.bias"].update(Moment_1=np.ones(5)),
            "The parts of model state linear.bias and optimizer state Moment_1 have 8 elements",
        ),
    ],
)
def test_ranks_that_do_not_fit_each_other_are_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    ranks = rank_states(True, 1, 2)
    change(ranks[1])
    with pytest.raises(AssertionError, match=message):
        aggregate_checkpoints(files(ranks), pytorch_format=False)


def test_options_that_no_rank_can_have_are_refused() -> None:
    for key, value in {"world_rank": -1, "horizontal_parallel_size": 0, "world_size": "x"}.items():
        ranks = rank_states(True, 1, 2)
        for state in ranks:
            state["trainer_options"][key] = value
        with pytest.raises(CheckpointFileError, match=f"its trainer option '{key}' cannot be"):
            aggregate_checkpoints(files(ranks))
    for value in ("x", float("inf"), 0):
        ranks = rank_states(True, 1, 2)
        for state in ranks:
            state["trainer_options"]["pipeline_parallel_size"] = value
        for load in (aggregate_checkpoints, load_state):
            with pytest.raises(
                CheckpointFileError, match=r"its trainer option 'pipeline_parallel_size' (cannot|is not)"
            ):
                load(files(ranks))
    ranks = rank_states(True, 1, 2)
    del ranks[0]["trainer_options"]["optimizer_name"]
    with pytest.raises(CheckpointFileError, match="its trainer_options have no 'optimizer_name'"):
        aggregate_checkpoints(files(ranks))
    ranks = rank_states(True, 1, 2)
    for state in ranks:
        state["trainer_options"]["data_parallel_size"] = 3
    with pytest.raises(AssertionError, match="World size 2 is not the product of the parallel sizes, 3"):
        aggregate_checkpoints(files(ranks))


def test_a_weight_that_cannot_be_split_so_is_refused() -> None:
    ranks = rank_states(False, 2, 1)
    for state in ranks:
        state["partition_info"]["linear.bias"]["original_dim"] = np.array([5])
    with pytest.raises(AssertionError, match=r"Shape \(5,\) of .*linear.bias.* cannot be split in 2 along axis -1"):
        aggregate_checkpoints(files(ranks))


def test_parts_of_other_shapes_than_their_whole_are_refused() -> None:
    ranks = rank_states(False, 2, 1)
    ranks[1]["model"]["full_precision"]["linear.bias"] = np.float32(1)
    with pytest.raises(AssertionError, match=r"The parts of .*linear.bias.* have the shapes"):
        aggregate_checkpoints(files(ranks))
