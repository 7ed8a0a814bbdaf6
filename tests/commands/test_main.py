"""The command line itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ort_dynamo.__main__ import main
from ort_dynamo.commands.topics import topics

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ort_dynamo {version('ort-dynamo')}\n"


def test_help_of_the_program_names_the_first_guide(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m ort_dynamo help first_training" in " ".join(capsys.readouterr().out.split())


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ort_dynamo", "operators"]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as program,
    ):
        assert program.stdout is not None
        assert program.stdout.read(1)
        program.stdout.close()
        assert program.wait(timeout=120) == 0
        errors.seek(0)
        assert errors.read() == ""


def test_a_reader_that_has_gone_before_short_output_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "ort_dynamo", "help", "doctor"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("given", "meant"), [(["doctr"], "doctor"), (["cache", "claer"], "clear")])
def test_an_unknown_command_names_the_nearest(given: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f" (did you mean {meant!r}?)\n")


@pytest.mark.parametrize(
    ("given", "command", "meant"),
    [
        (["explain", "--hmtl", "page.html", "train.py"], "explain", "--html"),
        (["cache", "verify", "--remvoe"], "cache verify", "--remove"),
        (["doctor", "--jsno=1"], "doctor", "--json"),
    ],
)
def test_an_unknown_option_has_the_usage_of_its_command(
    given: list[str], command: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: python -m ort_dynamo {command} ")
    assert err.endswith(f" (did you mean {meant!r}?)\n")


def test_operators_are_found_by_a_part_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators", "_softmax", "linalg_svd"]) == 0
    out = capsys.readouterr().out
    assert "aten._softmax.default: ONNX Runtime\n  dtypes " in out
    assert "\n  gradient  _softmax_backward_data.default\n" in out
    assert "aten._linalg_svd.default: eager mode (fallback)\n" in out
    assert main(["operators", "--fallback", "_softmax", "linalg_svd"]) == 0
    assert capsys.readouterr().out.startswith("aten._linalg_svd.default: eager mode (fallback)\n")
    assert main(["operators", "--fallback", "_softmax"]) == 0
    assert capsys.readouterr().out == "None of these operators runs in eager mode.\n"
    assert main(["operators", "aten.relu.default"]) == 0
    assert "composed:" not in capsys.readouterr().out
    assert main(["operators", "relu"]) == 0
    legend = capsys.readouterr().out.splitlines()[-2:]
    assert legend == [
        "?: not known, since no test arguments could be generated from the schema",
        "composed: the gradient consists of ordinary operators",
    ]
    assert main(["operators", "sofmax"]) == 1
    assert "No operator in the table has a name with 'sofmax' (did you mean 'softmax'?)." in capsys.readouterr().err
    assert main(["operators", "softmax", "--write"]) == 2


def test_help_lists_topics_and_prints_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    listed = capsys.readouterr().out
    assert "  troubleshooting " in listed
    assert "Troubleshooting" in listed
    assert main(["help", "troubleshooting"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/how_to/troubleshooting.md").read_text()
    assert main(["help", "trubleshooting"]) == 2
    assert "did you mean 'troubleshooting'?" in capsys.readouterr().err


def test_each_page_is_a_topic_of_its_own() -> None:
    pages = [page for page in (ROOT / "docs").glob("*/*.md") if page.stem != "index"]
    assert {page.resolve() for page in topics().values()} == {*pages}


def test_each_topic_that_a_message_names_exists() -> None:
    sources = [file for top in ("ort_dynamo", "passes") for file in (ROOT / top).rglob("*.py")]
    named = {topic for file in sources for topic in re.findall(r"ort_dynamo help ([a-z_]+)", file.read_text())}
    assert named
    assert named <= topics().keys()


def test_no_message_names_a_page_that_pip_does_not_install() -> None:
    """Comments and docstrings of modules may name a page; a string that a program prints names a topic."""
    found = []
    for file in [file for top in ("ort_dynamo", "passes") for file in sorted((ROOT / top).rglob("*.py"))]:
        tree = ast.parse(file.read_text())
        written = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in written]
        found += [f"{file.name}:{one.lineno}" for one in texts if re.search(r"docs/\w+/\w+\.md", str(one.value))]
    assert found == ["__init__.py:16"], found  # operators --write, which writes a page of the clone
