"""The cache keeps compiled kernels beside the graphs, trusts its own user's files only, and never fails a compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from ort_dynamo.cache import disk
from ort_dynamo.cache.folder import CacheFolder
from ort_dynamo.cache.kernel_files import KernelFiles

KEY = "a" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    monkeypatch.setattr(disk, "_said", {})
    return CacheFolder(tmp_path / "cache", 800).kernels()


def test_stored_kernel_is_loaded(folder: CacheFolder, tmp_path: Path) -> None:
    files = KernelFiles(folder)
    assert files.load(KEY) is None
    files.store(KEY, b"a kernel")
    assert files.load(KEY) == b"a kernel"
    graphs = CacheFolder(tmp_path / "cache", 800)
    assert graphs.entries() == []
    graphs.write(KEY, bytes(800))
    assert files.load(KEY) == b"a kernel"


def test_kernels_take_an_eighth_of_the_size(folder: CacheFolder) -> None:
    files = KernelFiles(folder)
    files.store(KEY, bytes(101))
    assert files.load(KEY) is None
    files.store(KEY, bytes(100))
    assert files.load(KEY) == bytes(100)


def test_a_folder_that_others_write_is_neither_read_nor_written(
    folder: CacheFolder, caplog: pytest.LogCaptureFixture
) -> None:
    files = KernelFiles(folder)
    files.store(KEY, b"a kernel")
    folder.path.chmod(0o770)
    for _ in range(2):
        assert files.load(KEY) is None
        files.store("b" * 64, b"another")
    assert len(list(folder.path.iterdir())) == 1
    assert [one.getMessage().split(": ")[:2] for one in caplog.records] == [
        ["ort_train", "The cache of compiled kernels is not read"],
        ["ort_train", "The cache of compiled kernels is not written"],
    ]


def test_a_link_is_not_followed(folder: CacheFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = KernelFiles(folder)
    files.store(KEY, b"a kernel")
    [entry] = folder.entries()
    entry.path.rename(tmp_path / "elsewhere")
    entry.path.symlink_to(tmp_path / "elsewhere")
    assert files.load(KEY) is None
    assert "it is a link" in caplog.text


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    files = KernelFiles(CacheFolder(tmp_path / "cache", 800).kernels())
    files.store(KEY, b"a kernel")
    assert files.load(KEY) is None
    assert "The cache of compiled kernels cannot be written" in caplog.text
