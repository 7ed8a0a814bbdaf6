"""No text of a model gets into the Python that is written for sessions and outer graphs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildRecord, BuiltGraph
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.generated_code import generate_function
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.outer_code import outer_code
from ort_dynamo.runtime.session_code import _size, session_code
from ort_dynamo.torch_internals.tracing.lazy_code import graph_module

NAMES = [
    "__import__('os').system('touch escaped')",
    '"""\nraise SystemExit\n"""',
    "'); raise SystemExit  #",
    "x0\n    raise SystemExit",
    "\uff4f\uff57\uff4e",
    "own",
    "lambda",
    "*/ #include",
    "</script>",
    "\\",
    "{0}%s",
    "a" * 5000,
]


def built(names: Sequence[str], size: str) -> BuiltGraph:
    """A graph that multiplies x, of two symbolic sizes, by itself."""
    x, square, y, graph, node = names
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 20]> g (float[n, 2] x) => (float[n, 2] y) {'
                              "s = Mul (x, x) y = Identity (s) }")  # fmt: skip
    proto = ir.to_proto(model)
    renamed = {"x": x, "s": square, "y": y}
    for one in proto.graph.node:
        one.input[:] = [renamed[name] for name in one.input]
        one.output[:] = [renamed[name] for name in one.output]
        one.name, one.doc_string = f"{node}{one.op_type}", node
        one.metadata_props.add(key=node, value=node)
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.name = renamed[value.name]
        value.type.tensor_type.shape.dim[0].dim_param = size
    proto.graph.name = proto.graph.doc_string = proto.producer_name = graph
    proto.metadata_props.add(key=graph, value=graph)
    spec = ValueSpec(torch.float32)
    return BuiltGraph(
        name=graph,
        model=proto.SerializeToString(),
        inputs=(spec,),
        outputs=(spec,),
        session=SessionOptions().resolved(),
        dtypes=frozenset(),
        in_order=False,
        keyable=True,
        origins={},
        record=BuildRecord(0, (), {}),
    )


def source(names: Sequence[str], size: str) -> str:
    """The code of a session that fills torch's memory, and with that has sizes in its code."""
    one = built(names, size)
    graph = open_graph(one, find_target("cpu"), torch.device("cpu"))
    x = torch.tensor([[1.0, 2.0]])
    assert graph(x)[0].tolist() == [[1, 4]]
    filled = session_code(one, graph._own, torch.device("cpu"), None, owned=lambda tensor: tensor)
    return inspect.getsource(graph.run) + inspect.getsource(filled)


def test_the_code_of_a_session_is_the_same_by_any_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    expected = source(["x", "s", "y", "g", "n"], "rows")
    assert "empty((x0.shape[0], 2, )" in expected
    for start in range(0, len(NAMES), 3):
        names = [*NAMES, *NAMES][start : start + 5]
        assert source(names, "rows") == expected
    assert not list(tmp_path.iterdir())


SIZES = [
    *("\uff42\uff52\uff45\uff41\uff4b\uff50\uff4f\uff49\uff4e\uff54 ()", "\uff45\uff56\uff41\uff4c (n)", "\uff4e", "é"),
    *("print (1)", "print(1)", "n.real", "n[0]", "0x", "m", "9**9**9**9", "n**9", "2**n", "n**-1", "n/2"),
    *("n if n else 1", "(lambda: 1)()", "[n]", "'n'", "1.5", "True", "((", "", "n\nimport os", "n;n", "n#", "\0"),
    *("n:=1", "-" * 2000 + "n", "(" * 500, "f'{n}'"),
]
"""Words of wide letters are Python's own words in code: the first one would open a debugger."""


@pytest.mark.parametrize("size", SIZES)
def test_a_size_that_is_no_arithmetic_of_known_sizes_is_not_written(size: str) -> None:
    assert re.fullmatch(r"x0\.shape\[0\]|None", str(_size(size, {"n": "x0.shape[0]"})))


def test_arithmetic_of_known_sizes_is_written() -> None:
    class X0:
        shape = (6, 4)

    known = {"n": "x0.shape[0]", "m": "x0.shape[1]"}
    for size in ("n", "2*n + 1", "(n//4)", "n*m", "-n + 7", "n**2 - m**3", "(n - 1)*(m + 2)//3", "12"):
        written = _size(size, known)
        assert written is not None
        assert eval(written, {"x0": X0}) == eval(size, {"n": 6, "m": 4})


@pytest.mark.parametrize("size", ["\uff4f\uff57\uff4e", "None", "a b", "n\n", "__import__('os')"])
def test_a_hostile_size_is_copied(size: str) -> None:
    assert "empty((" not in source(["x", "s", "y", "g", "n"], size)


def outer(build: Any) -> Any:
    graph = Graph()
    graph.output(build(graph))
    return generate_function("outer", *outer_code(graph_module({}, graph), {}))  # FX writes no code of this one


@pytest.mark.parametrize("name", NAMES)
def test_an_outer_graph_with_a_hostile_name_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(x: Tensor, **named: Any) -> Tensor:
        assert named == {name: {name: name}}
        return x + 1

    called.__name__ = name

    class Constant:
        value = 2

    Constant.__name__ = name

    def multiplied(x: Tensor, constant: Any) -> Tensor:
        return x * constant.value

    def build(graph: Graph) -> Any:
        x = graph.placeholder("x")
        x.name = name  # FX itself makes an identifier of it
        found = graph.call_function(called, (x,), {name: {name: name}})
        found._rename(name)
        found = graph.call_function(multiplied, (found, Constant()))
        return {name: graph.call_method("neg", (found,))}

    assert outer(build)([torch.ones(2)])[name].tolist() == [-4, -4]


def test_a_method_of_a_hostile_name_is_only_looked_up() -> None:
    def build(graph: Graph) -> Any:
        return graph.call_method(
            "neg() or __import__('os').system('touch escaped') or x.neg", (graph.placeholder("x"),)
        )

    with pytest.raises(AttributeError, match="has no attribute"):
        outer(build)([torch.ones(2)])
    assert not Path("escaped").exists()


def test_the_names_survive_in_the_model() -> None:
    model = onnx.ModelProto.FromString(built(NAMES[:5], "rows").model)
    assert model.graph.input[0].name == NAMES[0]
