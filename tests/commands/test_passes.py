"""python -m ort_dynamo passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

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


@pytest.mark.parametrize("name", ["missing", "folder", "text", "empty", "without data"])
def test_a_model_that_cannot_be_read_is_named(name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = path.with_name(name), path.with_name("out.onnx")
    if name == "folder":
        given.mkdir()
    elif name == "text":
        given.write_text("no model")
    elif name == "empty":
        given.touch()
    elif name == "without data":
        path.with_name("in.onnx.data").unlink()
        given = path
    assert main(["passes", "apply", "propagate-casts", str(given), str(out)]) == 2
    assert f"error: Cannot read the ONNX model {given}: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("place", ["missing/out.onnx", "in.onnx/out.onnx", "."])
def test_a_place_that_cannot_be_written_is_named(place: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = path.parent / place
    assert main(["passes", "apply", "propagate-casts", str(path), str(out)]) == 2
    assert f"error: Cannot write the ONNX model {out}: " in capsys.readouterr().err


@pytest.mark.parametrize("place", ["out.onnx", "a/../out.onnx", "out.onnx.data"])
def test_the_data_of_the_model_that_is_read_is_not_written_over(
    place: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.with_name("a").mkdir()
    ir.save(ir.load(path), path, external_data="out.onnx.data")
    before = {one.name: one.read_bytes() for one in path.parent.iterdir() if one.is_file()}
    assert main(["passes", "apply", "propagate-casts", str(path), str(path.parent / place)]) == 2
    assert "out.onnx.data; give the result another name" in capsys.readouterr().err
    assert {one.name: one.read_bytes() for one in path.parent.iterdir() if one.is_file()} == before


def external(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[8], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def in_an_initializer(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.initializer.append(tensor)


def in_a_constant(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=tensor))


def in_a_function(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    nodes = [onnx.helper.make_node("Constant", [], ["b"], value=tensor)]
    imports = [onnx.helper.make_opsetid("", 20)]
    model.functions.append(onnx.helper.make_function("mine", "W", [], ["b"], nodes, imports))
    model.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    model.graph.node.insert(0, onnx.helper.make_node("W", [], ["w"], domain="mine"))


PLACES = [in_an_initializer, in_a_constant, in_a_function]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    """A model that reads w, to be written to the working directory, beside whose folder is a secret."""
    (tmp_path / "secret").write_bytes(b"SECRETS " * 4)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "secret")
    monkeypatch.chdir(tmp_path / "inside")
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[8] x) => (float[8] y) { y = Add (x, w) }'
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../secret", "{folder}/secret", "link", "a/../../secret", "bad\0name", "", "."])
def test_no_file_outside_of_the_models_folder_is_read(
    location: str, place: Any, model: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place(model, external(location.format(folder=tmp_path)))
    Path("in.onnx").write_bytes(model.SerializeToString())
    for given in ("in.onnx", str(Path("in.onnx").absolute())):
        assert main(["passes", "apply", "fold-casts", given, "out.onnx", "--inline"]) == 2
        assert "error: Cannot read the ONNX model" in capsys.readouterr().err
    assert {one.name for one in Path().iterdir()} == {"in.onnx", "link"}


@pytest.mark.parametrize("place", PLACES)
def test_data_in_the_models_folder_goes_along_from_wherever_it_is_named(place: Any, model: onnx.ModelProto) -> None:
    Path("data").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    place(model, external("data"))
    Path("in.onnx").write_bytes(model.SerializeToString())
    assert main(["passes", "apply", "fold-casts", "in.onnx", "out.onnx", "--inline"]) == 0
    Path("data").unlink()
    written = onnx.load("out.onnx")
    (y,) = ReferenceEvaluator(written).run(None, {"x": np.zeros(8, np.float32)})
    np.testing.assert_array_equal(y, np.arange(8))


def calls(names: list[list[str]]) -> onnx.ModelProto:
    """A model that calls f0; each function calls those that are listed."""
    imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("mine", 1)]
    make = onnx.helper.make_node
    functions = [
        onnx.helper.make_function(
            "mine",
            f"f{index}",
            ["a"],
            ["b"],
            [
                *(make(one, ["a"], [f"v{at}"], domain="mine") for at, one in enumerate(called)),
                make("Neg", ["a"], ["b"]),
            ],
            imports,
        )
        for index, called in enumerate(names)
    ]
    ends = [[onnx.helper.make_tensor_value_info(name, 1, [2])] for name in "xy"]
    graph = onnx.helper.make_graph([make("f0", ["x"], ["y"], domain="mine")], "g", *ends)
    return onnx.helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)


def nested(depth: int) -> onnx.ModelProto:
    graph = calls([]).graph
    for _ in range(depth):
        node = onnx.helper.make_node("If", ["x"], ["y"], then_branch=graph)
        graph = onnx.helper.make_graph([node], "g", graph.input, graph.output)
    return onnx.helper.make_model(graph)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: calls([["f0"]]), "calls itself"),
        (lambda: calls([[f"f{index + 1}"] * 10 for index in range(9)] + [[]]), "more than 200000 nodes"),
        (lambda: calls([[f"f{index + 1}"] for index in range(50)] + [[]]), "deeper than 20"),
        (lambda: nested(25), "deeper than 20"),
        (lambda: calls([[], []]), ""),
    ],
)
def test_a_few_bytes_do_not_become_millions_of_nodes(
    made: Any, words: str, model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.onnx").write_bytes(made().SerializeToString())
    assert main(["passes", "apply", "remove-unread-nodes", "in.onnx", "out.onnx", "--inline"]) == (2 if words else 0)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", PASSES)
def test_a_cycle_is_refused(name: str, model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [onnx.helper.make_node("Cast", ["w"], ["w"], to=1), onnx.helper.make_node("Shape", ["w"], ["shape"])]
    model.graph.node.extend(nodes)
    Path("in.onnx").write_bytes(model.SerializeToString())
    assert main(["passes", "apply", name, "in.onnx", "out.onnx"]) == 2
    assert "Cannot read the ONNX model in.onnx: " in capsys.readouterr().err


def test_a_reference_to_an_attribute_of_no_function_is_refused(
    model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]
) -> None:
    node = onnx.helper.make_node("Cast", ["x"], ["w"])
    node.attribute.add(name="to", type=onnx.AttributeProto.INT, ref_attr_name="to")
    model.graph.node.insert(0, node)
    Path("in.onnx").write_bytes(model.SerializeToString())
    assert main(["passes", "apply", "propagate-casts", "in.onnx", "out.onnx"]) == 2
    assert "the attribute 'to' of node '' refers to a function's" in capsys.readouterr().err


def test_a_call_with_too_many_inputs_is_an_error_about_the_model(
    model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]
) -> None:
    made = calls([[]])
    made.graph.node[0].input.append("x")
    Path("in.onnx").write_bytes(made.SerializeToString())
    assert main(["passes", "apply", "fold-casts", "in.onnx", "out.onnx", "--inline"]) == 2
    assert "Cannot read the ONNX model in.onnx: Input mismatch" in capsys.readouterr().err


def test_a_model_that_cannot_be_written_leaves_nothing(
    model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]
) -> None:
    in_an_initializer(model, onnx.numpy_helper.from_array(np.zeros(8, np.float32), "w"))
    model.graph.node[0].device_configurations.add()  # without an id
    model.ir_version = 11
    Path("in.onnx").write_bytes(model.SerializeToString())
    assert main(["passes", "apply", "fold-casts", "in.onnx", "out.onnx"]) == 2
    assert "Cannot write the ONNX model out.onnx: Cannot serialize" in capsys.readouterr().err
    assert {one.name for one in Path().iterdir()} == {"in.onnx", "link"}


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
