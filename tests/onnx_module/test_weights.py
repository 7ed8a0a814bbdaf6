"""Tests of weights: which initializers are weights, their names, and writing them back to the file."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import helper, numpy_helper
from small_graphs import BOOL, INT64, graph_of, model_of, perceptron, value

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.onnx_module import OnnxModule, to_model_proto
from ort_dynamo.testing import assert_close


def test_weights_are_parameters_under_their_names() -> None:
    module = OnnxModule(perceptron())
    assert list(dict(module.named_parameters())) == ["first.weight", "first.bias", "second.0.weight"]
    assert module.onnx_names == {name: name for name in module.state_dict()}
    assert (module.input_names, module.output_names) == (("x",), ("y",))


def test_a_scalar_is_no_weight_unless_the_exporter_says_that_it_was_a_parameter() -> None:
    nodes = [helper.make_node("Mul", ["x", "scale"], ["z"]), helper.make_node("Add", ["z", "eps"], ["y"])]
    graph = graph_of(nodes, [value("x")], [value("y")], {"scale": np.float32(3), "eps": np.float32(1)})
    assert not list(OnnxModule(model_of(graph)).parameters())
    module = OnnxModule(model_of(graph), scalars=["scale"])
    assert list(dict(module.named_parameters())) == list(dict(copy.deepcopy(module).named_parameters())) == ["scale"]
    module(torch.ones(2, 4))[0].sum().backward()
    assert float(module.scale.grad) == 8
    with pytest.raises(OnnxModelError, match=r"scalars names weights that the model does not have: \['x'\]"):
        OnnxModule(model_of(graph), scalars=["x"])
    said = value("scale", ())
    said.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value="PARAMETER")
    graph.value_info.append(said)
    module = OnnxModule(model_of(graph))
    assert list(dict(module.named_parameters())) == ["scale"]
    assert_close(module(torch.ones(2, 4))[0].detach(), torch.full((2, 4), 4.0), "y")


def test_exported_buffer_becomes_a_buffer() -> None:
    graph = graph_of([helper.make_node("Add", ["x", "table"], ["y"])], [value("x")], [value("y")], {"table": [1.0] * 4})
    said = value("table", (4,))
    said.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value="BUFFER")
    graph.value_info.append(said)
    module = OnnxModule(model_of(graph))
    assert not list(module.parameters())
    assert list(module.state_dict()) == ["table"]


def test_settings_and_integers_are_no_weights() -> None:
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["wide"], mode="nearest"),
        helper.make_node("Gather", ["wide", "places"], ["y"], axis=1),
    ]
    data = {"scales": [1.0, 2.0], "places": np.array([[0], [3]])}
    module = OnnxModule(model_of(graph_of(nodes, [value("x")], [value("y", None)], data)))
    assert not list(module.parameters())
    assert module(torch.ones(2, 4))[0].shape == (2, 2, 1)


def test_a_weight_that_is_a_bound_of_clip_is_refused_unless_it_is_frozen() -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["z"]), helper.make_node("Clip", ["z", "low"], ["y"])]
    graph = graph_of(nodes, [value("x")], [value("y")], {"w": [1.0] * 4, "low": np.float32(0.5)})
    assert list(dict(OnnxModule(model_of(graph)).named_parameters())) == ["w"]
    with pytest.raises(OnnxModelError, match="the weight 'low' is a setting, such as a bound of Clip, which is not tr"):
        OnnxModule(model_of(graph), scalars=["low"])
    said = value("low", ())
    said.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value="PARAMETER")
    graph.value_info.append(said)
    with pytest.raises(OnnxModelError, match="the weight 'low' is a setting"):
        OnnxModule(model_of(graph))
    module = OnnxModule(model_of(graph), frozen=["low"])
    assert float(module(torch.zeros(1, 4))[0].detach().min()) == 0.5


@pytest.mark.parametrize("name", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
def test_weights_of_classes_are_buffers(name: str) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node(name, ["z", "t", "classes"], ["loss"])]
    data = {"w": np.eye(4), "classes": [1.0, 2.0, 3.0, 4.0]}
    graph = graph_of(nodes, [value("x"), value("t", ("n",), INT64)], [value("loss", ())], data)
    module = OnnxModule(model_of(graph))
    assert [name for name, _ in module.named_parameters()] == ["w"]
    assert [name for name, _ in module.named_buffers()] == ["classes"]
    x, t = torch.randn(3, 4), torch.tensor([0, 3, 1])
    (loss,) = module(x, t)
    loss.backward()
    function = torch.nn.functional.nll_loss if name.startswith("Neg") else torch.nn.functional.cross_entropy
    assert_close(loss.detach(), function(x, t, torch.tensor(data["classes"])), "the loss")
    assert bool(module.w.grad.isfinite().all())
    assert to_model_proto(module).SerializeToString() == model_of(graph).SerializeToString()


def test_weights_of_classes_that_scale_too_are_refused_unless_they_are_frozen() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "classes"], ["z"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["z", "t", "classes"], ["loss"]),
    ]
    data = {"classes": [1.0, 2.0, 3.0, 4.0]}
    model = model_of(graph_of(nodes, [value("x"), value("t", ("n",), INT64)], [value("loss", ())], data))
    with pytest.raises(
        OnnxModelError, match=r"both a weight and a statistic.* Or name it in `frozen` to keep its value"
    ):
        OnnxModule(model)
    assert not list(OnnxModule(model, frozen=["classes"]).parameters())


def test_names_that_torch_cannot_take_are_mapped() -> None:
    names = ["a", "a.b", "a..c", "forward", "x.training", "m/conv.weight", "_model", "onnx_constants.x", ".", "a_"]
    nodes = [helper.make_node("Sum", ["x", *names], ["y"])]
    weights = {name: np.full(4, 10.0**index) for index, name in enumerate(names)}
    model = model_of(graph_of(nodes, [value("x")], [value("y")], weights))
    module = OnnxModule(model)
    assert sorted(module.onnx_names.values()) == sorted(names)
    assert module.onnx_names.keys() == module.state_dict().keys() == dict(module.named_parameters()).keys()
    assert {"a.b", "m/conv.weight", "a_"} <= set(module.onnx_names)
    for index, name in enumerate(names):
        (key,) = [key for key, old in module.onnx_names.items() if old == name]
        assert float(module.state_dict()[key][0]) == pytest.approx(10.0**index)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_close(compiled(torch.zeros(1, 4))[0].detach(), module(torch.zeros(1, 4))[0].detach(), "y")
    assert to_model_proto(module).SerializeToString() == model.SerializeToString()


def test_frozen_weights_require_no_gradient() -> None:
    module = OnnxModule(perceptron(), frozen=["first.bias"])
    assert [name for name, one in module.named_parameters() if not one.requires_grad] == ["first.bias"]
    with pytest.raises(OnnxModelError, match=r"frozen names initializers that the model does not have: \['nothing'\]"):
        OnnxModule(perceptron(), frozen=["nothing"])


def test_inputs_come_in_order_or_by_name() -> None:
    nodes = [helper.make_node("Sub", ["a", "b"], ["y"])]
    module = OnnxModule(model_of(graph_of(nodes, [value("a"), value("b")], [value("y")])))
    a, b = torch.ones(1, 4), torch.full((1, 4), 3.0)
    for found in (module(a, b), module(a, b=b), module(b=b, a=a)):
        assert_close(found[0], a - b, "y")
    for args, named in (((a,), {}), ((a, b, b), {}), ((a,), {"a": b}), ((a, b), {"c": b})):
        with pytest.raises(TypeError, match="the model takes the inputs a, b; got"):
            module(*args, **named)


def test_an_input_with_an_initializer_is_none() -> None:
    model = perceptron()
    model.graph.input.append(value("first.bias", (5,)))
    assert OnnxModule(model).input_names == ("x",)


def test_a_file_comes_back_byte_by_byte() -> None:
    model = perceptron()
    model.metadata_props.add(key="who", value="me")
    model.doc_string = "A model."
    model.graph.initializer[0].data_location = onnx.TensorProto.DEFAULT  # as onnx.load leaves it
    before = model.SerializeToString()
    module = OnnxModule(model)
    assert to_model_proto(module).SerializeToString() == before == model.SerializeToString()


def test_only_trained_values_change_in_a_saved_file() -> None:
    model = perceptron()
    module = OnnxModule(model, frozen=["second.0.weight"])
    torch.compile(module, backend="ort_train")(torch.randn(3, 4))[0].square().sum().backward()
    torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1).step()
    saved = to_model_proto(module)
    for old, new in zip(model.graph.initializer, saved.graph.initializer, strict=True):
        assert (old != new) == (old.name != "second.0.weight")
        assert old.HasField("raw_data") == new.HasField("raw_data")
        new.CopyFrom(old)
    assert saved == model
    x = torch.randn(3, 4)
    (expected,) = run_onnxruntime(to_model_proto(module), (x,))
    assert_close(module(x)[0].detach(), torch.from_numpy(expected), "y")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_module_of_its_own(how: str) -> None:
    module = OnnxModule(perceptron()).eval()
    twin = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    x = torch.randn(2, 4)
    with torch.no_grad():
        twin.get_parameter("first.bias").add_(1)
    assert not torch.equal(twin(x)[0], module(x)[0])
    assert not any(one.training for one in twin.modules())
    assert twin.onnx_names == module.onnx_names
    assert to_model_proto(module).SerializeToString() == perceptron().SerializeToString()


@pytest.mark.parametrize("dtype", [np.float16, np.float64, "bfloat16"])
@pytest.mark.parametrize("raw", [True, False])
def test_weights_of_all_float_types_come_back(dtype: object, raw: bool) -> None:
    number = onnx.TensorProto.BFLOAT16 if dtype == "bfloat16" else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = numpy_helper.from_array(np.zeros(4, np.float64), "w")
    values = np.linspace(-1, 1, 4).astype(helper.tensor_dtype_to_np_dtype(number))
    weight = numpy_helper.from_array(values, "w") if raw else helper.make_tensor("w", number, [4], values.tolist())
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = graph_of([node], [value("x", dtype=number)], [value("y", dtype=number)])
    graph.initializer.append(weight)
    module = OnnxModule(model_of(graph))
    assert_close(
        module.get_parameter("w").detach().double(), torch.from_numpy(values.astype(np.float64)), "w", strides=False
    )
    assert to_model_proto(module).graph.initializer[0] == weight


def test_running_statistics_are_buffers_and_follow_onnx() -> None:
    node = helper.make_node(
        "BatchNormalization", ["x", "s", "b", "mean", "var"], ["y", "m", "v"], training_mode=1, momentum=0.8
    )
    weights = {"s": [1.0, 2.0], "b": [0.0, 1.0], "mean": [0.5, 0.0], "var": [1.0, 2.0]}
    outputs = [value("y", ("n", 2)), value("m", (2,)), value("v", (2,))]
    model = model_of(graph_of([node], [value("x", ("n", 2))], outputs, weights))
    module = OnnxModule(model)
    assert [name for name, _ in module.named_parameters()] == ["s", "b"]
    assert list(module.state_dict()) == ["s", "b", "mean", "var"]
    x = torch.randn(5, 2)
    expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    compiled = torch.compile(module, backend="ort_train", fullgraph=True)
    y, mean, var = compiled(x)
    for found, wanted in zip((y, mean, var), expected, strict=True):
        assert_close(found.detach(), torch.from_numpy(wanted), "an output", strides=False)
    assert_close(module.get_buffer("mean"), mean.detach(), "the buffer")
    assert_close(module.get_buffer("var"), var.detach(), "the buffer")
    (y, *_) = module.eval()(x)
    assert_close(
        y.detach(), torch.nn.functional.batch_norm(x, mean, var, module.s, module.b).detach(), "y in eval mode"
    )
    saved = {one.name: numpy_helper.to_array(one) for one in to_model_proto(module).graph.initializer}
    assert saved["mean"] == pytest.approx(mean.detach().numpy())


def test_a_weight_that_is_a_statistic_too_is_refused() -> None:
    node = helper.make_node("BatchNormalization", ["x", "one", "zero", "zero", "one"], ["y"])
    graph = graph_of([node], [value("x", ("n", 2))], [value("y", ("n", 2))], {"one": [1.0, 1.0], "zero": [0.0, 0.0]})
    with pytest.raises(OnnxModelError, match="'one' is both a weight and a statistic"):
        OnnxModule(model_of(graph))


@pytest.mark.parametrize("mode", ["absent", "false", "true", "input"])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_drops_where_the_file_and_the_module_say_so(mode: str, training: bool) -> None:
    inputs = {"absent": [], "false": ["false"], "true": ["true"], "input": ["mode"]}[mode]
    node = helper.make_node("Dropout", ["x", "ratio", *inputs], ["y", "mask"])
    data = {"ratio": np.float32(0.5), "false": np.array(False), "true": np.array(True)}
    given = [value("x"), *([value("mode", (), BOOL)] if mode == "input" else [])]
    outputs = [value("y"), value("mask", dtype=BOOL)]
    module = OnnxModule(model_of(graph_of([node], given, outputs, data))).train(training)
    x = torch.ones(8, 4)
    y, mask = module(x, *([torch.tensor(True)] if mode == "input" else []))
    dropped = training and mode in ("true", "input")
    assert bool((y == 0).any()) == dropped
    assert_close(y, torch.where(mask, 2.0 if dropped else 1.0, 0.0), "y")
    if mode == "input":
        assert_close(module(x, torch.tensor(False))[0], x, "y without")


def test_a_dropout_of_one_output_trains_as_torch_has_it() -> None:
    node = helper.make_node("Dropout", ["x", "ratio", "true"], ["y"])
    module = OnnxModule(
        model_of(graph_of([node], [value("x")], [value("y")], {"ratio": np.float32(0.5), "true": np.array(True)}))
    )
    x = torch.randn(8, 4)
    compiled = torch.compile(module, backend="ort_train", fullgraph=True)
    torch.manual_seed(3)
    (found,) = compiled(x)
    torch.manual_seed(3)
    assert_close(found, torch.nn.functional.dropout(x, 0.5), "y")


def test_external_data_is_read_from_the_folder_that_is_given_only(tmp_path: Path) -> None:
    onnx.save(perceptron(), tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    with pytest.raises(OnnxModelError, match="give base_dir"):
        OnnxModule(model)
    module = OnnxModule(model, base_dir=tmp_path)
    x = torch.randn(2, 4)
    assert_close(module(x)[0].detach(), OnnxModule(perceptron())(x)[0].detach(), "y")
    inside = to_model_proto(module)
    assert_close(OnnxModule(inside)(x)[0].detach(), module(x)[0].detach(), "of the saved file")
    assert_close(copy.deepcopy(module)(x)[0].detach(), module(x)[0].detach(), "of a copy")


@pytest.mark.parametrize("attributes", [False, True], ids=["initializers only", "attributes too"])
def test_constants_in_files_are_read_and_kept(attributes: bool, tmp_path: Path) -> None:
    make = helper.make_node
    branches = {
        "then_branch": graph_of([make("Mul", ["turned", "scale"], ["t"])], [], [value("t")]),
        "else_branch": graph_of([make("Mul", ["turned", "w"], ["e"])], [], [value("e")], {"w": np.full(4, 5.0)}),
    }
    nodes = [
        make("Constant", [], ["scale"], value=numpy_helper.from_array(np.full(4, 3, np.float32))),
        make("Gather", ["x", "order"], ["turned"], axis=1),
        make("If", ["condition"], ["y"], **branches),
    ]
    inputs = [value("x"), value("condition", (), BOOL)]
    model = model_of(graph_of(nodes, inputs, [value("y")], {"order": np.array([3, 2, 1, 0])}))
    onnx.save(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="data",
        size_threshold=0,
        convert_attribute=attributes,
    )
    read = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    with pytest.raises(OnnxModelError, match="give base_dir"):
        OnnxModule(read)
    module = OnnxModule(read, base_dir=tmp_path)
    (tmp_path / "data").unlink()
    x = torch.randn(2, 4)
    for one in (module, copy.deepcopy(module), OnnxModule(to_model_proto(module))):
        for condition, factor in ((True, 3), (False, 5)):
            assert_close(one(x, torch.tensor(condition))[0], x.flip(1) * factor, "y")


def test_integers_that_are_data_stay_integers() -> None:
    nodes = [helper.make_node("Add", ["x", "two"], ["y"])]
    graph = graph_of(nodes, [value("x", dtype=INT64)], [value("y", dtype=INT64)], {"two": np.int64(2)})
    assert_close(OnnxModule(model_of(graph))(torch.ones(1, 4, dtype=torch.int64))[0], torch.full((1, 4), 3), "y")
