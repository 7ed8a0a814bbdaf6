"""A folder of cache entries: complete files of the user's own, within a size limit, beside any other files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ort_dynamo.cache.folder import SUFFIX, CacheFolder, FolderRefusedError

KEY, OTHER = "a" * 64, "b" * 64


def folder(path: Path, max_bytes: int = 1 << 20) -> CacheFolder:
    return CacheFolder(path / "cache", max_bytes)


def test_written_entries_are_read_back(tmp_path: Path) -> None:
    made = folder(tmp_path)
    assert made.read(KEY) is None
    assert made.entries() == []
    made.write(KEY, b"one")
    made.write(OTHER, b"two")
    made.write(KEY, b"three")
    assert (made.read(KEY), made.read(OTHER)) == (b"three", b"two")
    assert {(one.key, one.nbytes) for one in made.entries()} == {(KEY, 5), (OTHER, 3)}
    assert (made.path.stat().st_mode & 0o777, (made.path / f"{KEY}{SUFFIX}").stat().st_mode & 0o777) == (0o700, 0o600)
    assert made.clear() == 2
    assert made.read(KEY) is None


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    made = folder(tmp_path, max_bytes=25)
    for index in range(3):
        made.write(str(index), bytes(8))
        os.utime(made.path / f"{index}{SUFFIX}", (index, index))
    made.read("0")
    made.write("3", bytes(8))
    assert {one.key for one in made.entries()} == {"0", "2", "3"}


def test_a_file_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    made = folder(tmp_path, max_bytes=8)
    made.write(KEY, bytes(9))
    assert made.entries() == []


def test_old_unfinished_files_are_removed(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write(KEY, b"one")
    old, new = made.path / ".unfinished-1", made.path / ".unfinished-2"
    old.touch(), new.touch()
    os.utime(old, (0, time.time() - 4000))
    folder(tmp_path, max_bytes=1 << 19).write(OTHER, b"two")  # the first write to a folder lists its files
    assert (old.exists(), new.exists()) == (False, True)


def test_files_are_listed_again_when_an_eighth_of_the_free_bytes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, listed, entries = folder(tmp_path, max_bytes=8_000), [], CacheFolder.entries
    monkeypatch.setattr(CacheFolder, "entries", lambda self: listed.append(self.path) or entries(self))
    for index in range(10):
        made.write(str(index), bytes(100))
    assert len(listed) == 1
    (made.path / f"{OTHER}{SUFFIX}").write_bytes(bytes(8_000))  # another process
    os.utime(made.path / f"{OTHER}{SUFFIX}", (0, 0))
    made.write(KEY, bytes(100))
    assert len(listed) == 2
    assert {one.key for one in entries(made)} == {KEY, *map(str, range(10))}


def test_files_of_others_stay(tmp_path: Path) -> None:
    made = folder(tmp_path, max_bytes=4)
    made.write(KEY, b"one")
    (made.path / "README").write_text("mine")
    (made.path / f"folder{SUFFIX}").mkdir()
    made.write(OTHER, b"two")
    assert made.clear() == 1
    assert sorted(one.name for one in made.path.iterdir()) == ["README", f"folder{SUFFIX}"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    made = folder(tmp_path)
    made.write(KEY, b"one")
    made.path.chmod(mode)
    for use in (lambda: made.read(KEY), lambda: made.write(KEY, b""), made.entries, made.clear):
        with pytest.raises(FolderRefusedError, match="can be written by other users"):
            use()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path)
    made.write(KEY, b"one")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FolderRefusedError, match="belongs to another user"):
        made.read(KEY)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    made = folder(tmp_path)
    made.write(KEY, b"one")
    os.chown(made.path / f"{KEY}{SUFFIX}", 1, 1)
    with pytest.raises(FolderRefusedError, match="belongs to another user"):
        made.read(KEY)


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write(OTHER, b"two")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    place = made.path / f"{KEY}{SUFFIX}"
    place.symlink_to(secret)
    with pytest.raises(FolderRefusedError, match="it is a link"):
        made.read(KEY)
    made.write(KEY, b"one")  # takes the link's place
    assert (made.read(KEY), secret.read_text()) == (b"one", "secret")


def test_pipes_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write(OTHER, b"two")
    os.mkfifo(made.path / f"{KEY}{SUFFIX}")
    with pytest.raises(FolderRefusedError, match="not a regular file"):
        made.read(KEY)
    (made.path / f"c{SUFFIX}").mkdir()
    with pytest.raises((FolderRefusedError, OSError)):
        made.read("c")
    assert [one.key for one in made.entries()] == [OTHER]


def test_a_file_of_huge_size_is_not_read(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write(KEY, b"one")
    os.truncate(made.path / f"{KEY}{SUFFIX}", 1 << 40)  # sparse
    with pytest.raises(FolderRefusedError, match="1099511627776 bytes"):
        made.read(KEY)


@pytest.mark.skipif(sys.platform == "win32", reason="files are limited elsewhere")
@pytest.mark.parametrize("stored", [True, False])
def test_too_many_open_files_are_the_reason(tmp_path: Path, stored: bool) -> None:
    import resource

    found = folder(tmp_path)
    found.write(OTHER, b"another entry")
    if stored:
        found.write(KEY, b"an entry")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            found.read(KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.path.write_text("")
    with pytest.raises(FolderRefusedError, match="is not a folder"):
        made.read(KEY)
    with pytest.raises(OSError, match="exists"):
        made.write(KEY, b"one")


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from ort_dynamo.cache.folder import CacheFolder

folder, random = CacheFolder(Path(sys.argv[1]), 200_000), random.Random(0)
for _ in range(100):
    if not (child := os.fork()):
        for turn in range(10**9):
            key = f"{turn % 50:064}"
            folder.write(key, key.encode() * 100)
            found = folder.read(key)
            if found not in (None, key.encode() * 100):  # None: another may have made room
                os._exit(1)
    time.sleep(random.random() / 50)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    for entry in folder.entries():
        assert folder.read(entry.key) == entry.key.encode() * 100
"""


def test_writers_that_are_killed_leave_whole_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    made = CacheFolder(tmp_path, 200_000)
    assert made.entries()
    made.write(KEY, b"")  # makes the room that one who was killed had no time for
    assert sum(one.nbytes for one in made.entries()) <= 200_000
