"""Section 1.7 of ORTModule's reference: JSON configuration, gradient graphs and the hierarchical module."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import Dense, Normed, assert_steps_like_eager
from torch import Tensor, nn

from ort_dynamo import ORTModule, PropagateCastOpsStrategy
from ort_dynamo.errors import GradientGraphError, InvalidOptionError
from ort_dynamo.options.plan_grammar import read_plans
from ort_dynamo.training.experimental import export_gradient_graph
from ort_dynamo.training.ortmodule import LogLevel
from ort_dynamo.training.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from ort_dynamo.training.ortmodule.experimental.json_config import load_from_json

# -- JSON ----------------------------------------------------------------------------------------------------------

CONFIG = {
    "PropagateCastOps": {"Strategy": "INSERT_AND_REDUCE", "Level": 5, "Allow": ["Relu", "Softmax"]},
    "UseExternalGPUAllocator": False,
    "EnableCustomAutogradFunction": True,
    "EnableGradAccOptimization": True,
    "UseStaticShape": True,
    "RunSymbolicShapeInference": False,
    "SkipCheck": ["SKIP_CHECK_DEVICE", "SKIP_CHECK_EXECUTION_AGENT"],
    "DebugOptions": {"LogLevel": "VERBOSE", "SaveONNX": True, "ONNXPrefix": "my_model"},
    "UseMemoryEfficientGradient": False,
    "FallbackPolicy": ["FALLBACK_DISABLE"],
    "OnnxOpsetVersion": 19,
}


def test_a_json_file_configures_an_ortmodule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    config = {**CONFIG, "DebugOptions": {**CONFIG["DebugOptions"], "SaveONNXPath": str(tmp_path)}}  # type: ignore[dict-item]
    path.write_text(json.dumps(config))
    ort_model = ORTModule(Dense())
    x = torch.randn(3, 8)
    expected = ort_model(x)
    load_from_json(ort_model, str(path))
    for training in (True, False):
        manager = ort_model._torch_module._execution_manager(training)
        settings = manager._runtime_options
        assert settings.propagate_cast_ops_strategy is PropagateCastOpsStrategy.INSERT_AND_REDUCE
        assert settings.propagate_cast_ops_level == 5
        assert settings.propagate_cast_ops_allow == ("Relu", "Softmax")
        assert settings.skip_check.value == 10
        assert settings.onnx_opset_version == 19
        assert manager._fallback_manager.policy.value == 1
        assert manager._debug_options.logging.log_level is LogLevel.VERBOSE
        assert manager._debug_options.save_onnx_models.name_prefix == "my_model"
    torch.testing.assert_close(ort_model(x), expected)
    assert (tmp_path / "my_model_optimized_training.onnx").exists()
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"FallbackPolicy": ["FALLBACK_UNSUPPORTED_DATA"]}))
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(other))
    load_from_json(ort_model, str(path))
    assert ort_model._torch_module.settings.fallback_policy.value == 16


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"FalbackPolicy": []}, KeyError, "did you mean 'FallbackPolicy'?"),
        ({"PropagateCastOps": {"Levels": 1}}, KeyError, "none of Strategy, Level, Allow"),
        ({"PropagateCastOps": {"Strategy": "FLOOD"}}, KeyError, "FLOOD_FILL"),
        ({"UseStaticShape": 1}, ValueError, "UseStaticShape must be a boolean"),
        ({"OnnxOpsetVersion": "14"}, ValueError, "OnnxOpsetVersion must be an int"),
        ({"FallbackPolicy": ["FALLBACK_NEVER"]}, KeyError, "'FALLBACK_NEVER' is none of FALLBACK_DISABLE"),
        ({"SkipCheck": ["SKIP_CHECK_DEVCE"]}, KeyError, "did you mean 'SKIP_CHECK_DEVICE'?"),
        ({"DebugOptions": {"LogLevel": "LOUD"}}, KeyError, "VERBOSE"),
        ({}, ValueError, "No data found in provided json file"),
        ({"FallbackPolicy": []}, ValueError, "FallbackPolicy must have a name"),
        ({"FallbackPolicy": [["FALLBACK_DISABLE"]]}, ValueError, "FallbackPolicy[0] must be a text"),
        ({"SkipCheck": [{}]}, ValueError, "SkipCheck[0] must be a text"),
        ({"PropagateCastOps": {"Strategy": []}}, KeyError, "FLOOD_FILL"),
        ({"PropagateCastOps": {"Allow": [1]}}, ValueError, "PropagateCastOps.Allow[0] must be a text"),
        ({"DebugOptions": {"LogLevel": {}}}, KeyError, "VERBOSE"),
        ({"DebugOptions": {"SaveONNX": 1}}, ValueError, "DebugOptions.SaveONNX must be a boolean"),
        ({"DebugOptions": {"SaveONNX": True, "ONNXPrefix": 5}}, ValueError, "DebugOptions.ONNXPrefix must be a text"),
        ({"DebugOptions": {"SaveONNXPath": 5}}, ValueError, "DebugOptions.SaveONNXPath must be a text"),
        ({"DebugOptions": {"SaveONNX": True, "ONNXPrefix": "../a"}}, ValueError, "onnx_prefix begins the names of"),
        ({"DebugOptions": {"SaveONNX": True, "ONNXPrefix": "/etc/a"}}, ValueError, "onnx_prefix begins the names of"),
    ],
)
def test_a_bad_json_file_is_an_error(content: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(error) as raised:
        load_from_json(ORTModule(Dense()), str(path))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"OnnxOpsetVersion": ' + b"1" * 5000 + b"}", "integer string conversion"),
        (b" " * (1 << 20) + b"{}", "it is larger than 1048576 bytes"),
        (b'{"\xff": 1}', "utf-8"),
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
    ],
)
def test_a_json_file_is_limited_in_size_and_depth(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_from_json(ORTModule(Dense()), str(path))
    with pytest.raises(InvalidOptionError, match=message):
        read_plans(str(path))


def test_json_without_a_path_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^Path to json is not provided.Provide the path through function call or"):
        load_from_json(ORTModule(Dense()))


# -- the gradient graph --------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen_layer = nn.Linear(10, 20, bias=False).requires_grad_(False)
        self.fc1 = nn.Linear(20, 5)
        self.norm = nn.BatchNorm1d(5)
        self.unread = nn.Linear(2, 2)
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(self.frozen_layer(x)))))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_gradient_graph_runs_in_a_plain_session(rows: int, train: bool, tmp_path: Path) -> None:
    model = Frozen().train(train)
    loss = nn.CrossEntropyLoss()
    path = tmp_path / "gradients.onnx"
    before = copy.deepcopy(model.state_dict())
    export_gradient_graph(model, loss, torch.randn(rows, 10, requires_grad=True), torch.ones(rows).long(), path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    exported = onnx.load(path)
    onnx.checker.check_model(exported, full_check=True)
    parameters = dict(model.named_parameters())
    assert [value.name for value in exported.graph.input] == ["input", "labels", *parameters]
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    outputs = [value.name for value in exported.graph.output]
    assert outputs[:2] == ["output", "loss"]
    assert sorted(outputs[2:]) == sorted(f"{name}_grad" for name in trained)
    assert exported.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch_size"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for count in (3, 5):
        x, y = torch.randn(count, 10), torch.randint(2, (count,))
        feeds = {"input": x.numpy(), "labels": y.numpy(), **{n: p.detach().numpy() for n, p in parameters.items()}}
        found = dict(zip(outputs, session.run(None, feeds), strict=True))
        model.zero_grad()
        out = model(x)
        value = loss(out, y)
        value.backward()
        np.testing.assert_allclose(found["output"], out.detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["loss"], value.item(), rtol=1e-4, atol=1e-5)
        for name in trained:
            gradient = parameters[name].grad
            expected = torch.zeros_like(parameters[name]) if gradient is None else gradient
            np.testing.assert_allclose(found[f"{name}_grad"], expected.numpy(), rtol=1e-4, atol=1e-5)
        model.load_state_dict(before)


def test_a_gradient_graph_takes_a_transposed_weight_as_torch_has_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 3])
    export_gradient_graph(model, nn.CrossEntropyLoss(), x, y, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    feeds = {"input": x.numpy(), "labels": y.numpy(), "weight": model.weight.detach().numpy()}
    output, loss, gradient = session.run(["output", "loss", "weight_grad"], feeds)
    expected = nn.functional.cross_entropy(model(x), y)
    expected.backward()
    np.testing.assert_allclose(output, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-4)
    assert model.weight.grad is not None
    np.testing.assert_allclose(gradient, model.weight.grad.numpy(), rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """Reads a weight under the second of its names first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
        self.embedding = nn.Embedding(7, 4)
        self.embedding.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


def test_a_gradient_graph_has_a_tied_weight_once_by_its_first_name(tmp_path: Path) -> None:
    model = Tied()
    x, y = torch.tensor([0, 3, 6]), torch.tensor([1, 1, 5])
    export_gradient_graph(model, nn.CrossEntropyLoss(), x, y, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input", "labels", "head.weight"]
    assert [value.name for value in session.get_outputs()] == ["output", "loss", "head.weight_grad"]
    feeds = {"input": x.numpy(), "labels": y.numpy(), "head.weight": model.head.weight.detach().numpy()}
    (gradient,) = session.run(["head.weight_grad"], feeds)
    nn.functional.cross_entropy(model(x), y).backward()
    assert model.head.weight.grad is not None
    np.testing.assert_allclose(gradient, model.head.weight.grad.numpy(), rtol=1e-4, atol=1e-5)


def of_one_hot(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, nn.functional.one_hot(labels, 3).float())


@pytest.mark.parametrize("opset", [12, 17, 20])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), of_one_hot])
def test_a_gradient_graph_has_no_assertions_and_reaches_old_opsets(
    opset: int, loss: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    model, path = nn.Linear(4, 3), tmp_path / "a.onnx"
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    export_gradient_graph(model, loss, x, y, path, opset_version=opset)
    assert [one.version for one in onnx.load(path).opset_import if not one.domain] == [opset]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    weights = {name: one.detach().numpy() for name, one in model.named_parameters()}
    (gradient,) = session.run(["weight_grad"], {"input": x.numpy(), "labels": y.numpy(), **weights})
    loss(model(x), y).backward()
    assert model.weight.grad is not None
    np.testing.assert_allclose(gradient, model.weight.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Sequential(nn.Linear(4, 2), nn.Dropout()), {}, "it generates random numbers"),
        (nn.Linear(4, 2).requires_grad_(False), {}, "no parameter requires a gradient"),
        (nn.Linear(4, 2), {"opset_version": 3}, "onnx cannot convert it to opset 3"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused(
    model: nn.Module, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(GradientGraphError, match=message):
        export_gradient_graph(
            model, nn.CrossEntropyLoss(), torch.randn(3, 4), torch.ones(3).long(), tmp_path / "a.onnx", **arguments
        )
    assert not (tmp_path / "a.onnx").exists()


# -- the hierarchical module ---------------------------------------------------------------------------------------


def test_a_hierarchical_ortmodule_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    model = Normed()
    ort_model = HierarchicalORTModule(copy.deepcopy(model))
    assert_steps_like_eager(ort_model, model, torch.randn(3, 8))
