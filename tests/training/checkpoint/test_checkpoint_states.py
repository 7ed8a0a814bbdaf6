"""A trainer's state and its user's dictionary, saved and loaded."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from old_checkpoints import assert_same, old_user_dict, trainer_state, write_old_file

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training import _checkpoint_storage as storage
from ort_dynamo.training.checkpoint import load_state, save_state

ANY_TEXT = st.text(st.characters(exclude_categories=()))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary()
KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT | st.binary()
HASHABLE = st.recursive(KEYS, lambda inner: st.tuples(inner, inner), max_leaves=3)
VALUES = st.recursive(
    PLAIN
    | hnp.arrays(st.sampled_from(["float32", "int8", "bool", "complex64"]), hnp.array_shapes(min_dims=0, max_dims=2))
    | hnp.arrays("float32", (2,)).map(torch.from_numpy),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=12,
)


def round_trip(user_dict: Any) -> Any:
    file = io.BytesIO()
    save_state(file, trainer_state(), user_dict, True)
    state, loaded = load_state([file])
    assert_same(state, trainer_state())
    return loaded


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(HASHABLE, VALUES, max_size=4))
def test_any_user_dict_comes_back_as_it_was(user_dict: Any) -> None:
    loaded = round_trip(user_dict)
    assert_same(loaded, user_dict)
    assert list(loaded) == list(user_dict)


@pytest.mark.slow
@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(HASHABLE, VALUES, max_size=4))
def test_any_user_dict_comes_back_as_it_was_at_length(user_dict: Any) -> None:
    assert_same(round_trip(user_dict), user_dict)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63),
        -(2**63) - 1,
        10**5000,
        float("nan"),
        -float("inf"),
        -0.0,
        5e-324,
        "\ud83d\ude00",
        "\0",
        b"",
        OrderedDict([("b", 1), ("a", OrderedDict())]),
        Counter("aab"),
        {1: 1, "1": 2, (1, None): 3, False: 4, b"1": 5, 1.5: 6, None: 7},
        [[], (), {}, ((),)],
        np.float32(1.5),
        np.int64(-1),
        np.bool_(True),
        np.array(3, np.float16),
        np.zeros((0, 2), ml_dtypes.bfloat16),
        np.arange(6, dtype=">i4").reshape(2, 3).astype("=i4"),
        torch.tensor(2.5),
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.tensor(1, dtype=torch.bfloat16),
        torch.zeros(2, 0, dtype=torch.float8_e5m2),
        torch.arange(6).to(torch.uint16).reshape(2, 3).T,
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.random.get_rng_state(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_of_its_type(value: Any) -> None:
    assert_same(round_trip({"a": {"deep": (value,)}}), {"a": {"deep": (value,)}})


def test_a_counter_and_an_ordered_dict_keep_their_order() -> None:
    loaded = round_trip({"a": OrderedDict([("z", 1), ("a", 2)]), "b": Counter({"z": 1, "a": 2})})
    assert [list(value) for value in loaded.values()] == [["z", "a"], ["z", "a"]]


def test_tensors_come_back_without_gradients_and_can_be_written_to() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    loaded = round_trip({"a": parameter, "b": parameter.detach().expand(3, 2), "c": np.ones(3)})
    assert type(loaded["a"]) is torch.Tensor
    assert not loaded["a"].requires_grad
    for value in loaded.values():
        value += 1
    assert_same(loaded["b"], torch.full((3, 2), 2.0))


class Level(IntEnum):
    LOW = 1


Point = namedtuple("Point", ["x"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, "set"),
        (object(), "object"),
        (1j, "complex"),
        (Level.LOW, "Level"),
        (Point(1), "Point"),
        (torch.Size([1]), "Size"),
        (defaultdict(list), "defaultdict"),
        (torch.float32, "dtype"),
        (np.array([object()]), "ndarray of dtype object"),
        (np.str_("a"), "str_"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.float8_e8m0fnu), "float8_e8m0fnu"),
        (len, "builtin_function_or_method"),
    ],
)
def test_unsupported_user_dict_value_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"^user_dict\['a'\]\[3\]\['b'\] cannot be stored .*: .*{message}"):
        round_trip({"a": [0, 1, 2, {"b": value}]})


def test_unsupported_keys_and_user_dicts_are_named() -> None:
    with pytest.raises(TypeError, match=r"^user_dict\['a'\] has a key of type Level"):
        round_trip({"a": {Level.LOW: 1}})
    with pytest.raises(TypeError, match=r"^the key \(<Level.LOW: 1>,\) of user_dict\['a'\]\[0\] cannot be stored"):
        round_trip({"a": {(Level.LOW,): 1}})
    with pytest.raises(TypeError, match="user_dict must be a dict, not list"):
        round_trip([1])


def test_nothing_is_written_for_a_user_dict_that_cannot_be_saved(tmp_path: Any) -> None:
    with pytest.raises(TypeError):
        save_state(tmp_path / "file", trainer_state(), {"a": object()}, True)
    assert list(tmp_path.iterdir()) == []


def test_a_user_dict_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = [endless]
    with pytest.raises(ValueError, match=r"^user_dict\['a'\]\[0\]\['a'\].* contains itself"):
        round_trip(endless)
    deep: Any = 1
    for _ in range(201):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        round_trip({"a": deep})
    assert_same(round_trip({"a": deep[0]}), {"a": deep[0]})


@pytest.mark.parametrize(
    "encoded",
    [
        {"json": "[1]", "arrays": {}},
        {"json": "{", "arrays": {}},
        {"json": '{"dict": [1]}', "arrays": {}},
        {"json": '{"dict": [["a", {"tensor": "7"}]]}', "arrays": {}},
        {"json": '{"dict": [["a", {"tensor": "0"}]]}', "arrays": {"0": "text"}},
        {"json": '{"dict": [["a", {"system": "0"}]]}', "arrays": {"0": np.ones(1)}},
        {"json": '{"dict": [["a", {"int": 3}]]}', "arrays": {}},
        {"json": '{"dict": [["a", {"float": "00"}]]}', "arrays": {}},
        {"json": '{"dict": [["a", {}]]}', "arrays": {}},
        {"json": '{"dict": [[["a"], 1]]}', "arrays": {}},
        {"json": '{"dict": [["a", {"dict": [], "x": 1}]]}', "arrays": {}},
        {"json": "[" * 100000, "arrays": {}},
        {"json": '{"dict": []}'},
        {"json": 3, "arrays": 3},
        {},
    ],
)
def test_a_user_dict_that_nobody_saved_is_refused(encoded: Any) -> None:
    file = io.BytesIO()
    storage.save({**trainer_state(), "user_dict": encoded}, file)
    with pytest.raises(CheckpointFileError, match="its user_dict cannot be decoded"):
        load_state([file])


@pytest.mark.parametrize("text", ["xyz", np.arange(3)])
def test_an_old_user_dict_that_is_no_pickle_is_refused(text: Any) -> None:
    file = io.BytesIO()
    write_old_file(file, {**trainer_state(), "user_dict": text})
    with pytest.raises(CheckpointFileError, match="not the hexadecimal text of a pickle"):
        load_state([file], allow_pickle=True)


def test_an_old_file_loads_as_a_new_one() -> None:
    file = io.BytesIO()
    write_old_file(file, trainer_state())
    state, user_dict = load_state([file])
    assert_same(state, trainer_state())
    assert user_dict == {}


def test_a_pickled_user_dict_loads_where_it_is_allowed() -> None:
    file = io.BytesIO()
    saved = {"epoch": 3, "tensor": torch.ones(2), "any": {1, 2}}
    write_old_file(file, {**trainer_state(), "user_dict": old_user_dict(saved)})
    state, user_dict = load_state([file], allow_pickle=True)
    assert_same(state, trainer_state())
    assert_same(user_dict, saved)


def test_names_with_slashes_in_an_old_file_get_their_names_back() -> None:
    expected = trainer_state()
    expected["model"]["full_precision"]["layer/0/w"] = np.ones(3, np.float32)
    expected["optimizer"]["layer/0/w"] = {"Moment_1": np.ones(3, np.float32), "Update_Count": np.array([1])}
    file = io.BytesIO()
    write_old_file(file, expected)
    assert_same(load_state([file])[0], expected)


def test_a_weight_without_dimensions_is_an_array_in_old_and_new_files() -> None:
    expected = trainer_state()
    expected["model"]["full_precision"]["scale"] = np.array(2, np.float32)
    for write in (write_old_file, lambda file, state: save_state(file, state, {}, True)):
        file = io.BytesIO()
        write(file, expected)
        assert_same(load_state([file])[0], expected)


def test_optimizer_states_are_left_out_on_demand() -> None:
    file = io.BytesIO()
    given_state = trainer_state()
    save_state(file, given_state, {}, False)
    assert_same(given_state, trainer_state())
    del given_state["optimizer"]
    assert_same(load_state([file])[0], given_state)


def test_further_sections_come_back() -> None:
    more = {
        "loss_scaler": {"loss_scale": 65536.0, "steps": 3, "automatic": True},
        "random": {"cpu": np.arange(10, dtype=np.uint8)},
        "gradient_accumulation": {"linear.weight": np.ones((4, 6), np.float32)},
        "buffers": {"running_mean": np.zeros(3)},
    }
    file = io.BytesIO()
    save_state(file, {**trainer_state(), **more}, {}, True)
    assert_same(load_state([file])[0], {**trainer_state(), **more})


def test_the_state_of_a_trainer_before_its_first_step_is_empty() -> None:
    file = io.BytesIO()
    save_state(file, {}, {"a": 1}, True)
    assert_same(load_state([file]), ({}, {"a": 1}))


def test_only_as_many_files_as_have_states_are_taken() -> None:
    file = io.BytesIO()
    save_state(file, trainer_state(), {}, True)
    with pytest.raises(AssertionError, match=r"^Expected number of files to load: 1, got 2"):
        load_state([file, file])
    with pytest.raises(AssertionError, match=r"^Expected number of files to load: at least 1, got 0"):
        load_state([])


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("model", np.ones(3), r"model is a ndarray, not a dictionary"),
        ("model", {"full_precision": 3}, r"model\[full_precision\] is a int, not a dictionary"),
        ("model", {"full_precision": {"w": "text"}}, r"model\[full_precision\]\[w\] is a str, not an array"),
        ("optimizer", {"w": np.ones(3)}, r"optimizer\[w\] is a ndarray, not a dictionary"),
        ("trainer_options", {"zero_stage": np.ones(3)}, r"trainer_options\[zero_stage\] is a ndarray"),
        ("trainer_options", {"zero_stage": "x"}, "trainer option 'zero_stage' is not an integer"),
        ("train_step_info", {"step": {}}, r"train_step_info\[step\] is a dict, not a number or text"),
        ("partition_info", {"w": {"original_dim": "x"}}, r"partition_info\[w\]\[original_dim\] has no integers"),
        ("partition_info", {"w": {}}, r"partition_info\[w\] does not say how it was split"),
    ],
)
def test_a_section_of_another_shape_is_refused(section: str, value: Any, message: str) -> None:
    file = io.BytesIO()
    storage.save({**trainer_state(), section: value}, file)
    with pytest.raises(CheckpointFileError, match=message):
        load_state([file])
