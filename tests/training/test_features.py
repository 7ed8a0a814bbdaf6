"""Tests of section 1.7 of ORTModule's reference: registrations and reports."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import Dense, Normed, assert_steps_like_eager, compiles, pair
from torch import Tensor, nn

from ort_dynamo import ORTModule, PropagateCastOpsStrategy
from ort_dynamo.errors import GradientGraphError, InvalidOptionError
from ort_dynamo.options.plan_grammar import read_plans
from ort_dynamo.report.record import RECORDS
from ort_dynamo.training.experimental import export_gradient_graph
from ort_dynamo.training.ortmodule import LogLevel, ORTModuleONNXModelException, register_graph_optimizer
from ort_dynamo.training.ortmodule._custom_gradient_registry import register_gradient
from ort_dynamo.training.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from ort_dynamo.training.ortmodule.experimental.json_config import load_from_json
from ort_dynamo.training.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from ort_dynamo.training.utils.hooks import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    SubscriberBase,
    SubscriberManager,
    inspect_activation,
)
from ort_dynamo.training.utils.hooks.merge_activation_summary import main as merge

# -- graph optimizers ----------------------------------------------------------------------------------------------


def relu_to_tanh(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Relu":
            node.op_type = "Tanh"


def test_a_graph_optimizer_changes_the_model_of_its_modules_and_is_keyed() -> None:
    x = torch.randn(3, 8)
    model = Dense()
    plain, changed = model.fc2(torch.relu(model.fc1(x))), model.fc2(torch.tanh(model.fc1(x)))
    with torch.no_grad():
        torch.testing.assert_close(ORTModule(copy.deepcopy(model)).eval()(x), plain)
        register_graph_optimizer(target_modules="Other|Dense", devices="cpu|cuda")(relu_to_tanh)
        torch.testing.assert_close(ORTModule(copy.deepcopy(model)).eval()(x), changed)
        other = nn.Sequential(model)
        torch.testing.assert_close(ORTModule(other).eval()(x), plain)


def test_graph_optimizers_run_by_priority_and_device() -> None:
    seen: list[str] = []
    register_graph_optimizer(priority=1)(lambda graph: seen.append("one"))
    register_graph_optimizer(priority=5)(lambda graph: seen.append("five"))
    register_graph_optimizer(devices="cuda")(lambda graph: seen.append("cuda"))
    ORTModule(Dense())(torch.randn(3, 8))
    assert seen == ["five", "one"] * 2  # forward and backward


def test_a_graph_optimizer_sees_the_forward_and_the_backward() -> None:
    graphs: list[int] = []

    @register_graph_optimizer()
    def count(graph: onnx.GraphProto) -> None:
        graphs.append(len(graph.node))

    ORTModule(Dense())(torch.randn(3, 8))
    assert len(graphs) == 2
    assert all(graphs)


# -- custom gradients ----------------------------------------------------------------------------------------------


class OfCos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x) * self.weight


def twice_the_gradient() -> list[Any]:
    return [
        ("Constant", [], ["minus_two"], {"value": {"value": -2.0, "dtype": "IElemType(0)", "is_tensor": True}}),
        ("Sin", ["I(0)"], ["sine"]),
        ("Mul", ["sine", "GO(0)"], ["product"]),
        ("Mul", ["product", "minus_two"], ["GI(0)"]),
    ]


@pytest.mark.parametrize("named", [("", "Cos"), ("org.pytorch.aten", "ATen", "cos", "")])
def test_a_gradient_can_be_defined_by_nodes(named: tuple[str, ...]) -> None:
    register_gradient(*named)(twice_the_gradient)
    ort_model, model = pair(OfCos())
    found = []
    for one in (ort_model, model):
        x = torch.linspace(-1, 1, 4).requires_grad_()
        out = one(x)
        out.sum().backward()
        found.append((out.detach(), x.grad, one.get_parameter("weight").grad))
    (mine, my_gradient, my_weights), (theirs, their_gradient, their_weights) = found
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(my_gradient, their_gradient * 2)
    torch.testing.assert_close(my_weights, their_weights)
    x = torch.linspace(-1, 1, 4).requires_grad_()
    torch.compile(torch.cos, backend="ort_train")(x).sum().backward()
    torch.testing.assert_close(x.grad, -x.detach().sin())  # of ORTModules alone


def test_gradients_that_cannot_be_defined_are_refused() -> None:
    with pytest.raises(ValueError, match="torch has no operator ONNX::NoSuch"):
        register_gradient("", "NoSuch")
    with pytest.raises(ValueError, match=r"torch has no operator com.microsoft::Gelu"):
        register_gradient("com.microsoft", "Gelu")
    with pytest.raises(ValueError, match=r"define it by torch.library"):
        register_gradient("", "Sin")(lambda: [(("ATen", "org.pytorch.aten"), ["GO(0)"], ["GI(0)"])])


def test_a_gradient_that_reads_nothing_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    register_gradient("", "Cos")(lambda: [("Neg", ["nothing"], ["GI(0)"])])
    with pytest.raises(ORTModuleONNXModelException, match="reads 'nothing', which no node computes"):
        ORTModule(OfCos())(torch.randn(4, requires_grad=True))


# -- statistics and subscribers ------------------------------------------------------------------------------------


class Inspected(Dense):
    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(inspect_activation("hidden", torch.relu(self.fc1(input1))))


FILES = ["Inspected_0_0th_output", "Linear_1_0th_output", "Linear_2_0th_output", "hidden"]


@pytest.mark.parametrize("subscribed", ["before", "after"])
def test_statistics_of_both_runs_are_the_same(subscribed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = Inspected()
    batches = torch.randn(4, 3, 8)
    for name, one in (("pt", copy.deepcopy(model)), ("ort", copy.deepcopy(model))):
        subscriber = StatisticsSubscriber(str(tmp_path / name), start_step=1, end_step=3)
        if name == "ort" and subscribed == "after":
            one = ORTModule(one)
        GlobalSubscriberManager.subscribe(one, [subscriber])
        if name == "ort" and subscribed == "before":
            one = ORTModule(one)
        for batch in batches:
            one(batch).sum().backward()
    for name in ("pt", "ort"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["step_1", "step_2"]
        for step in ("step_1", "step_2"):
            expected = {f"{file}_{direction}" for file in FILES for direction in ("forward", "backward")}
            assert {path.name for path in (tmp_path / name / step).iterdir()} == {*expected, "order.txt"}
    read = [(tmp_path / name / "step_2" / "hidden_backward").read_text() for name in ("pt", "ort")]
    assert read[0] == read[1]
    assert (tmp_path / "pt/step_2/order.txt").read_text().splitlines()[0] == "Linear_1_0th_output_forward"
    (tmp_path / "pt/step_1").rename(tmp_path / "pt/step_0")
    arguments = ["--pt_dir", str(tmp_path / "pt"), "--ort_dir", str(tmp_path / "ort")]
    merge([*arguments, "--output_dir", str(tmp_path / "merged")])
    sides = [(tmp_path / "merged" / side / "step_2_.txt").read_text() for side in ("merge_pt", "merge_ort")]
    assert sides[0].count("=" * 16) == sides[1].count("=" * 16) == 8
    with pytest.raises(FileExistsError, match="Enable --overwrite"):
        merge([*arguments, "--output_dir", str(tmp_path / "merged")])
    merge([*arguments, "--output_dir", str(tmp_path / "merged"), "--overwrite"])


def test_an_inspected_model_is_compiled_in_one_graph(tmp_path: Path) -> None:
    ort_model = ORTModule(Inspected())
    GlobalSubscriberManager.subscribe(ort_model, [StatisticsSubscriber(str(tmp_path / "out"))])
    before = compiles()
    ort_model(torch.randn(3, 8)).sum().backward()
    assert compiles() == before + 1
    assert not any(graph.eager for record in RECORDS for graph in record.graphs)


def test_statistics_are_right(tmp_path: Path) -> None:
    subscriber = StatisticsSubscriber(str(tmp_path / "out"), bucket_size=3)
    values = torch.tensor([0.0, -1.0, 2.0, 3.5, -4.0, 0.0, 7.0])
    subscriber.write(values, "values", 2, 0, is_forward=True)
    subscriber.write(torch.tensor([float("nan"), float("inf"), 1.0]), "odd", -1, 0, is_forward=False)
    subscriber.write(torch.tensor([], dtype=torch.float32), "empty", 0, 0, is_forward=True)
    subscriber.write(torch.tensor([True, False]), "mask", 0, 0, is_forward=True)
    lines = (tmp_path / "out/step_0/values_forward").read_text().splitlines()
    assert lines[0] == ">>values forward run shape: (7,) dtype: torch.float32 size: 7"
    assert lines[1] == f"min: -4 max: 7, mean: {values.mean():.6g}, std: {values.std():.6g}"
    assert lines[2:5] == ["nan: 0, inf: 0", "samples(top 128): 0 -1 2 3.5 -4 0 7", "neg: 2, pos: 3, zero: 2,"]
    odd = (tmp_path / "out/step_0/odd_backward").read_text()
    assert "nan: 1, inf: 1" in odd
    assert "zero: 1" in (tmp_path / "out/step_0/mask_forward").read_text()


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "a\nb", "\0", "..", "a" * 5000, "\u2028"])
def test_statistics_of_a_class_of_any_name_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    StatisticsSubscriber(str(folder)).write(torch.ones(2), name, 0, 0, is_forward=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (order, written) = sorted((folder / "step_0").iterdir(), key=lambda path: path.name != "order.txt")
    assert order.read_text().split("\n") == [written.name, ""]


def test_a_list_of_files_outside_is_not_merged(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "pt" / "step_0").mkdir(parents=True)
    (tmp_path / "pt" / "step_0" / "order.txt").write_text("../../secret\n")
    folders = [f"--{name}={tmp_path / name.removesuffix('_dir')}" for name in ("pt_dir", "ort_dir", "output_dir")]
    with pytest.raises(ValueError, match="lists files outside of its folders"):
        merge(folders)
    assert not (tmp_path / "output").exists()


def test_errors_of_statistics(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="Set override_output_dir=True"):
        StatisticsSubscriber(str(tmp_path))
    with pytest.warns(UserWarning, match="already exists, overriding it"):
        StatisticsSubscriber(str(tmp_path), override_output_dir=True)
    manager = SubscriberManager()
    with pytest.raises(RuntimeError, match=r"No subscribers are registered."):
        manager.subscribe(Dense(), [])
    with pytest.raises(ValueError, match=r"module must be a torch.nn.Module instance"):
        manager.subscribe(torch.relu, [SubscriberBase(None, None)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="subscriber must be a SubscriberBase instance"):
        manager.subscribe(Dense(), ["nobody"])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="is not registered"):
        manager.get_subscriber(StatisticsSubscriber)
    GlobalSubscriberManager.subscribe(Dense(), [SubscriberBase(None, None)])
    with pytest.raises(RuntimeError, match=r"StatisticsSubscriber is not registered, cannot inspect activation."):
        inspect_activation("x", torch.ones(1))


class Watching(SubscriberBase):
    def __init__(self, **steps: int | None) -> None:
        super().__init__(**{"start_step": None, "end_step": None, **steps})
        self.seen: list[str] = []

    def pre_forward_module_apply_impl(self, run_rtx: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.seen.append(f"before {type(module).__name__}")
        return args, kwargs

    def post_forward_tensor_apply_impl(self, run_rtx: Any, module: nn.Module, tensor_index: int, tensor: Tensor) -> Any:
        return tensor * 2 if isinstance(module, nn.Linear) else tensor

    def post_forward_outmost_module_apply_impl(self, run_rtx: Any, module: nn.Module, args: Any, outputs: Any) -> Any:
        self.seen.append(f"end of step {run_rtx.global_states.execution_step}")
        return args, outputs


def test_a_subscriber_of_the_programs_looks_and_changes() -> None:
    model = Dense()
    x = torch.randn(3, 8)
    expected = model.fc2(torch.relu(model.fc1(x) * 2)) * 2
    ort_model = ORTModule(model)
    manager, watching = SubscriberManager(), Watching(start_step=0, end_step=2)
    manager.subscribe(ort_model, [watching])
    for step in range(3):
        found = ort_model(x)
        torch.testing.assert_close(found, expected if step < 2 else model.fc2(torch.relu(model.fc1(x))))
    one = ["before Dense", "before Linear", "before Linear"]
    assert watching.seen == [*one, "end of step 0", *one, "end of step 1"]
    assert manager.get_subscriber(Watching) is watching
    assert manager.get_run_context().global_states.execution_step == 3


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
        ({"FallbackPolicy": ["FALLBACK_NEVER"]}, KeyError, "FALLBACK_NEVER"),
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


# -- samplers ------------------------------------------------------------------------------------------------------


def samplers(**options: Any) -> list[LoadBalancingDistributedSampler]:
    generator = torch.Generator().manual_seed(7)
    dataset = [(torch.zeros(1), int(n)) for n in torch.randint(1, 100, (50,), generator=generator)]
    return [
        LoadBalancingDistributedSampler(
            dataset, complexity_fn=lambda sample: sample[1], world_size=3, rank=rank, **options
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"group_size": 10}, {"drop_last": True}, {"random_level": 0.5}]
)
def test_the_sampler_deals_out_samples_of_like_cost(options: dict[str, Any]) -> None:
    dealt = samplers(**options)
    indices = [list(one) for one in dealt]
    assert {len(one) for one in indices} == {len(dealt[0])} == {16 if options.get("drop_last") else 17}
    everything = [index for one in indices for index in one]
    assert len(set(everything)) == (48 if options.get("drop_last") else 50)
    costs = np.array([[dealt[0].dataset[index][1] for index in one] for one in indices])
    if not options.get("random_level"):
        assert np.median(np.ptp(costs, axis=0)) <= (30 if "group_size" in options else 5)
    again = samplers(**options)
    assert [list(one) for one in again] == indices
    for one in again:
        one.set_epoch(1)
    assert ([list(one) for one in again] == indices) == (options.get("shuffle") is False)


def test_sampler_errors() -> None:
    for options in ({"rank": 3}, {"rank": -1}):
        with pytest.raises(ValueError, match=r"rank should be in the interval \[0, 2\]"):
            LoadBalancingDistributedSampler([1], complexity_fn=int, world_size=3, **options)
    with pytest.raises(ValueError, match="Invalid random level 2"):
        LoadBalancingDistributedSampler([1], complexity_fn=int, world_size=1, rank=0, random_level=2)
    with pytest.raises(ValueError, match=r"sampler should be of LoadBalancingDistributedSampler type."):
        LoadBalancingDistributedBatchSampler([1], batch_fn=list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drop_last of sampler should be False"):
        LoadBalancingDistributedBatchSampler(samplers(drop_last=True)[0], batch_fn=list)


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_batch_sampler_gives_each_process_as_many_batches(drop_last: bool) -> None:
    def batches(indices: list[int]) -> list[list[int]]:
        cut = 1 + indices[0] % 5
        return [indices[begin : begin + cut] for begin in range(0, len(indices), cut)]

    made = [LoadBalancingDistributedBatchSampler(one, batches, drop_last) for one in samplers()]
    assert len({len(one) for one in made}) == 1
    assert {len(list(one)) for one in made} == {len(made[0])}
    for one in made:
        one.set_epoch(3)
    assert {len(list(one)) for one in made} == {len(made[0])}


# -- the rest ------------------------------------------------------------------------------------------------------


def test_a_hierarchical_ortmodule_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    model = Normed()
    ort_model = HierarchicalORTModule(copy.deepcopy(model))
    assert_steps_like_eager(ort_model, model, torch.randn(3, 8))
