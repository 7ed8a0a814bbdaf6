"""python -m ort_dynamo explain runs a program, and tells of its graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked import COMMANDS, run_program

from ort_dynamo.__main__ import main
from ort_dynamo.compilation.events import EXTRA_LISTENERS
from ort_dynamo.errors import NotCompiledError

PROGRAM = """
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
step = torch.compile(model, backend="ort_train")
step(torch.randn(3, 4)).sum().backward()
print("arguments", sys.argv[1:])
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_it_prints_the_graphs_after_the_program(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(program)]) == 0
    printed = capsys.readouterr().out
    program_said, _, told = printed.partition("arguments []\n")
    assert not program_said
    assert told.startswith("train.py with ort_train on ")
    assert "\nforward: " in told
    assert "\nbackward: " in told
    assert "capture" in told
    assert not EXTRA_LISTENERS


def test_the_exit_status_is_the_program_s(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(program), "3", "--html", "x"]) == 3
    assert "arguments ['3', '--html', 'x']" in capsys.readouterr().out


@pytest.mark.parametrize("first", [True, False])
def test_files_are_written(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: bool) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    own = ["--html", str(page), f"--json={data}"]
    assert main(["explain", *own, str(program)] if first else ["explain", str(program), *own, "--", "0"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [role["name"] for role in json.loads(data.read_text())["graphs"][0]["roles"]] == ["forward", "backward"]
    assert f"arguments {[] if first else ['0']}" in capsys.readouterr().out


def test_two_dashes_end_the_options_of_the_command(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text("import sys\nprint(sys.argv[1:])\n")
    its_file = tmp_path / "settings.json"
    its_file.write_text("{}")
    assert main(["explain", str(program), "--", "--json", str(its_file)]) == 0
    assert capsys.readouterr().out.startswith(f"['--json', {str(its_file)!r}]\n")
    assert its_file.read_text() == "{}"
    assert main(["explain", "--", str(program), "a", "--", "b"]) == 0
    assert capsys.readouterr().out.startswith("['a', '--', 'b']\n")


def test_an_error_of_the_program_comes_after_the_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fails.py"
    path.write_text(PROGRAM.replace("print(", "raise KeyError('lost')\nprint("))
    with pytest.raises(KeyError, match="lost"):
        main(["explain", str(path)])
    assert "forward: " in capsys.readouterr().out
    assert not EXTRA_LISTENERS


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("raise BrokenPipeError('of a socket')", BrokenPipeError),  # of our own output it is no error
        ("import ort_dynamo\nort_dynamo.require_compiled(len)", NotCompiledError),  # of ours, a message and status 2
    ],
)
def test_an_error_of_the_program_is_not_taken_for_one_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, error: type[Exception]
) -> None:
    path = tmp_path / "fails.py"
    path.write_text(line)
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path))
    for command in (["explain"], ["cache", "warm"]):
        with pytest.raises(error) as raised:
            main([*command, str(path)])
        assert any(one.path == path for one in raised.traceback)
        assert raised.value.__cause__ is raised.value.__context__ is None


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cannot_be_written_is_told(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["explain", option, str(tmp_path / "none" / "page"), str(program)]) == 2
    printed = capsys.readouterr()
    assert "forward: " in printed.out
    assert "explain: error: Cannot write the " in printed.err
    assert str(tmp_path / "none" / "page") in printed.err


def test_the_program_s_error_is_not_replaced_by_one_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fails.py"
    path.write_text(PROGRAM.replace("print(", "raise KeyError('lost')\nprint("))
    with pytest.raises(KeyError, match="lost"):
        main(["explain", "--html", str(tmp_path / "none" / "page"), str(path)])
    assert "Cannot write the page" in capsys.readouterr().err


def test_a_program_that_compiles_nothing_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.py"
    path.write_text("raise SystemExit('no data')")
    assert main(["explain", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == (
        'empty.py: nothing was compiled by ort_train\nDoes the program call torch.compile(..., backend="ort_train")?\n'
    )
    assert printed.err == "no data\n"


def test_a_missing_program_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.py")]) == 2
    assert "Cannot run the program" in capsys.readouterr().err
    (tmp_path / "there.py").write_text("")
    assert main(["explain", str(tmp_path / "there.py"), "--html"]) == 2


def test_compiles_of_the_program_are_those_of_the_summary(program: Path, tmp_path: Path) -> None:
    program.write_text(PROGRAM.replace("sys.exit(", "import ort_dynamo\nprint(ort_dynamo.summary())\nsys.exit("))
    data = tmp_path / "data.json"
    done = run_program(COMMANDS, "explain", "--json", str(data), str(program), warnings=["ignore"])
    assert done.returncode == 0, done.stderr
    told = json.loads(data.read_text())
    native = sum(told["summary"]["native"].values())
    assert f"nodes: {native} in ONNX Runtime" in done.stdout
    assert told["graphs"][0]["stages"]["capture"] > 0
    assert "running the program" not in told["graphs"][0]["stages"]


def test_stages_are_those_of_each_compile(program: Path, tmp_path: Path) -> None:
    two = PROGRAM.replace("print(", "torch.compile(lambda x: x.sin(), backend='ort_train')(torch.randn(3))\nprint(")
    program.write_text(two)
    data = tmp_path / "data.json"
    assert main(["explain", "--json", str(data), str(program)]) == 0
    first, second = (graph["stages"] for graph in json.loads(data.read_text())["graphs"])
    assert first.keys() >= {"capture", "mark and partition", "lower", "open"}
    assert "mark and partition" not in second
    assert second["lower"] < first["lower"] + first["capture"]
    torch._dynamo.reset()


def test_a_program_may_remove_its_folder_from_the_path(program: Path) -> None:
    program.write_text("import sys\nsys.path.pop(0)\nsys.exit(3)\n")
    assert main(["explain", str(program)]) == 3


STEPS = """
import threading

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
step = torch.compile(model, backend="ort_train")


def train():
    for rows in (32, 32, 8):
        step(torch.randn(rows, 4)).sum().backward()
    for _ in range(3):
        step(torch.randn(32, 4))  # whose results nobody keeps


thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_the_memory_is_that_of_one_step_and_compiles_of_threads_have_times(tmp_path: Path) -> None:
    path, data = tmp_path / "steps.py", tmp_path / "data.json"
    path.write_text(STEPS)
    assert main(["explain", "--json", str(data), str(path)]) == 0
    found = json.loads(data.read_text())
    assert len(found["graphs"]) == 2
    assert found["calls"] == [{"graph": 0, "saved": 32 * 8 * 4}]
    assert found["graphs"][0]["stages"]["capture"] > 0


def test_a_module_is_run_as_python_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("ROWS = 3")
    (package / "train.py").write_text(PROGRAM.replace("import sys", "import sys\n\nfrom .sizes import ROWS"))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", "-m", "their_package.train", "3"]) == 3
    told = capsys.readouterr().out
    assert "arguments ['3']" in told
    assert "their_package.train with ort_train on " in told
    for missing in ("nothing_of_the_kind", "nothing_of_the_kind.train"):
        assert main(["explain", "-m", missing]) == 2
        assert "No module named 'nothing_of_the_kind'" in capsys.readouterr().err
