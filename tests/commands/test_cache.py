"""python -m ort_dynamo cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from forked import COMMANDS, run_program

from ort_dynamo.__main__ import main
from ort_dynamo.cache.disk import COUNTS
from ort_dynamo.cache.folder import SUFFIX, CacheFolder

SCRIPT = """
import sys
import torch
import beside

model = torch.nn.Linear(3, 2)
torch.compile(model, backend="ort_train")(torch.ones(4, 3)).sum().backward()
print("arguments", sys.argv[1:], __name__)
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path / "cache"))
    COUNTS.clear()
    return tmp_path / "cache"


@pytest.fixture
def filled(place: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    torch.compile(model, backend="ort_train")(torch.ones(4, 3)).sum().backward()
    assert len(list(place.glob(f"*{SUFFIX}"))) == 2
    return place


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "beside.py").touch()
    (tmp_path / "program" / "train.py").write_text(SCRIPT)
    return tmp_path / "program" / "train.py"


def test_info_says_where_and_how_much(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"folder   {place} (not there yet)",
        "in use   yes",
        "entries  0",
        "size     0 B of 2 GiB",
        "kernels  0, 0 B",
    ]


def test_info_of_a_filled_folder(
    filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "0")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", "elsewhere")
    CacheFolder(filled, 2**31).kernels().write("a" * 64, b"a kernel.")
    assert main(["cache", "info", "--dir", str(filled)]) == 0
    folder, use, entries, size, kernels = capsys.readouterr().out.splitlines()
    assert kernels == "kernels  1, 9 B"
    assert (folder, use, entries) == (f"folder   {filled}", "in use   no: ORT_DYNAMO_CACHE is 0", "entries  2")
    assert size.endswith(" KiB of 2 GiB")


def test_list_names_the_last_used_first(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sorted(filled.glob(f"*{SUFFIX}"))
    os.utime(first, (0, 1_000_000_000))
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [second.name[:16], first.name[:16]]
    assert {line.split()[-1].partition("-")[0] for line in lines} == {"forward", "backward"}
    assert "2001-09-09" in lines[1]
    assert first.stat().st_mtime == 1_000_000_000


def test_verify_finds_and_removes_damaged_entries(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify"]) == 0
    assert capsys.readouterr().out == "2 entries, 0 damaged\n"
    first, second = sorted(filled.glob(f"*{SUFFIX}"))
    content = bytearray(first.read_bytes())
    content[100] ^= 1
    first.write_bytes(content)
    second.write_bytes(b"\x80\x04\x95")
    assert main(["cache", "verify"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert sorted(out[:2]) == [f"{first}: its checksum is wrong", f"{second}: it is not a cache entry"]
    assert out[2] == "2 entries, 2 damaged"
    assert main(["cache", "verify", "--remove"]) == 1
    assert capsys.readouterr().out.endswith("2 entries, 2 damaged and removed\n")
    assert main(["cache", "verify"]) == 0


def test_clear_removes_all(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = CacheFolder(filled, 2**31).kernels()
    kernels.write("a" * 64, b"a kernel")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"3 files removed from {filled}\n"
    assert not kernels.entries()
    assert list(filled.iterdir()) == [kernels.path]


def test_clear_removes_files_unused_for_days(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = sorted(filled.glob(f"*{SUFFIX}"))
    yesterday = time.time() - 30 * 3600
    os.utime(old, (yesterday, yesterday))
    for days, removed, left in (("1.5", 0, [old, new]), ("1", 1, [new])):
        assert main(["cache", "clear", "--older-than", days]) == 0
        assert capsys.readouterr().out == f"{removed} files removed from {filled}\n"
        assert sorted(filled.iterdir()) == left


@pytest.mark.parametrize("days", ["soon", "-1", "nan"])
def test_clear_refuses_other_than_days(days: str, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "clear", f"--older-than={days}"])
    assert "number of days" in capsys.readouterr().err
    assert len(list(filled.iterdir())) == 2


@pytest.mark.parametrize("arguments", [["--dir", "", "clear"], ["clear", "--dir="]])
def test_an_empty_name_is_not_the_default_folder(
    arguments: list[str], filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["cache", *arguments])
    assert "--dir: the name of the folder is empty" in capsys.readouterr().err
    assert len(list(filled.iterdir())) == 2


def test_a_folder_of_others_is_not_touched(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled.chmod(0o777)
    for action in ("info", "list", "verify", "clear"):
        assert main(["cache", action]) == 2
        assert "can be written by other users" in capsys.readouterr().err
    assert len(list(filled.iterdir())) == 2


@pytest.mark.parametrize("action", ["info", "list", "verify", "clear", "warm"])
def test_a_folder_that_the_system_refuses_is_an_error(
    action: str, place: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.touch()
    program = [str(script)] if action == "warm" else []
    assert main(["cache", "--dir", str(place / "below"), action, *program]) == 2
    err = capsys.readouterr().err
    assert f"error: The cache of compiled graphs is not used: [Errno 20] Not a directory: '{place / 'below'}'" in err


def test_warm_runs_a_program_and_counts_cache_hits(place: Path, script: Path) -> None:
    def warm(*arguments: str) -> tuple[int, list[str]]:
        done = run_program(COMMANDS, "cache", "warm", str(script), *arguments)
        return done.returncode, done.stdout.splitlines()

    status, out = warm("3", "--more")
    assert (status, out[0]) == (3, "arguments ['3', '--more'] __main__")
    assert out[1] == f"0 graphs read from {place}, 2 built (2 absent)"
    assert warm() == (0, ["arguments [] __main__", f"2 graphs read from {place}, 0 built"])
    assert warm("--", "--more")[1][0] == "arguments ['--', '--more'] __main__"


@pytest.mark.parametrize("name", ["nofile.py", "."])
def test_warm_says_that_a_program_cannot_be_read(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "warm", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert f"error: Cannot run the program {tmp_path / name}: " in err
    assert "No such file" in err


def test_the_folder_may_be_given_before_or_after_the_action(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other")
    for arguments in (["--dir", other, "info"], ["info", "--dir", other], ["--dir", "unused", "info", "--dir", other]):
        assert main(["cache", *arguments]) == 0
        assert capsys.readouterr().out.startswith(f"folder   {other} (not there yet)\n")
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out.startswith(f"folder   {place} ")


def test_warm_needs_the_cache_on(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "0")
    assert main(["cache", "warm", str(script)]) == 2
    assert "the environment variable ORT_DYNAMO_CACHE is 0" in capsys.readouterr().err
