"""Graph before, graph after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.passes.onnx.fuse_cross_entropy_gradient import FuseCrossEntropyGradient
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import assert_rewrites

BEFORE = """<ir_version: 10, opset_import: ["" : 20]>
g (float[4, 3] y, int64[4, 1] i, float[4, 1] u) => (float[4, 3] d)
<int64[1] flat = {-1}, int64[1] none = {0}, int64[2] empty = {0, 0}, int64[4] pads = {0, 0, 4, 3}, int64[1] axes = {1}>
{
    f = Reshape (y, flat)
    s = Slice (f, none, none, none)
    e = Reshape <allowzero: int = 1> (s, empty)
    z = Pad (e, pads)
    g = ScatterElements <axis: int = 1> (z, i, u)
    t = ReduceSum <keepdims: int = 1> (g, axes)
    x = Exp (y)
    p = Mul (x, t)
    d = Sub (g, p)
}
"""

AFTER = BEFORE.replace(
    "    d = Sub (g, p)\n",
    """    d_slope = Neg (u)
    d_product = Mul (x, d_slope)
    d = ScatterElements <axis: int = 1, reduction: string = "add"> (d_product, i, u)
""",
)
"""The graph after the pass; dead nodes are left to the pass that removes them."""


def test_no_matrix_of_the_picked_entries_is_made() -> None:
    assert_rewrites(FuseCrossEntropyGradient(), BEFORE, AFTER)


def test_the_factors_may_be_the_other_way_round_and_the_axis_counted_from_the_end() -> None:
    def turned(text: str) -> str:
        return text.replace("Mul (x, t)", "Mul (t, x)").replace("axes = {1}", "axes = {-1}")

    assert_rewrites(FuseCrossEntropyGradient(), turned(BEFORE), turned(AFTER))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Sub (g, p)", "Sub (p, g)"),
        ("Sub (g, p)", "Add (g, p)"),
        ("Exp (y)", "Tanh (y)"),
        ("axes = {1}", "axes = {0}"),
        (
            "    t = ReduceSum <keepdims: int = 1> (g, axes)",
            "    o = Tanh (y)\n    t = ReduceSum <keepdims: int = 1> (o, axes)",
        ),
        ("<axis: int = 1> (z, i, u)", '<axis: int = 1, reduction: string = "add"> (z, i, u)'),
        ("z = Pad (e, pads)", "one = Constant <value_float: float = 1.0> ()\n    z = Pad (e, pads, one)"),
        ("z = Pad (e, pads)", "z = Tanh (y)"),
        ("int64[4, 1] i, float[4, 1] u", "int64[4, 2] i, float[4, 2] u"),
        ("int64[4, 1] i, float[4, 1] u", "int64[2, 1] i, float[2, 1] u"),
        ("Exp (y)", "Exp (t)"),
    ],
    ids=[
        *("swapped", "sum", "not_exp", "columns", "sum_of_another", "added", "padded_by_one", "not_zero", "two", "few"),
        "broadcast",
    ],
)
def test_similar_graphs_are_left_alone(old: str, new: str) -> None:
    text = BEFORE.replace(old, new)
    assert text != BEFORE
    assert_rewrites(FuseCrossEntropyGradient(), text, text)


@pytest.mark.parametrize("opset", [14, 15])
def test_a_model_whose_scatter_cannot_add_is_left_alone(opset: int) -> None:
    text = BEFORE.replace('"" : 20', f'"ai.onnx" : {opset}')
    assert_rewrites(FuseCrossEntropyGradient(), text, text)


@pytest.mark.parametrize(
    ("shape", "modified"), [("?, 3", False), ("n, 3", True), ("4, ?", False), ("n, m", True)], ids=str
)
def test_unnamed_dimensions_equal_none(shape: str, modified: bool) -> None:
    rows = shape.partition(",")[0]
    text = BEFORE.replace("4, 1]", f"{rows}, 1]").replace("4, 3]", f"{shape}]")
    model = ir.from_onnx_text(text.replace("int64[1] axes", f"float[{shape}] g, int64[1] axes"))
    assert any(value.name == "g" and value.shape is not None for node in model.graph for value in node.outputs)
    for value in model.graph.outputs[0], *(value for node in model.graph for value in node.outputs):
        value.dtype = value.dtype or ir.DataType.FLOAT
    assert FuseCrossEntropyGradient()(model).modified == modified


def test_half_is_left_alone() -> None:
    text = BEFORE.replace("float[4", "float16[4")
    assert_rewrites(FuseCrossEntropyGradient(), text, text)


def test_the_fused_gradient_has_the_same_bits() -> None:
    generator = np.random.default_rng(0)
    given = {
        "y": np.log(generator.dirichlet(np.ones(3), 4)).astype(np.float32),
        "i": np.array([[0], [2], [1], [0]]),
        "u": np.array([[-0.25], [-0.25], [0.0], [-1.5]], np.float32),
    }
    results = []
    for text in (BEFORE, AFTER):
        model = ir.to_proto(ir.from_onnx_text(text)).SerializeToString()
        session = onnxruntime().InferenceSession(model, providers=["CPUExecutionProvider"])
        results.append(session.run(None, given)[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(16, 5), (4, 5, 3, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_cross_entropys_backward_has_one_scatter(
    tmp_path: Path, shape: tuple[int, ...], reduction: str, dynamic: bool
) -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction=reduction).sum()

    options = {"save_onnx": str(tmp_path)}
    compiled = torch.compile(loss, backend="ort_train", dynamic=dynamic, options=options)
    logits, target = torch.randn(shape, requires_grad=True), torch.randint(0, 5, (shape[0], *shape[2:]))
    target.view(-1)[1] = -100
    compiled(logits, target).backward()
    expected = torch.autograd.grad(loss(logits, target), logits)[0]
    torch.testing.assert_close(logits.grad, expected)
    (file,) = tmp_path.glob("backward*.onnx")
    operators = [node.op_type for node in onnx.load(file).graph.node]
    assert operators.count("ScatterElements") == 1
    assert {"Pad", "Sub", "ReduceSum"}.isdisjoint(operators)
