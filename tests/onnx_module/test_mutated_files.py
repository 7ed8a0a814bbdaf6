"""Randomly damaged files are refused, or compute the same as ONNX Runtime."""

from __future__ import annotations

import functools
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from exported_models import run_onnxruntime
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from small_graphs import BOOL, FLOAT, INT64, graph_of, model_of, perceptron, value

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.onnx_module import OnnxModule, size_limits, to_model_proto

make = helper.make_node

Inputs = tuple[torch.Tensor, ...]


def shapes_model() -> onnx.ModelProto:
    """Sizes, slices, reshapes, gathers and reductions."""
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "zero"], ["rows"]),
        make("Unsqueeze", ["rows", "axes"], ["one"]),
        make("Concat", ["one", "rest"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["cube"]),
        make("Transpose", ["cube"], ["turned"], perm=[0, 2, 1]),
        make("Slice", ["turned", "zeros", "ends", "axes1", "steps"], ["cut"]),
        make("Pad", ["cut", "pads", "fill"], ["wide"], mode="constant"),
        make("ReduceMean", ["wide"], ["mean"], axes=[1], keepdims=0),
        make("Softmax", ["mean"], ["soft"], axis=-1),
        make("Expand", ["scale", "wanted"], ["more"]),
        make("Mul", ["soft", "more"], ["y"]),
    ]
    data = {
        "zero": np.int64(0), "axes": np.array([0]), "rest": np.array([2, 2]), "zeros": np.array([0]),
        "ends": np.array([2]), "axes1": np.array([1]), "steps": np.array([1]), "pads": np.array([0, 0, 1, 0, 0, 0]),
        "fill": np.float32(0.5), "scale": [1.0, 2.0, 3.0], "wanted": np.array([1, 3]),
    }  # fmt: skip
    return model_of(graph_of(nodes, [value("x")], [value("y", ("n", 3))], data))


def control_model() -> onnx.ModelProto:
    """An If and a Loop."""
    then_branch = graph_of([make("MatMul", ["x", "w"], ["t"])], [], [value("t")])
    else_branch = graph_of([make("Neg", ["x"], ["e"])], [], [value("e")])
    body = graph_of(
        [make("Tanh", ["s"], ["u"]), make("Identity", ["go"], ["goes"])],
        [value("i", (), INT64), value("go", (), BOOL), value("s")],
        [value("goes", (), BOOL), value("u")],
    )
    nodes = [
        make("ReduceSum", ["x"], ["sum"], keepdims=0),
        make("Greater", ["sum", "zero"], ["condition"]),
        make("If", ["condition"], ["z"], then_branch=then_branch, else_branch=else_branch),
        make("Loop", ["trips", "", "z"], ["y"], body=body),
    ]
    data = {"w": np.eye(4) * 0.5, "zero": np.float32(0), "trips": np.int64(2)}
    return model_of(graph_of(nodes, [value("x")], [value("y")], data))


def image_model() -> onnx.ModelProto:
    """A convolution, a norm and pools."""
    nodes = [
        make("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[1, 1], dilations=[1, 1]),
        make("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        make("MaxPool", ["n"], ["p"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=0),
        make("Resize", ["p", "", "scales"], ["r"], mode="linear", coordinate_transformation_mode="asymmetric"),
        make("GlobalAveragePool", ["r"], ["g"]),
        make("Flatten", ["g"], ["y"], axis=1),
    ]
    random = np.random.default_rng(0)
    data = {"w": random.normal(size=(2, 1, 3, 3)), "b": [0.1, 0.2], "s": [1.0, 2.0], "m": [0.0, 0.1], "v": [1.0, 2.0]}
    data["scales"] = [1.0, 1.0, 2.0, 2.0]
    graph = graph_of(nodes, [value("x", ("n", 1, 4, 4))], [value("y", ("n", 2))], data)
    return model_of(graph)


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "perceptron": (perceptron, (2, 4)),
    "shapes": (shapes_model, (2, 4)),
    "control": (control_model, (2, 4)),
    "image": (image_model, (2, 1, 4, 4)),
}

NUMBERS = st.one_of(st.integers(-3, 6), st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**40, 2**62, -(2**62)]))
NAMES = ["", "x", "y", "w", "Add", "Relu", "MatMul", "Reshape", "Shape", "ai.onnx", "com.microsoft", "axis", "é"]
TEXTS = st.sampled_from(NAMES)


def is_list(found: object) -> bool:
    return hasattr(found, "append")


def messages(message: Message) -> Iterator[Message]:
    """A message and all in it."""
    yield message
    for field, found in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in found if is_list(found) else [found]:
                yield from messages(one)


def change(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Change one field of one message, in place: a value, or an entry of a list."""
    fields = [one for one in message.DESCRIPTOR.fields if one.name not in ("doc_string", "metadata_props")]
    field = draw(st.sampled_from(fields))
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        found = list(getattr(message, field.name)) if is_list(getattr(message, field.name)) else []
        if not found or draw(st.booleans()):
            message.ClearField(field.name) if draw(st.integers(0, 3)) == 0 else None
        elif draw(st.booleans()):
            getattr(message, field.name).append(draw(st.sampled_from(found)))
        else:
            del getattr(message, field.name)[draw(st.integers(0, len(found) - 1))]
        return
    drawn: dict[int, st.SearchStrategy[Any]] = {
        FieldDescriptor.TYPE_STRING: TEXTS,
        FieldDescriptor.TYPE_BYTES: st.binary(max_size=16),
        FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.TYPE_DOUBLE: st.floats(),
        FieldDescriptor.TYPE_INT64: NUMBERS,
        FieldDescriptor.TYPE_UINT64: st.integers(0, 9),
        FieldDescriptor.TYPE_INT32: st.integers(-3, 30),
        FieldDescriptor.TYPE_ENUM: st.integers(0, 16),
    }
    new = draw(drawn[field.type])
    if field.enum_type is not None and new not in field.enum_type.values_by_number:
        return
    if not is_list(getattr(message, field.name)):
        setattr(message, field.name, new)
        return
    entries = getattr(message, field.name)
    if not entries or draw(st.integers(0, 3)) == 0:
        entries.append(new)
    elif draw(st.integers(0, 3)) == 0:
        del entries[draw(st.integers(0, len(entries) - 1))]
    else:
        entries[draw(st.integers(0, len(entries) - 1))] = new


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_defined(model: onnx.ModelProto, names: tuple[str, ...], inputs: list[torch.Tensor]) -> bool:
    """Check whether onnx's evaluator gives finite results: ONNX Runtime accepts wrong axes and empty means."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = ReferenceEvaluator(model).run(
                None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
            )
        except Exception:  # numpy's, and its own
            return False
    return all(one.size and bool(np.isfinite(one).all()) for one in found)


def check(model: onnx.ModelProto, shape: tuple[int, ...]) -> str:
    """Make a module and run it; says how it went."""
    try:
        module = OnnxModule(model).eval()
    except OnnxModelError:
        return "refused"
    assert to_model_proto(module).SerializeToString() == model.SerializeToString()
    dtypes = {FLOAT: torch.float32, INT64: torch.int64, BOOL: torch.bool}
    inputs = []
    for one in model.graph.input:
        kind = one.type.tensor_type.elem_type
        if one.name in module.input_names:
            inputs.append(torch.ones(shape, dtype=dtypes.get(kind, torch.float32)))
    try:
        expected = run_onnxruntime(model, tuple(inputs))
    except Exception:
        expected = None  # ONNX Runtime refuses the model; our error may be torch's
    try:
        with torch.no_grad():
            found = module(*inputs)
    except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError):
        assert expected is None or not is_defined(model, module.input_names, inputs)
        return "fails to run"
    if expected is None:
        return "runs here only"
    for mine, theirs in zip(found, expected, strict=True):
        ours = mine.detach().numpy()
        if any(node.op_type == "ReduceMean" for node in model.graph.node):
            ours = np.where(np.isnan(ours), theirs, ours)  # the mean of nothing, which is 0 in ONNX Runtime
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    return "runs"


def small_sizes(function: Callable[..., None]) -> Callable[..., None]:
    """Refuse sizes that a test cannot hold, as others are by default."""

    @functools.wraps(function)
    def limited(*args: Any, **named: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(size_limits, "MOST_ELEMENTS", 1 << 20)
            function(*args, **named)

    return limited


def mutate_fields(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    make_model, shape = MODELS[name]
    model = make_model()
    for _ in range(data.draw(st.integers(1, 3))):
        parts = list(messages(model))
        change(parts[data.draw(st.integers(0, len(parts) - 1))], data.draw)
    with within(20):
        check(model, shape)


def mutate_bytes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    make_model, shape = MODELS[name]
    text = bytearray(make_model().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        model = onnx.load_from_string(bytes(text))
    except DecodeError:
        return
    with within(20):
        check(model, shape)


SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=SUPPRESSED, database=None)
@given(st.data())
@small_sizes
def test_a_changed_field_is_refused_or_understood(data: st.DataObject) -> None:
    mutate_fields(data)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=SUPPRESSED, database=None)
@given(st.data())
@small_sizes
def test_changed_bytes_are_refused_or_understood(data: st.DataObject) -> None:
    mutate_bytes(data)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=SUPPRESSED, database=None)
@given(st.data())
@small_sizes
def test_many_changed_fields_are_refused_or_understood(data: st.DataObject) -> None:
    mutate_fields(data)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=SUPPRESSED, database=None)
@given(st.data())
@small_sizes
def test_many_changed_bytes_are_refused_or_understood(data: st.DataObject) -> None:
    mutate_bytes(data)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_files_are_right_before(name: str) -> None:
    make_model, shape = MODELS[name]
    assert check(make_model(), shape) == "runs"
