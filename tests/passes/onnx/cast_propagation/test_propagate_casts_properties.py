"""Properties of every result: valid, typed, no more bytes to cast, equal results, idempotent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.passes.onnx import PropagateCasts

FLOAT, HALF, BFLOAT, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL
NUMPY = {FLOAT: np.float32, HALF: np.float16, BFLOAT: ml_dtypes.bfloat16, BOOL: np.bool_}
EXACT = ("Neg", "Relu", "Abs", "Transpose", "Reshape", "Expand", "Slice", "Split", "Concat", "Where", "Gather")
INEXACT = ("Exp", "Mul", "Add", "ReduceSum")

BOTH = {"h": (HALF, (2, 3)), "b": (BFLOAT, (2, 3))}

Shape = tuple[int, ...]


class Builder:
    """Builds a random graph: every node reads values that exist already."""

    def __init__(
        self, draw: Callable[..., Any], names: itertools.count[int], outer: dict[str, tuple[int, Shape]]
    ) -> None:
        self.draw, self.names = draw, names
        self.floats = tuple({dtype for dtype, _ in outer.values()} - {BOOL})
        self.values = dict(outer)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def pick(self, *dtypes: int, like: tuple[int, Shape] | None = None) -> str:
        known = [n for n, (d, s) in self.values.items() if d in dtypes and like in (None, (d, s))]
        return str(self.draw(st.sampled_from(known)))

    def add(self, op_type: str, inputs: list[str], *results: tuple[int, Shape], **attributes: Any) -> list[str]:
        outputs = [f"v{next(self.names)}" for _ in results]
        self.nodes.append(make_node(op_type, inputs, outputs, **attributes))
        self.values.update(zip(outputs, results, strict=True))
        return outputs

    def constant(self, array: npt.NDArray[Any]) -> str:
        name = f"c{next(self.names)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def step(self, operators: tuple[str, ...]) -> None:
        op_type = self.draw(st.sampled_from((*operators, *["Cast"] * len(operators))))
        name = self.pick(*self.floats)
        dtype, shape = self.values[name]
        getattr(self, f"{op_type.lower()}_", self.unary)(op_type, name, dtype, shape)

    def unary(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        self.add(op_type, [name], (dtype, shape))

    def binary(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        self.add(op_type, [name, self.pick(dtype, like=(dtype, shape))], (dtype, shape))

    mul_ = add_ = binary

    def cast_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        to = self.draw(st.sampled_from([d for d in self.floats if (d == FLOAT) != (dtype == FLOAT)]))
        self.add(op_type, [name], (to, shape), to=to)

    def transpose_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        self.add(op_type, [name], (dtype, shape[::-1]))

    def reshape_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        new = (int(np.prod(shape)),)
        self.add(op_type, [name, self.constant(np.array(new, np.int64))], (dtype, new))

    def expand_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        new = (2, *shape) if len(shape) < 3 else shape
        self.add(op_type, [name, self.constant(np.array(new, np.int64))], (dtype, new))

    def slice_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        ends = [self.constant(np.array([end], np.int64)) for end in (0, 1, 0)]
        self.add(op_type, [name, *ends], (dtype, (min(1, shape[0]), *shape[1:])))

    def gather_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        self.add(op_type, [name, self.constant(np.array([0, 0, 0], np.int64))], (dtype, (3, *shape[1:])))

    def split_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        if shape[0] > 1:
            sizes = (1, shape[0] - 1)
            halves = [(dtype, (size, *shape[1:])) for size in sizes]
            self.add(op_type, [name, self.constant(np.array(sizes, np.int64))], *halves)

    def concat_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        other = self.pick(dtype, like=(dtype, shape))
        self.add(op_type, [name, other], (dtype, (2 * shape[0], *shape[1:])), axis=0)

    def where_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        number = self.draw(st.sampled_from([None, None, 0.0, -np.inf, 0.1, 1e30]))
        with np.errstate(over="ignore"):
            fill = self.constant(np.array(number, NUMPY[dtype])) if number is not None else None
        fill = fill or self.pick(dtype, like=(dtype, shape))
        self.add(op_type, [self.pick(BOOL), name, fill], (dtype, shape))

    def reducesum_(self, op_type: str, name: str, dtype: int, shape: Shape) -> None:
        self.add(op_type, [name], (dtype, (1,) * len(shape)))

    def branches(self, operators: tuple[str, ...]) -> None:
        """An If whose branches read values from outside and return a value of one type."""
        graphs, target = [], self.values[self.pick(*self.floats)]
        for _ in range(2):
            inner = Builder(self.draw, self.names, self.values)
            for _ in range(self.draw(st.integers(1, 4))):
                inner.step(operators)
            made = [n for node in inner.nodes for n in node.output if inner.values[n] == target]
            last = made[-1] if made else inner.add("Neg", [inner.pick(*self.floats, like=target)], target)[0]
            outputs = [make_tensor_value_info(last, *target)]
            graphs.append(make_graph(inner.nodes, f"branch{next(self.names)}", [], outputs, inner.initializers))
        self.add("If", [self.pick(BOOL)], target, then_branch=graphs[0], else_branch=graphs[1])


@st.composite
def models(draw: Callable[..., Any], operators: tuple[str, ...], nested: bool = True) -> onnx.ModelProto:
    inputs = {"x": (FLOAT, (2, 3)), "p": (BOOL, ())}
    inputs |= draw(st.sampled_from([{"h": (HALF, (2, 3))}, {"b": (BFLOAT, (2, 3))}, BOTH]))
    operators = tuple(draw(st.lists(st.sampled_from(operators), min_size=1, max_size=4, unique=True)))
    builder = Builder(draw, itertools.count(), dict(inputs))
    for _ in range(draw(st.integers(4, 16))):
        builder.step(operators)
        if nested and draw(st.integers(0, 9)) == 0:
            builder.branches(operators)
    made = [name for node in builder.nodes for name in node.output]
    unread = [name for name in made if not any(name in node.input for node in builder.nodes)]
    outputs = dict.fromkeys([*unread, *draw(st.lists(st.sampled_from(made), max_size=2))])
    graph = make_graph(
        builder.nodes,
        "g",
        [make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [make_tensor_value_info(name, *builder.values[name]) for name in outputs],
        builder.initializers,
    )
    model = make_model(graph, opset_imports=[make_opsetid("", 20)], ir_version=10)
    pruned = ir.from_proto(model)  # casts that nothing reads are not counted
    RemoveUnusedNodesPass()(pruned)
    model = ir.to_proto(pruned)
    onnx.checker.check_model(model, full_check=True)
    return model


def cast_bytes(model: onnx.ModelProto) -> int:
    """Bytes read and written by casts between float32 and the narrow types, counted without the pass's own help."""

    def graph_bytes(graph: onnx.GraphProto, outer: dict[str, onnx.TypeProto.Tensor]) -> int:
        known = outer | {v.name: v.type.tensor_type for v in (*graph.input, *graph.output, *graph.value_info)}
        total = 0
        for node in graph.node:
            total += sum(graph_bytes(a.g, known) for a in node.attribute if a.HasField("g"))
            if node.op_type == "Cast":
                elements = np.prod([dim.dim_value for dim in known[node.output[0]].shape.dim], dtype=int)
                total += 6 * int(elements)
        return total

    return graph_bytes(onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph, {})


def nodes(graph: onnx.GraphProto) -> list[Any]:
    return [(n.op_type, n.input, n.output, [nodes(a.g) for a in n.attribute if a.HasField("g")]) for n in graph.node]


def rewritten(model: onnx.ModelProto, pass_: PropagateCasts) -> onnx.ModelProto:
    """Run the pass, and check the properties that hold for every strategy and level."""
    changed = ir.from_proto(model)
    summary = pass_.propagate(changed)
    result = ir.to_proto(changed)
    onnx.checker.check_model(result, full_check=True)
    for field in ("input", "output"):
        assert getattr(result.graph, field) == getattr(model.graph, field)
    before, after = cast_bytes(model), cast_bytes(result)
    assert after <= before
    assert summary.bytes_saved == before - after
    assert summary.modified == (nodes(result.graph) != nodes(model.graph))
    text = result.SerializeToString(deterministic=True)
    assert not pass_(changed).modified
    assert ir.to_proto(changed).SerializeToString(deterministic=True) == text
    return result


def results(model: onnx.ModelProto, seed: int) -> list[npt.NDArray[Any]]:
    random = np.random.default_rng(seed)
    feeds = {
        value.name: np.asarray(random.normal(size=[d.dim_value for d in value.type.tensor_type.shape.dim]) * 4).astype(
            NUMPY[value.type.tensor_type.elem_type]
        )
        for value in model.graph.input
    }
    feeds["p"] = np.array(seed % 2 == 0)
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, feeds))  # type: ignore[arg-type]


def assert_equal(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))


COMMON = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("strategy", [PropagateCastOpsStrategy.NONE, PropagateCastOpsStrategy.FLOOD_FILL])
@given(model=models(EXACT + INEXACT), seed=st.integers(0, 9))
@COMMON
def test_flood_fill_below_level_2_changes_no_bit(
    strategy: PropagateCastOpsStrategy, level: int, model: onnx.ModelProto, seed: int
) -> None:
    result = rewritten(model, PropagateCasts(strategy=strategy, level=level))
    for actual, expected in zip(results(result, seed), results(model, seed), strict=True):
        assert_equal(actual, expected)


@given(model=models(EXACT), seed=st.integers(0, 9))
@COMMON
def test_insert_and_reduce_below_level_2_rounds_at_most_once(model: onnx.ModelProto, seed: int) -> None:
    pass_ = PropagateCasts(PropagateCastOpsStrategy.INSERT_AND_REDUCE, dtype=ir.DataType.FLOAT16)
    result = rewritten(model, pass_)
    for actual, expected in zip(results(result, seed), results(model, seed), strict=True):
        with np.errstate(over="ignore"):
            rounded = expected.astype(np.float16).astype(expected.dtype)
        assert actual.dtype == expected.dtype
        same = (actual == expected) | (actual == rounded) | (np.isnan(actual) & np.isnan(expected))
        assert same.all()


@pytest.mark.parametrize("strategy", PropagateCastOpsStrategy)
@given(model=models(EXACT + INEXACT))
@COMMON
def test_level_2_and_allowed_operators_keep_graphs_valid(
    strategy: PropagateCastOpsStrategy, model: onnx.ModelProto
) -> None:
    rewritten(model, PropagateCasts(strategy, 2, ("Mul", "ReduceSum")))
