"""Sums over rows have enough programs to keep a device busy, whatever the shape of the tensor."""

from __future__ import annotations

import pytest
from test_fuse_kernels import fused

from ort_dynamo.graph.fused_op import FusedOp, Size
from ort_dynamo.passes.onnx.fuse_kernels import fused_ops
from ort_dynamo.passes.onnx.fused_kernels.column_sums import parts_of

ENOUGH = 384
"""Programs: about three for each multiprocessor of an H100."""

LARGE = [
    *[(1 << 20, 64), (1 << 20, 32), (1 << 20, 3), (1 << 18, 128), (200_704, 96), (200_704, 256), (50_176, 512)],
    *[(12_544, 1024), (3136, 512), (3136, 2048), (8192, 4096), (8232, 3072), (1000, 4096), (999_983, 64)],
]
"""Rows and columns: of images in channels_last, of a GPT, a ViT, and with a prime number of rows."""


def sums_of(rows: int | str, columns: int) -> list[FusedOp]:
    """The kernels of a sum over the rows of exp(x)."""
    text = f"""g (bfloat16[{rows},{columns}] x) => (float[{columns}] s) <int64[1] zero = {{0}}> {{
      wide = Cast<to=1>(x)
      e = Exp(wide)
      s = ReduceSum<keepdims=0>(e, zero)
    }}"""
    return [*fused_ops(fused(text))]


@pytest.mark.parametrize(("rows", "columns"), LARGE)
def test_large_tensors_are_summed_by_many_programs(rows: int, columns: int) -> None:
    first, second = sums_of(rows, columns)
    assert ENOUGH <= first.programs([]) <= 12 * ENOUGH
    parts = first.outputs[0].shape[0].factor
    assert second.programs([]) * 16 * 1024 >= parts * columns, "a program adds 1,024 sums of 16 columns at most"


@pytest.mark.parametrize("columns", [3, 64, 256, 4096])
def test_many_programs_sum_rows_whose_number_varies(columns: int) -> None:
    first, _ = sums_of("N", columns)
    for rows in (1, 1 << 20):
        assert ENOUGH <= first.programs([rows]) <= 12 * ENOUGH


@pytest.mark.parametrize("rows", [100, 127, 256, 1000, 1024, 4096, 8192, 1 << 20])
def test_whole_rows_are_summed_by_a_program_on_each_multiprocessor(rows: int) -> None:
    parts = parts_of(Size(rows), 1024, whole=True).factor
    assert min(rows, 112) <= parts <= 1024


@pytest.mark.parametrize("rows", [1, 7, 8, 100, 128])
def test_few_rows_are_summed_at_once_in_large_tiles(rows: int) -> None:
    (only,) = sums_of(rows, 1 << 16)
    assert only.programs([]) * 1024 <= max(rows * (1 << 16), 16 * (1 << 16)), "a tile has 1,024 elements or more"


@pytest.mark.parametrize(
    ("batch", "positions", "columns"),
    [(4, 4096, 320), (16, 4096, 128), (2, 65_536, 64), (64, 1024, 320), (1024, 64, 128), (3, 99_856, 96), (8, 4900, 3)],
)
def test_images_are_summed_by_many_programs(batch: int, positions: int, columns: int) -> None:
    text = f"""g (float[{batch},{positions},{columns}] x) => (float[{batch},{columns}] s) <int64[1] one = {{1}}> {{
      e = Exp(x)
      s = ReduceSum<keepdims=0>(e, one)
    }}"""
    first = fused_ops(fused(text))[0]
    assert 200 <= first.programs([]) <= 12 * ENOUGH


@pytest.mark.parametrize("positions", [1024, 4096, 99_856])
def test_images_of_a_batch_that_varies_are_summed_in_equal_parts(positions: int) -> None:
    batch = Size(1, (0,))
    parts = parts_of(Size(positions) * batch, 320, whole=False, batch=batch)
    assert parts.symbols == batch.symbols
    assert positions % parts.factor == 0
    assert parts.factor * 8 * 5 >= ENOUGH, "parts of 8 images, times tiles of 64 columns"


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 15])
def test_few_rows_of_each_group_are_summed_in_large_tiles(rows: int) -> None:
    """The gradient of keys and values that several queries share is such a sum."""
    text = f"""g (float[64,{rows},4096] x) => (float[64,4096] s) <int64[1] one = {{1}}> {{
      e = Exp(x)
      s = ReduceSum<keepdims=0>(e, one)
    }}"""
    (only,) = fused_ops(fused(text))
    assert only.programs([]) * 512 <= 64 * rows * 4096, "a tile has 512 elements or more"


@pytest.mark.parametrize("batch", [2, 3, 64, 1000])
@pytest.mark.parametrize("whole", [False, True])
def test_a_part_has_rows_of_one_image(batch: int, whole: bool) -> None:
    for rows in [*range(1, 300), 1369, 4096, 4099, 65_536]:
        parts = parts_of(Size(batch * rows), 320, whole=whole, batch=Size(batch)).factor
        assert parts % batch == 0, f"{rows} rows"
        assert rows % (parts // batch) == 0, f"{rows} rows"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("columns", [1, 64, 65, 1000, 50_304])
def test_no_part_is_empty(columns: int, whole: bool) -> None:
    for rows in [*range(1, 300), 1000, 4097, 65_535, 200_704, 999_983, 1 << 20, (1 << 20) + 1]:
        parts = parts_of(Size(rows), columns, whole=whole).factor
        assert 1 <= parts <= 1024, f"{rows} rows"
        size = -(-rows // parts)
        assert (parts - 1) * size < rows, f"{rows} rows"
