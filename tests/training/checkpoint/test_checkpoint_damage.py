"""Damaged, foreign and hostile files are refused, and nothing in them is run."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from old_checkpoints import assert_same, old_user_dict, trainer_state, write_old_file

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training import _checkpoint_storage as storage
from ort_dynamo.training import checkpoint
from ort_dynamo.training.checkpointing.sealed_file import write_sealed

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def saved() -> bytes:
    file = io.BytesIO()
    checkpoint.save_state(file, trainer_state(), {"epoch": 3}, True)
    return file.getvalue()


def assert_refused(content: bytes, what: str) -> None:
    try:
        checkpoint.load_state([io.BytesIO(content)])
    except CheckpointFileError:
        return
    raise AssertionError(f"loaded after {what}")


@pytest.mark.parametrize("count", [200, pytest.param(10000, marks=pytest.mark.slow)])
def test_no_flip_of_a_bit_goes_unnoticed(count: int) -> None:
    whole = saved()
    places = random.Random(0)
    for place in [*range(600), *(places.randrange(len(whole)) for _ in range(count))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << places.randrange(8)
        assert_refused(damaged, f"a flip in byte {place}")


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_truncation_and_nothing_appended_goes_unnoticed(count: int) -> None:
    whole = saved()
    places = random.Random(1)
    for size in [0, 1, 511, 512, 513, len(whole) - 1, *(places.randrange(len(whole)) for _ in range(count))]:
        assert_refused(whole[:size], f"truncation to {size} bytes")
        assert_refused(whole[:size] + bytes(len(whole) - size) if size < 20000 else whole[:size], f"zeros from {size}")
    assert_refused(whole + b"\0", "one byte more")


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + bytes(100), b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + b"\1" * 600]
)
def test_a_foreign_file_is_refused(content: bytes) -> None:
    assert_refused(content, "nothing")


def test_hdf5_that_is_no_checkpoint_is_refused() -> None:
    file = io.BytesIO()
    write_old_file(file, {"dataset": np.arange(3)})
    with pytest.raises(CheckpointFileError, match="HDF5 without trainer_options"):
        checkpoint.load_state([file])


# In a process of its own: HDF5 is C, and one byte in the wrong place may take the process down. It must not.
FUZZ = """
import collections, io, random, resource, sys
sys.path[:0] = sys.argv[2:]
from old_checkpoints import old_user_dict, trainer_state, write_old_file
from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training import checkpoint
from ort_dynamo.training.checkpointing.sealed_file import write_sealed

random.seed(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (2**33, resource.RLIM_INFINITY))


def damage(whole, start):
    damaged = bytearray(whole)
    for _ in range(random.choice((1, 1, 2, 8))):
        place = random.randrange(start, len(whole))
        if random.random() < 0.6:
            damaged[place] = random.choice((damaged[place] ^ 1 << random.randrange(8), 0, 255, random.randrange(256)))
        else:
            number = random.choice((0, 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(whole), random.randrange(len(whole))))
            damaged[place // 8 * 8 : place // 8 * 8 + 8] = number.to_bytes(8, "little")
    if random.random() < 0.15:
        del damaged[random.randrange(512, len(damaged)) :]
    return damaged


def seal_again(damaged):
    file = io.BytesIO()
    write_sealed(file, lambda target: target.write(damaged))
    return file


def load(file, seen):
    try:
        checkpoint.load_state([file])
    except CheckpointFileError:
        seen["refused"] += 1
    except AssertionError as error:  # for example, the rest names another rank
        assert str(error).startswith(("Missing information", "Expected number", "Unexpected rank", "World size")), error
        seen["assertion"] += 1
    else:
        seen["loaded"] += 1


old, new = io.BytesIO(), io.BytesIO()
write_old_file(old, {**trainer_state(), "user_dict": old_user_dict({"a": 1})})
checkpoint.save_state(new, trainer_state(), {"a": [1.5, (None, b"x")]}, True)
seen = {"old": collections.Counter(), "new": collections.Counter()}
for _ in range(int(sys.argv[1])):
    load(io.BytesIO(damage(old.getvalue(), 0)), seen["old"])
    load(seal_again(damage(new.getvalue(), 512)), seen["new"])
assert seen["new"]["refused"] and seen["new"]["loaded"], seen
for line in open("/proc/self/status"):  # ru_maxrss would begin at what the parent had when it forked
    if line.startswith("VmHWM:"):
        print(line.split()[1])
"""


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_damage_that_no_seal_shows_ends_in_one_error_or_in_content(count: int) -> None:
    command = [sys.executable, "-c", FUZZ, str(count), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert int(done.stdout) < 2**20, "kilobytes of memory for files of some 40 kB"


def external_link(file: Any) -> None:
    file["a"] = h5py.ExternalLink("other.h5", "x")


def soft_link(file: Any) -> None:
    file["a"] = h5py.SoftLink("/b")
    file["b"] = np.ones(3)


def cycle(file: Any) -> None:
    file.create_group("a")["again"] = file["/"]


def two_names(file: Any) -> None:
    file["b"] = np.ones(3)
    file["a"] = file["b"]


def external_storage(file: Any) -> None:
    file.create_dataset("a", (16,), "u1", external=[("secret", 0, 16)])


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    file.create_virtual_dataset("a", layout)


def unknown_filter(file: Any) -> None:
    # Filter 32023 of the registry, which h5py does not have; optional, so that the dataset can be made.
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((3,))
    plan.set_filter(32023, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(file.id, b"a", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((3,)), plan)


def deep(file: Any) -> None:
    group = file.create_group("a")
    for _ in range(100):
        group = group.create_group("b")


HOSTILE: list[tuple[str, Callable[[Any], Any], str]] = [
    ("external link", external_link, "a link to another place or file"),
    ("soft link", soft_link, "a link to another place or file"),
    ("cycle", cycle, "a second name of something that was already read"),
    ("two names", two_names, "a second name of something that was already read"),
    ("external storage", external_storage, "stored in another file"),
    ("virtual dataset", virtual, "virtual"),
    ("unknown filter", unknown_filter, "compressed"),
    ("compressed", lambda f: f.create_dataset("a", data=np.zeros(10**6), compression="gzip"), "compressed"),
    ("chunked", lambda f: f.create_dataset("a", (10**12,), "f4", chunks=(1000,)), "chunked"),
    ("huge", lambda f: f.create_dataset("a", (10**12,), "f4"), "the file does not have"),
    ("huge product", lambda f: f.create_dataset("a", (2**40, 2**20), "i1"), "the file does not have"),
    ("compound", lambda f: f.create_dataset("a", data=np.zeros(3, [("x", "f4"), ("y", "i4")])), "of a type other than"),
    ("complex", lambda f: f.create_dataset("a", data=np.zeros(3, "c8")), "of a type other than"),
    ("object reference", lambda f: f.create_dataset("a", data=f.ref, dtype=h5py.ref_dtype), "of a type other than"),
    ("region reference", lambda f: f.create_dataset("a", (1,), dtype=h5py.regionref_dtype), "of a type other than"),
    ("vlen", lambda f: f.create_dataset("a", (1,), dtype=h5py.vlen_dtype("f4")), "of a type other than"),
    ("opaque", lambda f: f.create_dataset("a", data=np.zeros(3, "V5")), "of a type other than"),
    ("array type", lambda f: f.create_dataset("a", (3,), dtype=np.dtype(("f4", (10**6,)))), "of a type other than"),
    ("enumeration", lambda f: f.create_dataset("a", (1,), dtype=h5py.enum_dtype({"a": 1, "b": 2})), "an enumeration"),
    ("long double", lambda f: f.create_dataset("a", data=np.zeros(3, np.longdouble)), "of the type"),
    ("texts", lambda f: f.create_dataset("a", data=["x", "y"]), "an array of texts"),
    ("not UTF-8", lambda f: f.create_dataset("a", data=b"\xff\xfe"), "utf-8"),
    ("no shape", lambda f: f.__setitem__("a", h5py.Empty("f4")), "without a shape"),
    ("named type", lambda f: f.__setitem__("a", np.dtype("f8")), "neither group nor dataset"),
    ("deep", deep, "in more than 64 groups"),
]


@pytest.mark.parametrize("is_sealed", [False, True], ids=["old", "sealed"])
@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused(
    make: Callable[[Any], Any], message: str, is_sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    write_old_file(tmp_path / "other.h5", {"x": np.ones(4)})
    path = tmp_path / "file"

    def write(target: Any) -> None:
        with h5py.File(target, "w", userblock_size=512 if is_sealed else 0) as file:
            make(file)

    if is_sealed:
        write_sealed(path, write)
    else:
        write(path)
    with pytest.raises(CheckpointFileError, match=message):
        storage.load(path)
    with pytest.raises((CheckpointFileError, KeyError), match=f"{message}|a/b"):
        storage.load(path, "a/b")


def test_datasets_that_share_their_bytes_do_not_multiply_them() -> None:
    size = 100003
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened["a"] = np.zeros(size, np.uint8)
        offset = opened["a"].id.get_offset()
        for index in range(20):
            opened.create_dataset(f"b{index}", (size,), np.uint8)  # not written, so without a place in the file
    undefined = b"\xff" * 8 + size.to_bytes(8, "little")
    assert file.getvalue().count(undefined) == 20
    content = file.getvalue().replace(undefined, offset.to_bytes(8, "little") + size.to_bytes(8, "little"))
    with h5py.File(io.BytesIO(content)) as opened:
        assert opened["b7"].id.get_offset() == offset
    with pytest.raises(CheckpointFileError, match="more than the file can hold"):
        storage.load(io.BytesIO(content))
    with pytest.raises(CheckpointFileError, match="the file does not have"):
        storage.load(file)


def test_a_text_takes_no_more_memory_than_it_has() -> None:
    file = io.BytesIO()
    write_old_file(file, {"a": "x" * 99})
    reference = (99).to_bytes(4, "little")
    with h5py.File(file) as opened:
        offset = opened["a"].id.get_offset()
    content = file.getvalue()
    assert content[offset : offset + 4] == reference
    for damaged in (b"\xff\xff\xff\xff", (100).to_bytes(4, "little")):
        with pytest.raises(CheckpointFileError, match="the heap has no text 1 of"):
            storage.load(io.BytesIO(content[:offset] + damaged + content[offset + 4 :]))
    for where, value, message in [(4, 8, "no heap at byte"), (4, 2**63, "the file ends before"), (12, 2, "no text 2")]:
        damaged = value.to_bytes(8 if where == 4 else 4, "little")
        place = offset + where
        with pytest.raises(CheckpointFileError, match=message):
            storage.load(io.BytesIO(content[:place] + damaged + content[place + len(damaged) :]))


def test_texts_of_many_sizes_are_found_in_their_heaps() -> None:
    texts = {str(size): "ü" * size for size in [0, 1, 7, 8, 2000, 2040, 2048, 5000, 70000, *range(100, 160)]}
    file = io.BytesIO()
    write_old_file(file, texts)
    assert_same(storage.load(file), texts)
    file = io.BytesIO()
    storage.save(texts, file)
    assert_same(storage.load(file), texts)


def test_a_boolean_of_neither_value_is_refused() -> None:
    file = io.BytesIO()
    write_old_file(file, {"a": np.array([True, False, True] * 5)})
    content = file.getvalue().replace(b"\1\0\1" * 5, b"\1\0\7" * 5)
    with pytest.raises(CheckpointFileError, match="neither true nor false"):
        storage.load(io.BytesIO(content))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.arange(3), "int"),
        (np.arange(3), "array"),
        (np.float32(1), "str"),
        (np.arange(3), "bytes"),
        (np.arange(3), "bfloat16"),
        (np.zeros((2, 3), np.uint8), "bfloat16"),
        (np.uint8(1), "bfloat16"),
        (np.arange(3), "object"),
        (np.zeros(8, np.uint8), "O"),
        (np.arange(3), "x" * 1000),
    ],
)
def test_a_mark_that_does_not_fit_is_refused(value: Any, kind: str) -> None:
    def write(target: Any) -> None:
        with h5py.File(target, "w", userblock_size=512) as file:
            file["a"] = value
            file["a"].attrs.create("kind", np.bytes_(kind.encode()))

    target = io.BytesIO()
    write_sealed(target, write)
    with pytest.raises(CheckpointFileError, match=r"marked|is not an element type"):
        storage.load(target)


def test_marks_and_escapes_mean_nothing_in_an_old_file() -> None:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened["%2F"] = np.arange(3)
        opened["%2F"].attrs["kind"] = h5py.Empty("f4")
    assert_same(storage.load(file), {"%2F": np.arange(3)})


class Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_is_not_run_unasked(tmp_path: Path) -> None:
    trap, path = tmp_path / "sprung", tmp_path / "file"
    write_old_file(path, {**trainer_state(), "user_dict": old_user_dict({"a": Trap(trap)})})
    with pytest.raises(CheckpointFileError, match=r"is a pickle.*load_checkpoint\(\.\.\., allow_pickle=True\)"):
        checkpoint.load_state([path])
    storage.load(path)
    assert not trap.exists()
    checkpoint.load_state([path], allow_pickle=True)
    assert trap.exists()


def test_a_pickle_in_a_sealed_file_is_not_run_either(tmp_path: Path) -> None:
    storage.save({**trainer_state(), "user_dict": old_user_dict({"a": Trap(tmp_path / "sprung")})}, tmp_path / "file")
    with pytest.raises(CheckpointFileError, match="is a pickle"):
        checkpoint.load_state([tmp_path / "file"])
    assert not (tmp_path / "sprung").exists()
