"""Tests of names in saved files: inputs, outputs, nodes, and models that islands share."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy_glue import run_graph
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from ort_dynamo.cache import open_island
from ort_dynamo.graph.model_files import write_model


def saved(function: Callable[..., Any], folder: Path, *args: Any, **kwargs: Any) -> Any:
    """Run `function` compiled, and load the one JSON file that it saves."""
    torch.compile(function, backend="ort_train", options={"save_onnx": folder})(*args, **kwargs)
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


def names(said: Any, what: str = "inputs", graph: int = 0) -> list[str | None]:
    return [one and one["value"] for one in said["graphs"][graph][what]]


def test_names_that_utf8_cannot_hold_are_escaped(tmp_path: Path) -> None:
    weights = nn.ParameterDict({"\ud800": nn.Parameter(torch.ones(3)), "\\ud800": nn.Parameter(torch.ones(3))})
    said = saved(lambda x: (x * weights["\ud800"] + weights["\\ud800"]).sum(), tmp_path, torch.ones(3))
    (file,) = tmp_path.glob("forward-*.onnx")
    model = onnx.load(file)
    onnx.checker.check_model(model)
    found = [value.name for value in model.graph.input]
    assert sum("\\ud800" in name for name in found) == 2
    assert len(set(found)) == 3
    assert set(names(said)) == set(found)


def test_arguments_are_called_by_their_names_and_places(tmp_path: Path) -> None:
    def function(
        x: Tensor, pair: tuple[Tensor, Tensor], *more: Tensor, batch: dict[str, Tensor], **others: Tensor
    ) -> Tensor:
        return x + pair[1] + more[0] + batch["ids"] + others["mask"]

    one = torch.ones(2)
    said = saved(function, tmp_path, one, (one, one * 2), one * 3, batch={"ids": one * 4}, mask=one * 5)
    assert names(said) == ["x", "pair.1", "more.0", "batch.ids", "mask"]
    assert names(said, "outputs") == ["output_0"]
    assert (said["program"], [graph["role"] for graph in said["graphs"]]) == ("function", ["inference"])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def test_buffers_that_are_written_and_gradients_have_names(tmp_path: Path) -> None:
    said = saved(Normed(), tmp_path, torch.randn(4, 3))
    assert said["program"] == "Normed"
    assert set(names(said)) == {"x", *Normed().state_dict()}
    outputs = names(said, "outputs")
    assert {"output_0", "norm.running_mean.updated", "norm.running_var.updated"} <= set(outputs)
    assert {f"{name}.grad" for name, _ in Normed().named_parameters()} <= set(names(said, "outputs", 1))


def test_a_saved_tensor_has_one_name_in_forward_and_backward(tmp_path: Path) -> None:
    said = saved(Normed(), tmp_path, torch.randn(4, 3))
    known = {*names(said), *names(said, "outputs"), "output_0.grad"}
    assert set(names(said, "inputs", 1)) <= known


def test_two_modules_of_one_function_are_told_apart(tmp_path: Path) -> None:
    student, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    said = saved(lambda x: student(x) - teacher(x), tmp_path, torch.ones(1, 2))
    found = [name for name in names(said) if name != "x"]
    assert sorted(name.rpartition(".")[2] for name in found) == ["bias", "bias", "weight", "weight"]
    assert len({name.rpartition(".")[0] for name in found}) == 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.linear(x).relu()).real  # the transform ends the island


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_islands_that_share_a_model_say_so_and_have_their_own_inputs(tmp_path: Path) -> None:
    with torch.no_grad():
        said = saved(Stack(), tmp_path, torch.ones(1, 2))
    _, first, second = (s for s in said["graphs"][0]["steps"] if "island" in s and len(s["inputs"]) == 3)
    assert first["files"] == second["files"]
    assert "shared_with" not in first
    assert second["shared_with"] == f"Stack {said['compile']} inference {first['island']}"
    assert {one["name"] for one in second["inputs"]} == {one["name"] for one in first["inputs"]}
    assert [one["value"] for one in second["inputs"] if one["name"] == "blocks.1.linear.weight"] == [
        "blocks.2.linear.weight"
    ]


def test_another_shape_is_another_file_and_the_same_program_the_same(tmp_path: Path) -> None:
    for size in (2, 3, 2):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend="ort_train", dynamic=False, options={"save_onnx": tmp_path})(torch.ones(size))
    assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.onnx"))) == 2


@pytest.mark.parametrize("elements", [3, 300])
def test_constants_of_the_program_are_in_the_files(tmp_path: Path, elements: int) -> None:
    x = torch.arange(float(elements))
    said = saved(lambda x: x * torch.tensor(list(range(elements)), dtype=torch.float32), tmp_path, x)
    values = run_graph(said["graphs"][0], {"x": x.numpy()}, tmp_path)
    np.testing.assert_array_equal(values["output_0"], (x * x).numpy())


@pytest.mark.parametrize("numbers", [[math.nan, -math.inf, 1.0], [1j, 2.0, 3.0]], ids=["not finite", "complex"])
def test_constants_that_json_cannot_write_are_in_files(tmp_path: Path, numbers: list[complex]) -> None:
    steps = saved(lambda x: x * torch.tensor(numbers), tmp_path, torch.ones(3))["graphs"][0]["steps"]
    (constant,) = (step for step in steps if "constant" in step)
    np.testing.assert_array_equal(np.fromfile(tmp_path / constant["file"], constant["dtype"]), numbers)


def test_a_constant_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "constants").touch()
    with pytest.raises(BackendCompilerFailed, match="option 'save_onnx' cannot be"):
        saved(lambda x: x * torch.tensor([math.nan, 1.0]), tmp_path, torch.ones(2))


def test_a_debugged_model_has_no_optimized_file(tmp_path: Path) -> None:
    options = {"save_onnx": tmp_path, "graph_optimization": "disable"}
    torch.compile(torch.sin, backend="ort_train", options=options)(torch.ones(2))
    (file,) = tmp_path.glob("*.json")
    (step,) = (step for step in json.loads(file.read_text())["graphs"][0]["steps"] if "island" in step)
    assert set(step["files"]) == {"lowered", "rewritten"}


def test_a_node_made_by_a_pass_has_the_module_of_the_node_that_it_replaces(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = Rows()

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x.half()).float()

    saved(Outer(), tmp_path, torch.ones(64, 8))
    for file in tmp_path.rglob("*.onnx"):
        for node in onnx.load(file).graph.node:
            assert node.name.startswith(("rows/", "Outer/")), (file.parent.name, node.name)


def test_saving_models_changes_no_result(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    model = nn.Linear(3, 3)
    plain = torch.compile(model, backend="ort_train")(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="ort_train", options={"save_onnx": tmp_path})(x), plain)


@pytest.mark.skipif(os.name != "posix", reason="umask")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        saved(torch.sin, tmp_path, torch.ones(2))
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}


def test_tensors_that_one_file_cannot_hold_are_beside_it(tmp_path: Path) -> None:
    weight = ir.Value(name="weight", const_value=ir.tensor(np.arange(2048, dtype=np.float32), name="weight"))
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2048]))
    node = ir.node("Add", [x, weight])
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 18}, name="graph")
    write_model(ir.Model(graph, ir_version=10), tmp_path / "one.onnx", most=1024)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.onnx", "one.onnx.data"]
    assert (tmp_path / "one.onnx").stat().st_size < 1024
    (loaded,) = onnx.load(tmp_path / "one.onnx").graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(loaded), np.arange(2048, dtype=np.float32))


def test_islands_of_one_name_have_the_names_of_their_own_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            between = torch.linalg.qr(self.first(x))[0]  # torch runs it, so there are two islands
            return self.second(between)

    monkeypatch.setattr(open_island, "graph_key", lambda *_, **__: None)
    with torch.no_grad():
        saved(Net(), tmp_path, torch.randn(3, 3))
    (model,) = (onnx.load(path) for path in tmp_path.glob("*.onnx"))  # of the island that was saved last
    assert all("second" in node.name for node in model.graph.node), [node.name for node in model.graph.node]
    assert {"second.weight", "second.bias"} <= {value.name for value in model.graph.input}


def test_modules_of_any_name_are_saved_inside_the_folder(tmp_path: Path) -> None:
    parts = ["a'b", 'c"d', "e\\f", "g\nh", "i]j", "../../escaped", "/escaped", "\u2028", "class", "\uff57", "</script>"]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for part in parts:
                if "." not in part:
                    self.register_parameter(part, nn.Parameter(torch.rand(3)))
                    self.add_module(f"{part} module", nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            for parameter in self._parameters.values():
                x = x * parameter
            for module in self.children():
                x = module(x)
            return x.sum()

    Net.__name__ = "../../" + "escaped" * 60
    folder, model, x = tmp_path / "a" / "b", Net(), torch.rand(3)
    assert_close = torch.testing.assert_close
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    compiled = torch.compile(model, backend="ort_train", options={"save_onnx": folder})
    for mine, theirs in zip(torch.autograd.grad(compiled(x), list(model.parameters())), expected, strict=True):
        assert_close(mine, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    (file,) = folder.glob("*.json")
    assert {*names(json.loads(file.read_text()))} >= {*dict(model.named_parameters())}
