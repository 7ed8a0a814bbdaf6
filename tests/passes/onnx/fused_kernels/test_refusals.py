"""Tests of groups that no kernel computes: each is refused for its reason, and its graph computes the same."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from generated_graphs import inputs_of
from test_fuse_kernels import HEADER, assert_fused_alike, fused

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.fused_kernels.group import Group
from ort_dynamo.passes.onnx.fused_kernels.group_kernel import kernel_of
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError, regrouped
from ort_dynamo.passes.onnx.fused_kernels.repeated import read_by
from ort_dynamo.passes.onnx.fused_kernels.sizes import ValueSizes

ZERO, LAST = "int64[1] zero = {0}", "int64[1] last = {-1}"


def whole(model: ir.Model, columns: Sequence[Size]) -> None:
    """Make one kernel of all nodes of a graph; constants are no nodes of it."""
    infer_missing_types(model, shapes=True)
    nodes = [node for node in model.graph if node.op_type != "Constant"]
    group = Group(tuple(nodes), tuple(read_by(nodes)), tuple(model.graph.outputs), tuple(columns))
    kernel_of(group, ValueSizes())


CASES = {
    "the rows are too long to be summed in parts": (
        f"g (float[256,40000] x) => (float[256,40000] y, float[40000] s) <{ZERO}> {{"
        " y = Softmax<axis=-1>(x)  s = ReduceSum<keepdims=0>(y, zero) }",
        [40000],
    ),
    "the rows of a sum are not the rows of the kernel, or its columns are symbolic": (
        f"g (float[5,N] x) => (float[N] s) <{ZERO}> {{ a = Exp(x)  s = ReduceSum<keepdims=0>(a, zero) }}",
        [Size(1, (0,))],
    ),
    "the columns of a sum are not the columns of the kernel": (
        f"g (float[8,4,6] x) => (float[8,4,6] y, float[4,6] s) <{ZERO}> {{"
        " y = Softmax<axis=-1>(x)  s = ReduceSum<keepdims=0>(y, zero) }",
        [6],
    ),
    "a sum over rows is read in another order than the order of the columns": (
        f"g (float[8,4,4] x) => (float[8,4,4] y) <{ZERO}> {{"
        " s = ReduceSum<keepdims=0>(x, zero)  t = Transpose<perm=[1,0]>(s)  y = Mul(x, t) }",
        [4, 4],
    ),
    "a reshape splits the axis of a piece": (
        "g (float[10,6] x) => (float[5,12] y) <int64[2] wide = {5, 12}, int64[1] three = {3}, int64[1] six = {6},"
        " int64[1] one = {1}> {"
        " a = Exp(x)  b = Reshape(a, wide)  c = Slice(b, three, six, one)  y = Concat<axis=1>(c, c, c, c) }",
        [],
    ),
    "an index selects from an axis of symbolic size": (
        "g (float[5,N] x, int64[5,1] i) => (float[5,1] y) { a = GatherElements<axis=1>(x, i)  y = Exp(a) }",
        [],
    ),
    "no loop traverses the axis of a ScatterElements": (
        "g (float[5,12] x, int64[5,1] i, float[5,1] u) => (float[5,12] y)"
        " <int64[1] four = {4}, int64[1] eight = {8}, int64[1] one = {1}> {"
        " a = ScatterElements<axis=1>(x, i, u)  b = Slice(a, four, eight, one)  y = Concat<axis=1>(b, b, b) }",
        [],
    ),
    "the inputs of a Concat have no large equal pieces": (
        "g (float[5,2] x, float[5,7] z) => (float[5,9] y) { a = Concat<axis=1>(x, z)  y = Exp(a) }",
        [],
    ),
    "a Slice is not one of several equal pieces": (
        "g (float[5,12] x) => (float[5,8] y) <int64[1] four = {4}, int64[1] all = {12}, int64[1] one = {1}> {"
        " a = Slice(x, four, all, one)  y = Exp(a) }",
        [],
    ),
    "a Slice is not one of several equal pieces, nor several of them": (
        "g (float[5,40] x, float[5,8] z) => (float[5,32] y)"
        " <int64[1] four = {4}, int64[1] end = {28}, int64[1] one = {1}> {"
        " a = Slice(x, four, end, one)  b = Exp(z)  y = Concat<axis=1>(b, a) }",
        [],
    ),
    "no loop traverses the inputs of a Concat": (
        "g (float[5,4] x, float[5,4] z) => (float[5,8] y)"
        " <int64[1] zero = {0}, int64[1] four = {4}, int64[1] one = {1}> {"
        " a = Concat<axis=1>(x, z)  b = Slice(a, zero, four, one)  y = Concat<axis=1>(b, b) }",
        [],
    ),
    "the rows of a reduction run along the columns of the kernel": (
        f"g (float[6,6] x) => (float[6,6] y) <{LAST}> {{"
        " m = ReduceMax<keepdims=1>(x, last)  t = Transpose<perm=[1,0]>(m)  y = Sub(x, t) }",
        [6],
    ),
    "a result per row is read in another order than it is computed": (
        "g (float[5,4,4] x) => (float[5,4,4] y) {"
        " a = LayerNormalization<axis=1>(x, x)  t = Transpose<perm=[0,2,1]>(a)  y = Add(x, t) }",
        [4, 4],
    ),
    "the reduced axes have a symbolic size": (
        f"g (float[5,N] x) => (float[5,N] y) <{LAST}> {{ m = ReduceMax<keepdims=1>(x, last)  y = Sub(x, m) }}",
        [Size(1, (0,))],
    ),
    "an offset depends on several symbols": (
        "g (float[2,N,2,M] x) => (float[2,N,2,M] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2},"
        " int64[1] axis = {0}, int64[1] other = {2}> {"
        " a = Slice(x, one, two, axis)  b = Slice(a, one, two, other)"
        "  c = Concat<axis=0>(b, b)  y = Concat<axis=2>(c, c) }",
        [],
    ),
    "no input has a dimension for 1 of the symbols": (
        'g (float["2*N",6] x) => (float[N,12] y) <int64[2] wide = {-1, 12}> { a = Exp(x)  y = Reshape(a, wide) }',
        [],
    ),
    "a sum over rows depends on another sum over rows": (
        f"g (float[8,16] x) => (float[16] u) <{ZERO}> {{"
        " s = ReduceSum<keepdims=0>(x, zero)  c = Sub(x, s)  t = ReduceSum<keepdims=0>(c, zero)  u = Exp(t) }",
        [16],
    ),
    "a step that depends on a sum over rows loads conditionally or by an index": (
        f"g (float[8,32] x, float[16] p, float[16] q) => (float[32] y) <{ZERO}> {{"
        " s = ReduceSum<keepdims=0>(x, zero)  c = Concat<axis=0>(p, q)  y = Mul(s, c) }",
        [32],
    ),
}


@pytest.mark.parametrize("reason", CASES)
def test_a_group_that_no_kernel_computes_is_refused(reason: str) -> None:
    text, columns = CASES[reason]
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    with pytest.raises(CannotFuseError) as refused:
        whole(model, [size if isinstance(size, Size) else Size(size) for size in columns])
    assert str(refused.value) == reason


@pytest.mark.parametrize("reason", CASES)
def test_its_graph_computes_the_same(reason: str) -> None:
    text, _ = CASES[reason]
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, fused(text), inputs_of(plain, 0), 1e-5)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 6, 2), "the tensor has more elements than the loops visit"),
        ((4, 2), "the loops visit more points than the tensor has elements"),
        ((3, 8), "the loops' trip counts do not divide the tensor's axes"),
    ],
)
def test_loops_that_do_not_fit_a_tensor(shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(CannotFuseError) as refused:
        regrouped([Size(4), Size(2), Size(3)], range(3), [Size(size) for size in shape])
    assert str(refused.value) == reason
