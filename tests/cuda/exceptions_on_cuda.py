"""The operators that are native on the CPU and stay in eager on CUDA, by what has no kernel there.

test_operators_on_cuda.py asserts it both ways: what misses a kernel is named here, and what is named misses it.
"""

from __future__ import annotations

__all__ = ["EXCEPTIONS", "REASONS"]

BOTH, NEW, OLD = ("1.19.2", "1.31.1"), ("1.31.1",), ("1.19.2",)

INT64_EXTREME = "its kernel takes the extreme of int64 in float32"

REASONS = {
    "ArgMax": "No kernel takes integers, in 1.19.2 none at all at our opset. The first of equal numbers, which our "
    "forms count on, is not what cuDNN's reduction promises.",
    "ArgMin": "No kernel takes integers, in 1.19.2 none at all at our opset.",
    "BitShift": "No kernel for integers of 64 bits.",
    "BitwiseAnd": "No kernel for int64. Sums of int64 are taken in parts of their bits, since ReduceSum takes them in "
    "float32.",
    "BitwiseNot": "No kernel for int64.",
    "BitwiseOr": "No kernel for int64.",
    "BitwiseXor": "No kernel for int64.",
    "Einsum": "Products of integers: torch has no kernel for them on CUDA either.",
    "MatMul": "Products of integers: torch has no kernel for them on CUDA either.",
    "Pad": "Its kernels take floats and bool.",
    INT64_EXTREME: "Casts to float32 lose what exceeds 2^24.",
}
"""ONNX operator without a kernel for some dtype, or another reason -> why no other form is used."""

EXCEPTIONS = {
    ("ArgMax", "aten.argmax.default"): ("argmax float32", BOTH),
    ("ArgMax", "aten.argmin.default"): ("argmin float32", NEW),
    ("ArgMax", "aten.fractional_max_pool2d.default"): ("nn.functional.fractional_max_pool2d float32", BOTH),
    ("ArgMax", "aten.fractional_max_pool3d.default"): ("nn.functional.fractional_max_pool3d float32", BOTH),
    ("ArgMax", "aten.max.dim"): ("cumprod float32", BOTH),
    ("ArgMax", "aten.median.default"): ("median float32", BOTH),
    ("ArgMax", "aten.median.dim"): ("median float32", BOTH),
    ("ArgMax", "aten.min.dim"): ("min.reduction_with_dim float32", BOTH),
    ("ArgMax", "aten.mode.default"): ("mode float32", BOTH),
    ("ArgMin", "aten.argmin.default"): ("argmin int8", BOTH),
    ("BitShift", "aten.bitwise_left_shift.Scalar_Tensor"): ("nn.functional.interpolate.bicubic uint8", BOTH),
    ("BitShift", "aten.bitwise_left_shift.Tensor"): ("bitwise_left_shift int64", BOTH),
    ("BitwiseAnd", "aten.bitwise_and.Tensor"): ("bitwise_and int64", BOTH),
    ("BitwiseAnd", "aten.sum.default"): ("trace int64", BOTH),
    ("BitwiseAnd", "aten.sum.dim_IntList"): ("masked.std float32", BOTH),
    ("BitwiseNot", "aten.bitwise_not.default"): ("bitwise_not int64", BOTH),
    ("BitwiseOr", "aten.bitwise_or.Tensor"): ("bitwise_or int64", BOTH),
    ("BitwiseXor", "aten.__rshift__.Tensor"): ("nn.functional.interpolate.bicubic uint8", BOTH),
    ("BitwiseXor", "aten.bitwise_right_shift.Tensor"): ("bitwise_right_shift int64", BOTH),
    ("BitwiseXor", "aten.bitwise_xor.Tensor"): ("bitwise_xor int64", BOTH),
    ("Einsum", "aten._trilinear.default"): ("nn.functional.bilinear int64", BOTH),
    ("MatMul", "aten.addbmm.default"): ("addbmm int64", BOTH),
    ("MatMul", "aten.addmm.default"): ("addmm int64", BOTH),
    ("MatMul", "aten.addmv.default"): ("addmv int64", BOTH),
    ("MatMul", "aten.baddbmm.default"): ("baddbmm int64", BOTH),
    ("MatMul", "aten.bmm.default"): ("bmm int64", BOTH),
    ("MatMul", "aten.convolution.default"): ("nn.functional.conv2d int64", BOTH),
    ("MatMul", "aten.dot.default"): ("dot int64", BOTH),
    ("MatMul", "aten.mm.default"): ("mm int64", BOTH),
    ("MatMul", "aten.mv.default"): ("mv int64", BOTH),
    ("MatMul", "aten.vdot.default"): ("vdot int64", BOTH),
    ("Pad", "aten._embedding_bag.default"): ("nn.functional.embedding_bag float32", BOTH),
    ("Pad", "aten._embedding_bag_backward.default"): ("nn.functional.embedding_bag float32", BOTH),
    ("Pad", "aten._embedding_bag_per_sample_weights_backward.default"): ("nn.functional.embedding_bag float32", BOTH),
    ("Pad", "aten._segment_reduce_backward.default"): ("_segment_reduce.lengths float32", BOTH),
    ("Pad", "aten.constant_pad_nd.default"): ("constant_pad_nd int64", BOTH),
    ("Pad", "aten.convolution.default"): ("nn.functional.conv2d int64", BOTH),
    ("Pad", "aten.index_reduce.default"): ("index_reduce.mean int64", BOTH),
    ("Pad", "aten.mm.default"): ("mm int64", BOTH),
    ("Pad", "aten.reflection_pad1d.default"): ("nn.functional.pad.reflect int64", BOTH),
    ("Pad", "aten.reflection_pad2d.default"): ("nn.functional.pad.reflect int64", BOTH),
    ("Pad", "aten.repeat_interleave.Tensor"): ("repeat_interleave float32", BOTH),
    ("Pad", "aten.replication_pad1d.default"): ("nn.functional.pad.replicate int64", BOTH),
    ("Pad", "aten.replication_pad2d.default"): ("nn.functional.pad.replicate int64", BOTH),
    ("Pad", "aten.scatter_reduce.two"): ("scatter_reduce.mean int64", BOTH),
    ("Pad", "aten.segment_reduce.default"): ("_segment_reduce.lengths float32", BOTH),
    (INT64_EXTREME, "aten.amax.default"): ("amax int64", BOTH),
    (INT64_EXTREME, "aten.amin.default"): ("amin int64", BOTH),
    (INT64_EXTREME, "aten.max.default"): ("max.reduction_no_dim int64", BOTH),
    (INT64_EXTREME, "aten.max.dim"): ("max.reduction_with_dim int64", BOTH),
    (INT64_EXTREME, "aten.min.default"): ("min.reduction_no_dim int64", BOTH),
    (INT64_EXTREME, "aten.min.dim"): ("min.reduction_with_dim int64", BOTH),
}
"""(what is missing, overload) -> an operator of the database and a dtype that show it, the releases that miss it."""
