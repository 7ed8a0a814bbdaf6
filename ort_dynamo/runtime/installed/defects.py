"""Known defects of ONNX Runtime's releases, and their workarounds: one table.

A workaround with a cost applies only if `Target.has_defect` is true. One without a cost applies to every target
("everywhere"), and a comment beside it names the defect. A slow kernel is a defect if our nodes are several times as
fast. When a release fixes a defect, its row gets an end. When no supported release has it any more, the row and the
workaround are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ort_dynamo.targets.target import TRAINING_PACKAGE
from ort_dynamo.torch_internals.release import release

__all__ = ["DEFECTS", "Builds", "Defect", "defects_of"]


@dataclass(frozen=True)
class Builds:
    """Releases of the training build or of all others.

    Attributes:
        training: whether they are releases of the training build.
        since: the first release, as (major, minor); None: all supported ones.
        before: the first release after them; None: no end yet.
    """

    training: bool
    since: tuple[int, ...] | None = None
    before: tuple[int, ...] | None = None

    def include(self, package: str, version: str) -> bool:
        """Check whether a build is one of them."""
        if self.training != (package == TRAINING_PACKAGE):
            return False
        number = release(version)
        return (self.since is None or self.since <= number) and (self.before is None or number < self.before)


TRAINING, STOCK = Builds(training=True), Builds(training=False)
ALL = (TRAINING, STOCK)
CPU = ("CPUExecutionProvider",)
CUDA = ("CUDAExecutionProvider",)


@dataclass(frozen=True)
class Defect:
    """One row of the table.

    Attributes:
        name: the argument of `Target.has_defect`.
        builds: the builds that have it.
        wrong: the wrong behaviour.
        avoided_by: the modules that work around it, as paths from `ort_dynamo/`.
        providers: the providers whose kernels have it; None for all, or if it is no kernel.
        everywhere: whether the workaround applies to every target.
    """

    name: str
    builds: Sequence[Builds]
    wrong: str
    avoided_by: Sequence[str]
    providers: Sequence[str] | None = None
    everywhere: bool = False


def defects_of(package: str, version: str, provider: str) -> frozenset[str]:
    """Return the names of the defects of one provider of one build; graph keys contain them."""
    return frozenset(
        defect.name
        for defect in DEFECTS
        if any(builds.include(package, version) for builds in defect.builds)
        and (defect.providers is None or provider in defect.providers)
    )


DEFECTS = (
    # -- wrong results -------------------------------------------------------------------------------------------
    Defect(
        "sqrt_of_float32",
        (TRAINING,),
        "Sqrt of float32: nan of inf, 0 of -0, 0 of a positive subnormal number, and inf of a negative one.",
        ("lowering/ops/elementwise/unary.py",),
    ),
    Defect(
        "sigmoid_below_zero",
        ALL,
        "Sigmoid of float32 has an absolute error of 1e-7 and is 0 below -18, where the right value is 1e-8: its "
        "logarithm and the gradient of that are wrong. Of float64 it is 1 minus the sigmoid of the other sign.",
        ("lowering/recipes/sigmoid.py",),
        CPU,
    ),
    Defect(
        "erf_of_nan",
        (TRAINING,),
        "Erf of nan is 1.",
        ("lowering/ops/special/error_function.py",),
    ),
    Defect(
        "layer_norm_variance",
        (TRAINING,),
        "LayerNormalization takes the variance as mean(x²) - mean(x)², which loses all digits where the mean is large "
        "beside the deviation (off by 0.36 for mean 300 and deviation 1). Stock builds did so up to 1.26.",
        ("lowering/ops/layers/normalization.py",),
        CPU,
    ),
    Defect(
        "int64_order",
        (STOCK,),
        "Max, Min, Clip and Sign compare the lower halves of two int64 as if they had a sign: max(0, 2^31) is 0.",
        ("lowering/recipes/int64_order.py",),
        CPU,
    ),
    Defect(
        "integer_sums_in_float64",
        (STOCK,),
        "ReduceSum and ReduceProd compute integers in float64, which has 53 bits.",
        ("lowering/recipes/sums/accurate_sum.py",),
    ),
    Defect(
        "integers_reduced_in_float32",
        ALL,
        "ReduceSum, ReduceMax and ReduceMin cast integers to float32, which has 24 bits, for cuDNN (reduction_ops.cc "
        "of the published source; not seen on a device).",
        ("lowering/recipes/sums/accurate_sum.py", "lowering/ops/reductions/reduction.py"),
        CUDA,
    ),
    Defect(
        "arg_max_of_equals",
        ALL,
        "ArgMax and ArgMin of CUDA take no integers, and need not give the first of equal numbers: they are cuDNN's "
        "reductions (reduction_ops.cc of the published source; not seen on a device).",
        (
            "lowering/recipes/first_index.py",
            "lowering/ops/reductions/ordering.py",
            "lowering/ops/images/fractional_pool.py",
        ),
        CUDA,
    ),
    Defect(
        "layer_norm_of_one",
        ALL,
        "LayerNormalization refuses rows of one element (layer_norm.cc of the published source; not seen on a device).",
        ("lowering/ops/layers/normalization.py",),
        CUDA,
    ),
    Defect(
        "max_pool_misses_nan",
        ALL,
        "MaxPool loses a nan that is not its window's first place, and the training build gives places outside the "
        "tensor for windows of nothing but -inf.",
        ("lowering/ops/images/max_pool.py",),
        CPU,
    ),
    Defect(
        "conv_grad_of_groups",
        (TRAINING,),
        "ConvGrad with groups writes beyond its buffers in one and in three dimensions.",
        ("lowering/ops/images/convolution.py",),
    ),
    Defect(
        "empty_products",
        (TRAINING,),
        "A product of empty matrices is left as its memory was found, or divides by zero, which ends the process. "
        "Sizes that are known to be zero are seen to for every target; one that depends on the data cannot be.",
        ("lowering/ops/products/matmul.py", "lowering/ops/products/grouped_matmul.py"),
    ),
    Defect(
        "optimizers_read_empty_constants",
        (TRAINING,),
        "The optimizer NoopElimination takes an empty constant for a zero and loses the output of a sum with it; it is "
        "left out everywhere. DivMulFusion reads the first element of an empty dividend, and ends the process.",
        ("runtime/installed/capabilities.py",),
    ),
    Defect(
        "noop_elimination_loses_signs",
        ALL,
        "The optimizer NoopElimination takes x + 0 and x - -0 for x. They are 0 where x is -0.",
        ("runtime/installed/capabilities.py",),
        everywhere=True,
    ),
    Defect(
        "conv_fusion_reads_inputs_of_if",
        (TRAINING,),
        "The optimizer ConvActivationFusion ends the process if only the branches of an If read a convolution, and "
        "they read the result of another node, too.",
        ("runtime/installed/capabilities.py",),
    ),
    Defect(
        "rules_lose_edges",
        (STOCK,),
        "The optimizers PreShapeNodeElimination and DivMulFusion give a node another input and leave out the edge to "
        "it. A later rule removes the node that makes it, and the model is invalid.",
        ("runtime/installed/capabilities.py",),
    ),
    Defect(
        "fusions_without_double",
        ALL,
        "Fusions of products and of GELU make contrib operators of float64 nodes, which have no float64 kernel.",
        ("runtime/installed/capabilities.py",),
    ),
    Defect(
        "fused_norms_without_statistics",
        ALL,
        "SkipLayerNormFusion makes one SkipLayerNormalization of a sum and its layer norm, with all three outputs, and "
        "CUDA's kernel writes neither mean nor deviation (skip_layer_norm.cc): gradients come from what the memory "
        "held. Where the statistics go to the host, each is a synchronous copy, too. EmbedLayerNormFusion ends the "
        "process where positions do not begin with a constant.",
        ("runtime/installed/capabilities.py",),
        CUDA,
    ),
    Defect(
        "extremes_of_infinity",
        ALL,
        "ReduceMax of nothing but -inf, and ReduceMin of inf, give another number (seen on an H200: such a row's "
        "softmax was taken for one that is not masked).",
        ("lowering/ops/reductions/reduction.py", "lowering/ops/layers/softmax.py"),
        CUDA,
    ),
    Defect(
        "kernels_refuse_nothing",
        ALL,
        "The reductions refuse an axis of size 0 (PrepareForReduce in reduction_ops.cc), and Trilu a matrix without "
        "elements. A node with such a tensor is torch's.",
        ("lowering/translate.py",),
        CUDA,
    ),
    Defect(
        "transposes_are_moved",
        ALL,
        "The transpose optimizer moves a transpose through a sum where nobody else reads what is between, so the last "
        "bits of a gradient would depend on what is recomputed.",
        ("runtime/installed/capabilities.py",),
    ),
    Defect(
        "gradients_without_shapes",
        (TRAINING,),
        "MaxPoolGrad and AveragePoolGrad end the process when a session with them is opened and a shape is not known.",
        ("runtime/installed/capabilities.py",),
        everywhere=True,
    ),
    Defect(
        "identity_transpose_before_gemm",
        (TRAINING,),
        "A Transpose that changes nothing, before a Gemm, is taken for one that transposes.",
        ("lowering/builder.py",),
        everywhere=True,
    ),
    Defect(
        "expand_to_nothing",
        ALL,
        "The optimizer takes an Expand to the constant size 0 for one to size 1, and removes it if no other size "
        "changes: the result has elements.",
        ("lowering/recipes/empty_expand.py",),
        everywhere=True,
    ),
    Defect(
        "last_axis_of_nothing",
        ALL,
        "Reductions of a tensor without elements leave the axes as they are that count from the end.",
        (
            "lowering/ops/layers/attention.py",
            "lowering/ops/layers/embedding.py",
            "lowering/ops/layers/embedding_bag.py",
            "lowering/ops/reductions/segment.py",
        ),
        CPU,
        everywhere=True,
    ),
    Defect(
        "transposed_vector_fusion",
        ALL,
        "The fusion of Transpose and MatMul errs where the other operand is a vector.",
        ("lowering/ops/products/matmul.py",),
        everywhere=True,
    ),
    Defect(
        "sigmoid_product_fusion",
        (TRAINING,),
        "x * Sigmoid(w) is fused into a kernel that there is for float32 only.",
        ("lowering/ops/elementwise/activation.py",),
        everywhere=True,
    ),
    Defect(
        "pad_of_no_axis",
        ALL,
        "Pad fails, or leaves its result unwritten (1.19.2), where negative widths cut off a whole axis.",
        ("lowering/ops/images/pad.py",),
        everywhere=True,
    ),
    Defect(
        "empty_top_k",
        (TRAINING,),
        "TopK of nothing divides by zero, which ends the process.",
        ("lowering/ops/reductions/ordering.py",),
        everywhere=True,
    ),
    Defect(
        "empty_loops",
        (TRAINING,),
        "A loop over an empty constant cannot be folded, and the model is refused.",
        ("lowering/ops/elementwise/integer.py", "lowering/ops/special/orthogonal_polynomials.py"),
        everywhere=True,
    ),
    Defect(
        "integer_division_traps",
        ALL,
        "An integer division by zero, and one of the least integer by -1, end the process.",
        ("lowering/ops/elementwise/quotient.py", "lowering/ops/elementwise/integer.py"),
        CPU,
        everywhere=True,
    ),
    Defect(
        "comparisons_lose_nan",
        ALL,
        "ReduceMax and ReduceMin, and scatters of a maximum or minimum, lose a nan.",
        (
            "lowering/ops/reductions/reduction.py",
            "lowering/ops/memory/scatter.py",
            "lowering/ops/reductions/segment.py",
        ),
        everywhere=True,
    ),
    Defect(
        "double_log_softmax",
        ALL,
        "LogSoftmax of float64 takes the logarithm of at least 1e-20, also where the sum is nan.",
        ("lowering/ops/layers/softmax.py",),
        everywhere=True,
    ),
    Defect(
        "double_exp_of_infinity",
        ALL,
        "Exp of -inf is 2.2e-308 in float64.",
        ("lowering/ops/layers/softmax.py",),
        everywhere=True,
    ),
    Defect(
        "joined_casts_to_bool",
        ALL,
        "A Cast to bool is joined with the Cast before it, through whose dtype the number should have gone.",
        ("lowering/ops/elementwise/binary.py",),
        everywhere=True,
    ),
    Defect(
        "fast_gelu_of_no_dimensions",
        ALL,
        "FastGelu stops at a tensor of no dimensions.",
        ("lowering/ops/elementwise/activation.py",),
        everywhere=True,
    ),
    Defect(
        "scatter_nd_race",
        ALL,
        "ScatterND with a sum is a data race where an index comes twice.",
        ("lowering/recipes/sums/add_rows.py",),
        CPU,
        everywhere=True,
    ),
    # -- slow kernels --------------------------------------------------------------------------------------------
    Defect(
        "slow_leaky_relu",
        (TRAINING,),
        "LeakyRelu guesses each sign, a wrong one at the price of forty entries.",
        ("lowering/ops/elementwise/activation.py",),
    ),
    Defect(
        "slow_running_sum",
        (TRAINING,),
        "CumSum takes 100 ns an entry of one long line, and 1.5 over the first of two dimensions.",
        ("lowering/recipes/sums/running_sum.py",),
        CPU,
    ),
    Defect(
        "slow_running_sum_of_integers",
        (TRAINING,),
        "CumSum over the last dimension takes 3 to 8 ns an entry of integers, too. Stock builds are as fast at them as "
        "they are over the first dimension.",
        ("lowering/ops/reductions/scan.py",),
        CPU,
    ),
    Defect(
        "slow_pools_of_tiles",
        (TRAINING,),
        "Averages of windows that tile an image take longer than products with matrices.",
        ("lowering/ops/images/avg_pool.py",),
    ),
    Defect(
        "slow_scatter_along_leading_axes",
        (STOCK,),
        "ScatterElements along any axis but the last takes 8 to 21 ns an entry, on a flat tensor 5.",
        ("lowering/recipes/scatter_indices.py",),
        CPU,
    ),
)
