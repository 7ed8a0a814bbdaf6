"""Dictionaries as files and back, and where they do not go."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from old_checkpoints import assert_same, trainer_state, write_old_file

from ort_dynamo.errors import CheckpointFileError, MissingDependencyError
from ort_dynamo.training import _checkpoint_storage as storage
from ort_dynamo.training.checkpointing.key_names import key_of, name_of

DTYPES = ["bool", *(f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)), "float16", "float32", "float64"]
UNUSUAL = [np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
KEYS = ANY_TEXT | st.sampled_from(["", ".", "..", "/", "a/b", "%", "%2F"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ARRAYS = hnp.arrays(st.sampled_from(DTYPES + UNUSUAL[:2]), SHAPES)
VALUES = st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary() | ARRAYS
TREES = st.dictionaries(KEYS, st.recursive(VALUES, lambda inner: st.dictionaries(KEYS, inner, max_size=4)), max_size=5)


def saved_and_loaded(tree: Mapping[str, Any], key: str | None = None) -> Any:
    file = io.BytesIO()
    storage.save(tree, file)
    return storage.load(file, key)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_any_dictionary_comes_back_as_it_was(tree: dict[str, Any]) -> None:
    assert_same(saved_and_loaded(tree), tree)


@pytest.mark.slow
@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_any_dictionary_comes_back_as_it_was_at_length(tree: dict[str, Any]) -> None:
    assert_same(saved_and_loaded(tree), tree)


@given(KEYS, KEYS)
def test_a_key_has_one_name_and_a_name_one_key(key: str, other: str) -> None:
    name = name_of(key)
    assert key_of(name) == key
    assert name not in ("", ".")
    assert not set(name) & {"/", "\0"}
    assert (name_of(other) == name) == (other == key)


@pytest.mark.parametrize("name", ["%2f", "%41", "%zz", "a%", ""])
def test_a_name_that_no_key_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a key"):
        key_of(name)


@pytest.mark.parametrize("dtype", [*DTYPES, *UNUSUAL])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_an_array_of_each_dtype_comes_back(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3).astype(dtype)
    assert_same(saved_and_loaded({"a": array})["a"], array)


def test_views_and_other_byte_orders_come_back_as_plain_arrays() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array[::2, 1:], array.T, array.astype(">f4"), np.broadcast_to(array[0], (3, 6))):
        found = saved_and_loaded({"a": view})["a"]
        assert found.dtype == np.float32
        assert found.flags.writeable
        np.testing.assert_array_equal(found, view)


def test_special_floats_come_back_bit_by_bit() -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000, 1], np.uint32)
    assert_same(saved_and_loaded({"a": bits.view(np.float32)})["a"].view(np.uint32), bits)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_come_back_as_arrays(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype)
    found = saved_and_loaded({"a": tensor, "b": tensor.T[1:], "c": tensor[0, 1]})
    assert found["a"].dtype.name == str(dtype).removeprefix("torch.")
    for name, expected in {"a": tensor, "b": tensor.T[1:], "c": tensor[0, 1]}.items():
        assert found[name].shape == expected.shape
        np.testing.assert_array_equal(found[name].astype(np.complex64), expected.to(torch.complex64).numpy())


def test_a_tensor_with_a_gradient_and_a_conjugate_are_stored() -> None:
    tensor = torch.tensor([1 + 2j])
    found = saved_and_loaded({"a": torch.ones(2, requires_grad=True), "b": tensor.conj(), "c": tensor.conj().imag})
    assert_same(found, {"a": np.ones(2, np.float32), "b": np.array([1 - 2j], np.complex64), "c": np.array([-2], "f4")})


def test_numbers_of_numpy_and_lists_come_back_as_before() -> None:
    found = saved_and_loaded({"a": np.float32(2), "b": [1, 2], "c": (0.5, 1), "d": [[True], [False]]})
    expected = {"a": np.float32(2), "b": np.array([1, 2]), "c": np.array([0.5, 1]), "d": np.array([[True], [False]])}
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "NoneType"),
        ({1, 2}, "set"),
        (["a", "b"], "list"),
        ([1, "b"], "list"),
        ([[1], [1, 2]], "inhomogeneous"),
        (object(), "object"),
        (np.array(["a"]), "ndarray of dtype <U1"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.zeros(2, np.longdouble), "longdouble|float128"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_unsupported_value_is_named(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"^\['a'\]\['b/c'\] cannot be stored in a checkpoint: .*({message})"):
        storage.save({"fine": 1, "a": {"b/c": value}}, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_not_text_is_named() -> None:
    with pytest.raises(TypeError, match=r"a key of \['a'\] is not text but int: 1"):
        saved_and_loaded({"a": {1: 2}})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [[1, 2, 3], 2.352, None])
def test_only_a_dictionary_is_saved(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object to be saved must be a dictionary"):
        storage.save(value, tmp_path / "file")


def test_any_mapping_is_a_dictionary() -> None:
    assert_same(saved_and_loaded(MappingProxyType({"a": MappingProxyType({})})), {"a": {}})


def test_nesting_has_a_limit_on_both_sides() -> None:
    tree: dict[str, Any] = {}
    for _ in range(64):
        tree = {"a": tree}
    assert_same(saved_and_loaded(tree), tree)
    with pytest.raises(ValueError, match=r"^(\['a'\])+ is in more than 64 dictionaries$"):
        saved_and_loaded({"a": tree})
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(ValueError, match="in more than 64 dictionaries"):
        saved_and_loaded(endless)


def test_a_part_is_loaded_by_its_key() -> None:
    tree = {"a": {"b": np.arange(3), "c": {"d": 1}}, "%": 2}
    assert_same(saved_and_loaded(tree, "a/b"), np.arange(3))
    assert_same(saved_and_loaded(tree, "a/c/"), {"d": 1})
    assert_same(saved_and_loaded(tree, "%"), 2)
    assert_same(saved_and_loaded(tree, ""), tree)
    for key in ("x", "a/x", "a/b/x", "a/.", "."):
        with pytest.raises(KeyError, match=key.strip("/")):
            saved_and_loaded(tree, key)


def test_equal_dictionaries_are_equal_files() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    storage.save(trainer_state(), first)
    storage.save(trainer_state(), second)
    assert first.getvalue() == second.getvalue()


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_path_is_text_bytes_or_an_object(kind: Any, tmp_path: Path) -> None:
    path = kind(tmp_path / "größe.ort")
    storage.save({"a": 1}, path)
    assert storage.load(path) == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["größe.ort"]


def test_a_file_object_is_written_and_read_from_its_start(tmp_path: Path) -> None:
    with open(tmp_path / "file", "x+b") as file:
        storage.save({"a": 1}, file)
        assert storage.load(file) == {"a": 1}
        with pytest.raises(FileExistsError):
            storage.save({"a": 2}, file)
    assert storage.load(tmp_path / "file") == {"a": 1}


def test_a_number_instead_of_a_path_is_refused() -> None:
    with pytest.raises(TypeError, match="a path or a binary file object, not to int"):
        storage.save({}, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a path or a binary file object, not from int"):
        storage.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("there", ["file", "folder", "dangling link"])
def test_a_path_that_is_taken_is_left_alone(there: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    if there == "file":
        path.write_text("mine")
    elif there == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError, match="checkpoint"):
        storage.save({"a": 1}, path)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint"]
    assert there != "file" or path.read_text() == "mine"


def test_a_path_taken_during_the_save_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    link = os.link

    def late(*args: Any, **kwargs: Any) -> None:
        path.write_text("mine")
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileExistsError, match="checkpoint"):
        storage.save({"a": 1}, path)
    assert path.read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    storage.save({"a": 1}, tmp_path / "checkpoint")
    assert storage.load(tmp_path / "checkpoint") == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("count", [1, 50])
def test_a_full_disk_leaves_nothing(count: int, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))  # Python ignores its signal; writes fail
    try:
        with pytest.raises(OSError, match="File too large"):
            storage.save({str(i): np.ones(5000) for i in range(count)}, tmp_path / "checkpoint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.save({}, tmp_path / "folder" / "file")
    with pytest.raises(FileNotFoundError):
        storage.load(tmp_path / "file")


def test_without_h5py_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    for call in (lambda: storage.save({}, io.BytesIO()), lambda: storage.load(io.BytesIO())):
        with pytest.raises(MissingDependencyError, match="needs h5py, which is not installed"):
            call()


def test_h5py_reads_a_saved_file(tmp_path: Path) -> None:
    storage.save(trainer_state(), tmp_path / "file")
    assert h5py.is_hdf5(tmp_path / "file")
    with h5py.File(tmp_path / "file") as file:
        assert file["trainer_options/optimizer_name"].asstr()[()] == "AdamOptimizer"
        assert file["train_step_info/step"][()] == 10
        assert file["model/full_precision/linear.weight"].shape == (4, 6)


def test_an_old_file_is_read() -> None:
    file = io.BytesIO()
    write_old_file(file, {**trainer_state(), "%25": {"kept": True}, "text": b"bytes"})
    assert not storage.is_sealed(file)
    found = storage.load(file)
    expected = trainer_state()
    options = expected["trainer_options"]
    expected["trainer_options"] = {
        key: np.int64(value) if type(value) is int else np.bool_(value) if type(value) is bool else value
        for key, value in options.items()
    }
    expected["train_step_info"] = {key: np.int64(value) for key, value in expected["train_step_info"].items()}
    assert_same(found, {**expected, "%25": {"kept": np.True_}, "text": "bytes"})
    assert_same(storage.load(file, "trainer_options/world_size"), np.int64(1))


def test_a_newer_format_says_so() -> None:
    file = io.BytesIO(b"ort_dynamo checkpoint 2\n" + bytes(1000))
    with pytest.raises(CheckpointFileError, match="its format 2 is newer than 1"):
        storage.load(file)


def test_the_file_that_is_checked_is_the_file_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.save({"a": 1}, tmp_path / "file")
    opened = []

    def count(path: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(path)
        return original(path, *args, **kwargs)

    original = builtins.open
    monkeypatch.setattr(builtins, "open", count)
    storage.load(tmp_path / "file")
    assert opened == [tmp_path / "file"]
