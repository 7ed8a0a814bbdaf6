"""Tests of the digest of this package's sources, which the keys of stored files have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_dynamo.cache import source_code


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a module, a table and a linked folder; the digest is of it."""
    place = tmp_path / "package"
    (place / "inner").mkdir(parents=True)
    (tmp_path / "passes").mkdir()
    (place / "passes").symlink_to(tmp_path / "passes")
    for name in ("a.py", "inner/b.py", "inner/c.json", "passes/d.py"):
        (place / name).write_text(f"# {name}")
    monkeypatch.setattr(source_code, "_PACKAGE", place)
    return place


def digest() -> str:
    return source_code.source_digest.__wrapped__()


@pytest.mark.parametrize("name", ["a.py", "inner/b.py", "inner/c.json", "passes/d.py"])
def test_a_changed_source_changes_it(package: Path, name: str) -> None:
    first, text = digest(), (package / name).read_text()
    (package / name).write_text("!" + text[1:])
    assert digest() != first
    (package / name).write_text(text)
    assert digest() == first


def test_a_renamed_source_changes_it(package: Path) -> None:
    first = digest()
    (package / "a.py").rename(package / "A.py")
    assert digest() != first


def test_a_line_that_moves_to_the_next_source_changes_it(package: Path) -> None:
    (package / "a.py").write_text("1\n2\n")
    (package / "b.py").write_text("3\n")
    first = digest()
    (package / "a.py").write_text("1\n")
    (package / "b.py").write_text("2\n3\n")
    assert digest() != first


def test_a_source_that_looks_like_two_is_not_them(package: Path) -> None:
    (package / "a.py").write_text("1\n")
    (package / "b.py").write_text("2")
    first = digest()
    (package / "a.py").write_text("1\nb.py \n2")
    (package / "b.py").unlink()
    assert digest() != first


def test_the_order_in_which_a_folder_lists_its_files_does_not_enter(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, walk = digest(), os.walk
    listed = [(folder, folders[::-1], names[::-1]) for folder, folders, names in walk(package, followlinks=True)]
    monkeypatch.setattr(os, "walk", lambda *_, **__: reversed(listed))
    assert digest() == first


def test_other_files_do_not_enter(package: Path) -> None:
    first = digest()
    (package / "a.pyc").write_text("anything")
    (package / "inner" / "b.py~").write_text("anything")
    assert digest() == first


def test_a_copy_of_the_package_has_the_same(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest()
    for name in ("passes/d.py", "inner/c.json", "inner/b.py", "a.py"):  # a folder may list them in another order
        copy = tmp_path / "copy" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((package / name).read_text())
    monkeypatch.setattr(source_code, "_PACKAGE", tmp_path / "copy")
    assert digest() == first


def test_it_is_of_this_package_with_its_passes() -> None:
    folder = Path(source_code._PACKAGE)
    assert {"cache", "passes"} <= {one.name for one in folder.iterdir()}
    assert (folder / "passes" / "pipelines.py").is_file()
