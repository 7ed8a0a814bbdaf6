"""Matmuls of groups of rows, each with its own matrix."""

from __future__ import annotations

import pytest
import torch

from ort_dynamo.errors import DuplicateLoweringError
from ort_dynamo.lowering.registry import named_lowering
from ort_dynamo.testing import assert_like_eager

pytest.importorskip("transformers.integrations.moe")  # defines the operator
if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
    pytest.skip("this transformers has no operator of its own yet", allow_module_level=True)

HALF = torch.bfloat16
ENDS = {"empty ones": [4, 4, 20, 24], "one": [0, 0, 0, 24], "rows of none": [0, 8, 8, 20], "none": [0, 0, 0, 0]}


def r(*sizes, dtype=torch.float32):
    return torch.randn(sizes, dtype=dtype, requires_grad=True)


def fallback(rows, matrices, ends):
    return torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_operator_of_transformers_equals_eager(ends, dtype):
    assert_like_eager(fallback, r(24, 16), r(4, 16, 32), torch.tensor(ends, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes_equal_eager(dtype):
    assert_like_eager(fallback, r(24, 16, dtype=dtype), r(4, 16, 32, dtype=dtype), torch.tensor([4, 4, 20, 24]))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_transposed_matrices_equal_eager(dynamic):
    def transposed(rows, matrices, ends):
        return fallback(rows, matrices.transpose(1, 2), ends)

    assert_like_eager(transposed, r(24, 16), r(4, 32, 16), torch.tensor([4, 4, 20, 24]), dynamic=dynamic)


@pytest.mark.parametrize("frozen", ["rows", "matrices"])
def test_one_gradient_alone_equals_eager(frozen):
    rows, matrices = r(24, 16), r(4, 16, 32)
    (rows if frozen == "rows" else matrices).requires_grad_(False)
    assert_like_eager(fallback, rows, matrices, torch.tensor([4, 4, 20, 24]))


PAIRS = {
    "rows and matrices": ((24, 16), (4, 16, 32)),
    "matrices and columns": ((4, 32, 16), (16, 24)),
    "columns and rows": ((16, 24), (24, 8)),
}


@pytest.mark.parametrize(("left", "right"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("ends", [[4, 4, 20, 24], [0, 8, 8, 24]], ids=str)
def test_torch_grouped_mm_equals_eager(left, right, ends):
    def grouped(a, b, offs):
        return torch.nn.functional.grouped_mm(a, b, offs=offs)

    # Its fake kernel takes operands in the layouts of a GPU's: one row by row, the other column by column.
    a, b = r(*left, dtype=HALF), r(*right[:-2], right[-1], right[-2], dtype=HALF)
    offs = torch.tensor(ends, dtype=torch.int32)
    assert_like_eager(lambda a, b, offs: grouped(a, b.mT, offs), a, b, offs)


def test_torch_grouped_mm_of_equal_groups_equals_eager():
    assert_like_eager(torch.nn.functional.grouped_mm, r(4, 16, 32, dtype=HALF), r(4, 32, 8, dtype=HALF))


def test_a_name_has_one_lowering():
    with pytest.raises(DuplicateLoweringError, match="grouped_mm_fallback"):
        named_lowering("transformers.grouped_mm_fallback.default")(fallback)
