"""Files and folders that another user could have written are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ort_dynamo.runtime.kernels.own_files import FolderRefusedError, belongs_to_another, is_own_file, is_own_folder


def made_file(path: Path) -> Path:
    path.write_text("")
    path.chmod(0o600)
    return path


def made_folder(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


KINDS = pytest.mark.parametrize(
    ("check", "make"), [(is_own_file, made_file), (is_own_folder, made_folder)], ids=["file", "folder"]
)


@KINDS
def test_a_missing_path_is_not_ours(
    tmp_path: Path, check: Callable[[Path], bool], make: Callable[[Path], Path]
) -> None:
    assert check(tmp_path / "none") is False
    assert check(make(tmp_path / "made")) is True


@KINDS
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_path_that_others_can_write_to_is_refused(
    tmp_path: Path, check: Callable[[Path], bool], make: Callable[[Path], Path], mode: int
) -> None:
    path = make(tmp_path / "made")
    path.chmod(0o700 | mode)
    with pytest.raises(FolderRefusedError, match="can be written by other users"):
        check(path)
    path.chmod(0o755)
    assert check(path)


@KINDS
def test_a_path_of_another_user_is_refused(
    tmp_path: Path, check: Callable[[Path], bool], make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "made")
    assert not belongs_to_another(path.stat())
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert belongs_to_another(path.stat())
    with pytest.raises(FolderRefusedError, match="belongs to another user"):
        check(path)


def test_a_file_is_a_regular_one_and_a_folder_a_folder(tmp_path: Path) -> None:
    target = made_file(tmp_path / "file")
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "link", made_folder(tmp_path / "folder")):
        with pytest.raises(FolderRefusedError, match="is not a regular file"):
            is_own_file(path)
    with pytest.raises(FolderRefusedError, match="is not a folder"):
        is_own_folder(target)
