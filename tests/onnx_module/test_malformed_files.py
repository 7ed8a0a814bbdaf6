"""A file that is wrong, or meant to harm, is one clear error when the module is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from small_graphs import BOOL, FLOAT, INT64, graph_of, model_of, perceptron, value

from ort_dynamo.errors import OnnxModelError, OrtDynamoError
from ort_dynamo.onnx_module import OnnxModule

make = helper.make_node


def edited(edit: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = perceptron()
    edit(model)
    return model


def cyclic(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def twice(model: onnx.ModelProto) -> None:
    model.graph.node[2].output[0] = "hidden"


def same_initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def of_strings(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


def of_sequences(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_sequence_value_info("more", FLOAT, None))


def huge(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]


def negative(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [-5, -4]


def short(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-1]


def few(model: onnx.ModelProto) -> None:
    del model.graph.initializer[1].float_data[0]


def sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add()


def integers_in_gemm(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = INT64


def text_for_a_number(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("transB", "yes"))


def unknown_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("surprise", 1))


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Surprise"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (cyclic, "it is not valid|nodes in a graph must be topologically sorted|is not an input, an initializer"),
        (twice, "it is not valid"),
        (same_initializer, "occurs twice|it is not valid"),
        (of_strings, "the element type STRING|it is not valid"),
        (of_sequences, "is not a tensor"),
        (huge, "bytes of data; its dimensions|it is not valid"),
        (negative, "negative dimensions|it is not valid"),
        (short, "bytes of data; its dimensions|it is not valid"),
        (few, "4 elements in float_data|it is not valid"),
        (sparse, "sparse initializers are not supported"),
        (integers_in_gemm, "it is not valid"),
        (text_for_a_number, "it is not valid"),
        (unknown_attribute, "it is not valid"),
        (unknown_operator, "it is not valid"),
        (lambda model: model.graph.ClearField("output"), "it has no outputs"),
        (lambda model: model.graph.output[0].ClearField("name"), "it is not valid"),
        (lambda model: model.ClearField("graph"), "it has no outputs"),
        (lambda model: model.ClearField("opset_import"), "it is not valid"),
        (lambda model: model.opset_import.add(domain="ai.onnx", version=12), "in two versions|it is not valid"),
        (lambda model: model.graph.node[0].input.__setitem__(0, "nothing"), "it is not valid"),
        (lambda model: model.graph.node[0].input.extend(["x", "x"]), "it is not valid"),
    ],
)
def test_a_file_that_is_wrong_is_refused(edit: Callable[[onnx.ModelProto], object], words: str) -> None:
    with pytest.raises(OnnxModelError, match=words) as found:
        OnnxModule(edited(edit))
    assert isinstance(found.value, OrtDynamoError)
    assert isinstance(found.value, ValueError)


@pytest.mark.parametrize("opset", [1, 6, 24, 99, -1])
def test_an_opset_out_of_range_is_refused(opset: int) -> None:
    model = perceptron()
    model.opset_import[0].version = opset
    with pytest.raises(OnnxModelError, match=f"is of opset {opset}; supported are 7 to 23"):
        OnnxModule(model)


def test_bytes_instead_of_a_model_raise_type_error() -> None:
    with pytest.raises(TypeError, match=r"expected an onnx\.ModelProto, not bytes"):
        OnnxModule(perceptron().SerializeToString())  # type: ignore[arg-type]


def test_an_unsupported_operator_is_named_with_its_domain_and_opset() -> None:
    nodes = [make("Relu", ["x"], ["h"]), make("Fancy", ["h"], ["y"], name="it", domain="com.microsoft")]
    with pytest.raises(OnnxModelError, match=r"node 'it', com\.microsoft::Fancy of opset 1: the") as found:
        OnnxModule(model_of(graph_of(nodes, [value("x")], [value("y")])))
    assert found.value.facts["op_type"] == "Fancy"
    assert found.value.facts["domain"] == "com.microsoft"
    assert found.value.facts["opset"] == 1


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "words"),
    [
        ("FusedMatMul", ["x", "x"], {"transA": "yes"}, "'transA' has the type STRING; expected INT"),
        ("FusedMatMul", ["x", "x"], {"surprise": 1}, "the attribute 'surprise' is not supported"),
        ("FusedMatMul", ["x"], {}, "it has 1 inputs; it needs at least 2"),
        ("FusedMatMul", ["x", ""], {}, "it has 1 inputs; it needs at least 2|it has 2 inputs; it needs at least 2"),
        ("Gelu", ["x", "x"], {}, "it has 2 inputs; there are at most 1"),
    ],
)
def test_a_node_that_no_schema_checks_is_checked_here(
    name: str, inputs: list[str], attributes: dict[str, Any], words: str
) -> None:
    node = make(name, inputs, ["y"], domain="com.microsoft", **attributes)
    with pytest.raises(OnnxModelError, match=words):
        OnnxModule(model_of(graph_of([node], [value("x")], [value("y")])))


def test_a_node_has_no_more_outputs_than_there_are() -> None:
    node = make("Gelu", ["x"], ["y", "z"], domain="com.microsoft")
    with pytest.raises(OnnxModelError, match="it has 2 outputs; there are 1"):
        OnnxModule(model_of(graph_of([node], [value("x")], [value("y")])))


def nested(depth: int) -> onnx.GraphProto:
    graph = graph_of([make("Identity", ["x"], ["y0"])], [], [value("y0", None)])
    for level in range(depth):
        node = make("If", ["c"], [f"y{level + 1}"], then_branch=graph, else_branch=graph_of(
            [make("Identity", ["x"], [f"e{level}"])], [], [value(f"e{level}", None)]))  # fmt: skip
        graph = graph_of([node], [], [value(f"y{level + 1}", None)])
    graph.input.extend([value("x"), value("c", (), BOOL)])
    return graph


def test_graphs_may_be_nested_but_not_without_end() -> None:
    OnnxModule(model_of(nested(8)))
    with pytest.raises(OnnxModelError, match="nested deeper than 20"):
        OnnxModule(model_of(nested(25)))


def functions(calls: list[list[str]]) -> onnx.ModelProto:
    """A model that calls function f0; each calls those that are listed."""
    made = []
    for index, names in enumerate(calls):
        nodes = [make(name, ["a"], [f"v{at}"], domain="own") for at, name in enumerate(names)]
        nodes.append(make("Identity", ["a"], ["b"]))
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        made.append(helper.make_function("own", f"f{index}", ["a"], ["b"], nodes, imports))
    graph = graph_of([make("f0", ["x"], ["y"], domain="own")], [value("x")], [value("y")])
    return model_of(graph, functions=made, imports=[helper.make_opsetid("own", 1)])


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([["f0"]], "the function 'f0' calls itself"),
        ([["f1"], ["f2"], ["f0"]], "calls itself"),
        ([[f"f{index + 1}"] * 10 for index in range(9)] + [[]], "more than 200000 nodes"),
        ([[f"f{index + 1}"] for index in range(50)] + [[]], "call one another deeper than 20"),
    ],
)
def test_functions_that_call_without_end_are_refused(calls: list[list[str]], words: str) -> None:
    with pytest.raises(OnnxModelError, match=words):
        OnnxModule(functions(calls))


def test_calls_in_graphs_within_calls_count_as_one_depth() -> None:
    model = functions([[], [], []])
    for index, function in enumerate(model.functions):
        call = make("Neg", ["a"], ["r"]) if index == 2 else make(f"f{index + 1}", ["a"], ["r"], domain="own")
        called = graph_of([call], [], [value("r", None)])
        for _ in range(7):
            called = graph_of([make("If", ["c"], ["r"], then_branch=called)], [], [value("r", None)])
        del function.node[:]
        function.input[:], function.output[:] = ["a", "c"], ["r"]
        function.node.append(called.node[0])
    with pytest.raises(OnnxModelError, match="deeper than 20"):
        OnnxModule(model)


def test_a_function_that_is_defined_twice_is_refused() -> None:
    model = functions([[]])
    model.functions.append(model.functions[0])
    with pytest.raises(OnnxModelError, match="defined twice"):
        OnnxModule(model)


@pytest.mark.parametrize(
    ("node", "data"),
    [
        (make("ConstantOfShape", ["big"], ["y"]), {"big": np.array([1 << 20, 1 << 20])}),
        (make("Expand", ["x", "big"], ["y"]), {"big": np.array([1 << 20, 1 << 20, 1])}),
        (make("Tile", ["x", "big"], ["y"]), {"big": np.array([1 << 20, 1 << 20])}),
        (make("Pad", ["x", "big"], ["y"]), {"big": np.array([0, 0, 1 << 40, 0])}),
        (make("Range", ["a", "b", "c"], ["y"]), {"a": np.int64(0), "b": np.int64(1 << 40), "c": np.int64(1)}),
        (make("Resize", ["x", "", "big"], ["y"]), {"big": [1e9, 1e9]}),
    ],
)  # fmt: skip
def test_a_few_bytes_cannot_ask_for_terabytes(node: onnx.NodeProto, data: dict[str, Any]) -> None:
    with pytest.raises(OnnxModelError, match=r"asks for .* elements|it is not valid"):
        OnnxModule(model_of(graph_of([node], [value("x")], [value("y", None)], data)))


def test_a_large_constant_takes_no_memory_before_the_model_runs() -> None:
    nodes = [make("ConstantOfShape", ["big"], ["c"]), make("Add", ["c", "c"], ["d"]), make("ReduceSum", ["d"], ["y"])]
    module = OnnxModule(model_of(graph_of(nodes, [value("x")], [value("y", None)], {"big": np.array([1 << 30, 2])})))
    assert sum(one.numel() for one in module.buffers()) < 10


@pytest.mark.parametrize("size", [1000, 3000])
def test_a_constant_is_the_same_of_any_size(size: int) -> None:
    nodes = [make("ConstantOfShape", ["size"], ["c"]), make("Add", ["c", "one"], ["y"])]
    data = {"size": np.array([size]), "one": np.float32(1)}
    (found,) = OnnxModule(model_of(graph_of(nodes, [value("x")], [value("y", None)], data)))(torch.ones(2, 4))
    assert torch.equal(found, torch.ones(size))


def test_shapes_cannot_double_without_end() -> None:
    nodes = [make("Shape", ["x"], ["s0"])]
    nodes += [make("Concat", [f"s{at}", f"s{at}"], [f"s{at + 1}"], axis=0) for at in range(14)]
    nodes += [make("Mul", [f"s{at}", f"s{at}"], [f"s{at + 1}"]) for at in range(14, 40)]
    model = model_of(graph_of(nodes, [value("x", (2, 4))], [value("s40", None, INT64)]))
    (found,) = OnnxModule(model)(torch.ones(2, 4))
    assert found.shape == (2 << 14,)


def test_a_loop_without_end_is_refused() -> None:
    body = graph_of(
        [make("Identity", ["go"], ["goes"]), make("Identity", ["s"], ["t"])],
        [value("i", (), INT64), value("go", (), BOOL), value("s")],
        [value("goes", (), BOOL), value("t")],
    )
    for inputs in (["", "", "x"], ["", "true", "x"], ["many", "", "x"]):
        data = {"true": np.array(True), "many": np.int64(1 << 62)}
        model = model_of(graph_of([make("Loop", inputs, ["y"], body=body)], [value("x")], [value("y")], data))
        with pytest.raises(OnnxModelError, match=r"it never ends|iterations; at most"):
            OnnxModule(model)


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../secret", "data/../../secret", "", "missing", "link", "loop", ".", "bad\0name", "a" * 5000],
)
def test_no_file_outside_of_the_folder_is_read(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"\0" * 80)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to("loop")
    model = perceptron()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(OnnxModelError, match=r"not the name of a file|not a file in|cannot be read|is not valid"):
        OnnxModule(model, base_dir=folder)


@pytest.mark.parametrize(
    ("key", "text"), [("offset", "-1"), ("offset", "99"), ("offset", "x"), ("length", "79"), ("length", "9" * 30)]
)
def test_a_file_is_read_within_its_length(key: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\0" * 80)
    model = perceptron()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="data")
    OnnxModule(model, base_dir=tmp_path)
    tensor.external_data.add(key=key, value=text)
    with pytest.raises(OnnxModelError, match=r"is shorter|has the (offset|length)|bytes in 'data'|is not valid"):
        OnnxModule(model, base_dir=tmp_path)
