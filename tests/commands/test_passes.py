"""python -m ort_dynamo passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_dynamo.__main__ import main
from ort_dynamo.commands.passes import PASSES
from ort_dynamo.passes import onnx as passes

NUMBERS = ", ".join(f"{number}.0" for number in range(300))
TEXT = f"""<ir_version: 10, opset_import: ["" : 20]>
g (float16[2, 300] x) => (float16[2, 300] y) <float[300] w = {{{NUMBERS}}}> {{
    a = Cast <to = 1> (x) b = Add (a, w) c = Neg (b) d = Cast <to = 10> (c) y = Exp (d) }}"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model whose weight lies in a file beside it."""
    model = ir.from_onnx_text(TEXT)
    ir.save(model, tmp_path / "in.onnx", external_data="in.onnx.data")
    assert (tmp_path / "in.onnx.data").stat().st_size == 1200
    return tmp_path / "in.onnx"


def operators(path: Path) -> list[str]:
    onnx.checker.check_model(path, full_check=True)
    return [node.op_type for node in onnx.load(path).graph.node]


def test_passes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PASSES)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_applies(name: str, path: Path) -> None:
    out = path.with_name("out.onnx")
    assert issubclass(getattr(passes, PASSES[name].class_name), ir.passes.InPlacePass)
    assert main(["passes", "apply", name, str(path), str(out)]) == 0
    assert operators(out)[-1] == "Exp"


def test_the_summary_is_printed_and_external_data_goes_along(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = path.with_name("out.onnx")
    assert main(["passes", "apply", "propagate-casts", str(path), str(out)]) == 0
    assert "propagate-casts: 2 casts became 2: 1 moved" in capsys.readouterr().out
    arguments = ["--level", "2", "--strategy", "insert_and_reduce", "--dtype", "float16"]
    assert main(["passes", "apply", "propagate-casts", str(path), str(out), *arguments]) == 0
    assert "2 casts became 0: 0 moved, 2 removed, 0 inserted; 2 nodes narrowed" in capsys.readouterr().out
    assert operators(out) == ["Add", "Neg", "Exp"]
    path.with_name("in.onnx.data").unlink()
    np.testing.assert_array_equal(ir.load(out).graph.initializers["w_float16"].const_value.numpy(), np.arange(300))  # type: ignore[union-attr]


def test_the_list_of_operators_is_used(path: Path) -> None:
    out = path.with_name("out.onnx")
    assert main(["passes", "apply", "propagate-casts", str(path), str(out), "--level", "0", "--allow", "Add,Neg"]) == 0
    assert operators(out) == ["Add", "Neg", "Exp"]


def test_kernels_of_a_device_are_asked_for(path: Path) -> None:
    out = path.with_name("out.onnx")
    arguments = ["--level", "2", "--device", "cpu"]
    assert main(["passes", "apply", "propagate-casts", str(path), str(out), *arguments]) == 0
    assert operators(out) == ["Cast", "Add", "Neg", "Cast", "Exp"]


def test_an_operator_that_the_device_lacks_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--allow", "Ngg", "--device", "cpu"]
    assert main(["passes", "apply", "propagate-casts", str(path), str(path), *arguments]) == 2
    said = capsys.readouterr().err
    assert "cannot be 'Ngg': expected operator types of ONNX or ONNX Runtime (did you mean 'Neg'?)" in said


FUNCTIONS = """<ir_version: 10, opset_import: ["" : 20, "mine" : 1]>
g (float16[2] x) => (float16[2] y) { a = mine.Twice (x) y = mine.Twice (a) }
<domain: "mine", opset_import: ["" : 20]>
Twice (x) => (y) { a = Cast <to = 1> (x) b = Add (a, a) y = Cast <to = 10> (b) }"""


def test_functions_are_left_alone_or_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.parser.parse_model(FUNCTIONS), path)
    arguments = ["passes", "apply", "propagate-casts", str(path), str(out), "--level", "2"]
    assert main(arguments) == 0
    assert "--inline inlines them first" in capsys.readouterr().out
    assert operators(out) == ["Twice", "Twice"]
    assert main([*arguments, "--inline"]) == 0
    assert "4 casts became 0" in capsys.readouterr().out
    assert operators(out) == ["Add", "Add"]


def test_a_model_may_be_rewritten_in_place(path: Path) -> None:
    for _ in range(2):
        assert main(["passes", "apply", "propagate-casts", str(path), str(path)]) == 0
        assert operators(path) == ["Cast", "Add", "Cast", "Neg", "Exp"]
        np.testing.assert_array_equal(ir.load(path).graph.initializers["w"].const_value.numpy(), np.arange(300))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["missing", "folder", "text", "without data"])
def test_a_model_that_cannot_be_read_is_named(name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = path.with_name(name), path.with_name("out.onnx")
    if name == "folder":
        given.mkdir()
    elif name == "text":
        given.write_text("no model")
    elif name == "without data":
        path.with_name("in.onnx.data").unlink()
        given = path
    assert main(["passes", "apply", "propagate-casts", str(given), str(out)]) == 2
    assert f"error: Cannot read the ONNX model {given}: " in capsys.readouterr().err
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = path.with_name("missing") / "out.onnx"
    assert main(["passes", "apply", "propagate-casts", str(path), str(out)]) == 2
    assert f"error: Cannot write the ONNX model {out}: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--level", "3"], ["--strategy", "flood"], ["--dtype", "double"]])
def test_bad_arguments_end_with_usage(arguments: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["passes", "apply", "propagate-casts", str(path), str(path), *arguments])
    assert "invalid choice" in capsys.readouterr().err


def test_passes_work_without_torch(path: Path) -> None:
    program = (
        "import sys; from ort_dynamo.__main__ import main\n"
        f"assert main(['passes', 'apply', 'propagate-casts', {str(path)!r}, {str(path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
