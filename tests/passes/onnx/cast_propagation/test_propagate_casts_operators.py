"""Each operator in the table of those that commute with rounding, alone: it becomes narrow, and no bit changes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_dynamo.passes.onnx import PropagateCasts
from ort_dynamo.passes.onnx.cast_propagation.narrowing_rules import COMPUTES_WIDE, EXACT, LEVEL_2, allowed_operators

CALLS = {
    "Abs": "Abs (v)",
    "Concat": "Concat <axis = 1> (v, v)",
    "DepthToSpace": "DepthToSpace <blocksize = 2> (v)",
    "Expand": "Expand (v, shape)",
    "Flatten": "Flatten (v)",
    "Gather": "Gather <axis = 1> (v, one)",
    "GatherElements": "GatherElements (v, ones)",
    "GatherND": "GatherND (v, pair)",
    "Identity": "Identity (v)",
    "Neg": "Neg (v)",
    "Pad": "Pad (v, pads, fill)",
    "Relu": "Relu (v)",
    "Reshape": "Reshape (v, flat)",
    "Slice": "Slice (v, one, two, one)",
    "SpaceToDepth": "SpaceToDepth <blocksize = 2> (v)",
    "Split": "Split <axis = 1, num_outputs = 1> (v)",
    "Squeeze": "Squeeze (v)",
    "Tile": "Tile (v, shape)",
    "Transpose": "Transpose (v)",
    "Trilu": "Trilu (v)",
    "Unsqueeze": "Unsqueeze (v, one)",
    "Where": "Where (mask, v, fill)",
}

INPUTS = "g ({} x, bool[1, 4, 2, 2] mask, int64[1, 4, 2, 2] ones) => ({} y) "
CONSTANTS = """<int64[4] shape = {2, 4, 2, 2}, int64[1] flat = {16}, int64[1] one = {1}, int64[1] two = {2},
    int64[1, 2] pair = {0, 1}, int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 2}, float fill = {0.25}>"""


def test_every_exact_operator_is_tried() -> None:
    assert set(CALLS) == EXACT


def rewritten(text: str, dtype: ir.DataType) -> tuple[list[str], list[npt.NDArray[Any]]]:
    """The operators after the pass, and the results before and after."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    numpy = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16}[dtype]
    drawn = np.random.default_rng(0).normal(size=(1, 4, 2, 2)) * 1e5  # float16 overflows in places
    with np.errstate(over="ignore"):
        x = drawn.astype(np.float32 if "(float[1" in text else numpy)
    feeds = {"x": x, "mask": drawn > 0, "ones": np.zeros((1, 4, 2, 2), np.int64)}
    results = []
    for _ in range(2):
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        with np.errstate(over="ignore", invalid="ignore"):
            results.append(ReferenceEvaluator(proto).run(None, feeds)[0])  # type: ignore[index,arg-type]
        PropagateCasts(dtype=dtype).propagate(model)
    return [node.op_type for node in model.graph], results


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", CALLS)
def test_an_exact_operator_between_a_widening_and_float32(name: str, dtype: ir.DataType) -> None:
    # The Slice behind it makes the move pay for the operators that make their operand larger.
    text = INPUTS.format(f"{dtype.name.lower()}[1, 4, 2, 2]", "float[N]") + CONSTANTS
    body = f"{{ v = Cast <to = 1> (x) c = {CALLS[name]} f = Reshape (c, all) d = Slice (f, one, two) y = Sqrt (d) }}"
    operators, (before, after) = rewritten(text[:-1] + ", int64[1] all = {-1}>" + body, dtype)
    assert operators == [name, "Reshape", "Slice", "Cast", "Sqrt"]
    assert before.dtype == after.dtype == np.float32
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"Gather", "GatherND", "Slice"}))
def test_an_exact_operator_between_float32_and_a_rounding(name: str, dtype: ir.DataType) -> None:
    text = INPUTS.format("float[1, 4, 2, 2]", f"{dtype.name.lower()}[N]") + CONSTANTS
    body = f"{{ v = Sqrt (x) c = {CALLS[name]} f = Reshape (c, all) y = Cast <to = {dtype.value}> (f) }}"
    operators, (before, after) = rewritten(text[:-1] + ", int64[1] all = {-1}>" + body, dtype)
    assert operators == ["Sqrt", "Cast", name, "Reshape"]
    assert before.dtype == after.dtype == dtype.numpy()
    np.testing.assert_array_equal(after.astype(np.float32), before.astype(np.float32))


def test_levels_contain_one_another() -> None:
    zero, one, two = (allowed_operators(level, ["Mul"], layer_norm=False) for level in (0, 1, 2))
    assert zero == {"Mul"}
    assert one == EXACT | {"Mul"}
    assert two == EXACT | LEVEL_2 | {"Mul"}
    assert not EXACT & (COMPUTES_WIDE | LEVEL_2)
    assert "LayerNormalization" in allowed_operators(0, [], layer_norm=True)
