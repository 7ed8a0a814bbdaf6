"""Prices for the choice between torch and ONNX Runtime: one table for each kind of target.

A pass counts elements or operations by the example's sizes and multiplies by a price. `Target.prices` gives the table.
A price is a time or a ratio of times on one machine, with a note of the measurement. Another machine needs another
table, and no change of a pass.

The CPU's prices were measured on AVX-512, two cores, with torch 2.13 and ONNX Runtime 1.31.1. Those of the training
build were measured with onnxruntime-training 1.19.2 on the same machine. CUDA's are estimates: no device was measured.
Prices decide where a node runs, never how an island is built, so no cache key contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present

__all__ = [
    "CPU",
    "CPU_TRAINING",
    "CUDA",
    "ConvolutionPrices",
    "KernelPrices",
    "OperatorPrices",
    "Prices",
    "SavedWork",
    "SlowerOperator",
    "WholeGraphPrices",
]


@dataclass(frozen=True)
class WholeGraphPrices:
    """The change in time if torch runs all of a graph, for one multiplication.

    The unit is the time of one multiplication in a matmul.

    Attributes:
        convolution: the gain in a convolution.
        depthwise: the gain in a depthwise convolution, which is bound by memory.
        product: the loss in a matmul, with the nodes around it.
    """

    convolution: float
    depthwise: float
    product: float


@dataclass(frozen=True)
class ConvolutionPrices:
    """Prices of PlaceInTorch: one for each alternative to a graph that torch runs whole.

    Attributes:
        sharing_images: the alternative is convolutions in torch between sessions, and some convolve images. The gain
            is that of the channels_last layout.
        sharing: the same without convolutions in two dimensions, so without a layout to gain.
        contending: the alternative is a graph that sessions run whole, as torch's threads and a session's would wait
            for one another. There the gradient of a depthwise convolution is made of slices.
    """

    sharing_images: WholeGraphPrices
    sharing: WholeGraphPrices
    contending: WholeGraphPrices


@dataclass(frozen=True)
class SlowerOperator:
    """One operator that a session runs slower than torch does.

    Attributes:
        ratio: the session's time divided by torch's.
        saved: nanoseconds that torch saves for each element, on one thread; 0 where no graph is cut for it.
    """

    ratio: float
    saved: float = 0


@dataclass(frozen=True)
class OperatorPrices:
    """Prices of PlaceSlowerOperators.

    Attributes:
        cut: nanoseconds that torch's call and the call of one more session take.
        crossing: nanoseconds for each element that crosses, on one thread: it is in new memory, not in memory that a
            session has at hand.
        spinning: nanoseconds that a session loses at most if it follows an operator of torch: OpenMP's threads spin
            for so long after one.
        slower: overload -> its times. `passes/fx/torch_graph/slower_operators.py` has the form of each.
    """

    cut: float
    crossing: float
    spinning: float
    slower: Mapping[OpOverload, SlowerOperator]


@dataclass(frozen=True)
class SavedWork:
    """The work on a GPU that one kernel of torch saves over the nodes of a session.

    Attributes:
        launches: the number of saved kernel launches.
        passes: the number of saved passes over all elements.
    """

    launches: int
    passes: int


@dataclass(frozen=True)
class KernelPrices:
    """Prices of PlaceWholeKernels.

    Attributes:
        cut: microseconds that torch's call and the call of one more session take on the host.
        launch: microseconds that a small kernel takes.
        rate: bytes that a kernel reads or writes in a microsecond.
        width: bytes of an element in a session.
        normalizations: overload -> the work that torch's kernel saves.
    """

    cut: float
    launch: float
    rate: float
    width: int
    normalizations: Mapping[OpOverload, SavedWork]


@dataclass(frozen=True)
class Prices:
    """All prices of one kind of target; None if nothing is placed by them.

    Attributes:
        convolutions: prices of convolutions, and of the graph around them.
        operators: prices of single operators.
        kernels: prices of kernels that are many nodes in a session.
    """

    convolutions: ConvolutionPrices | None = None
    operators: OperatorPrices | None = None
    kernels: KernelPrices | None = None


# -- CPU -----------------------------------------------------------------------------------------------------------

_CONVOLUTIONS = ConvolutionPrices(
    sharing_images=WholeGraphPrices(convolution=0.3, depthwise=8.0, product=0.1),
    sharing=WholeGraphPrices(convolution=0.25, depthwise=2.0, product=0.35),
    contending=WholeGraphPrices(convolution=0.8, depthwise=15.0, product=0.35),
)
"""Measured: forward and gradients of single operators and of networks (bench/bench_convolution_step.py), torch in
channels_last. The training build has the same prices; it was not measured apart."""

_Row = tuple[SlowerOperator, SlowerOperator]

_SLOWER: Mapping[OpOverload, _Row] = present(
    {
        # Elementwise, of ten and more ONNX operators each.
        aten.nextafter.default: (SlowerOperator(56, 22), SlowerOperator(80, 37)),
        aten.frexp.Tensor: (SlowerOperator(11, 13), SlowerOperator(15, 22)),
        aten.atan2.default: (SlowerOperator(8.7, 7.5), SlowerOperator(38, 38)),
        aten.lgamma.default: (SlowerOperator(6.9, 16), SlowerOperator(8.7, 21)),
        aten.remainder.Scalar: (SlowerOperator(5.8, 5.2), SlowerOperator(19, 19)),
        aten.remainder.Tensor: (SlowerOperator(5.8, 5.2), SlowerOperator(19, 19)),
        # ONNX Runtime's Log alone takes three times as long as torch's log1p.
        aten.log1p.default: (SlowerOperator(6.2, 2.7), SlowerOperator(7.8, 3.8)),
        # Pow, whose result is exact where a product and Exp are not.
        aten.exp2.default: (SlowerOperator(15, 4.1), SlowerOperator(16, 4.1)),
        # Several passes over memory where torch has one. ONNX Runtime's own kernels differ at nan or infinity.
        aten.threshold.default: (SlowerOperator(6.9), SlowerOperator(33, 4.2)),
        aten.threshold_backward.default: (SlowerOperator(3.6), SlowerOperator(10)),
        aten.sign.default: (SlowerOperator(7.2), SlowerOperator(10)),
        aten.hardshrink.default: (SlowerOperator(5.1), SlowerOperator(6.3)),
        aten.hardshrink_backward.default: (SlowerOperator(3.3), SlowerOperator(2.3)),
        aten.softshrink.default: (SlowerOperator(3.6), SlowerOperator(3.6)),
        aten.softshrink_backward.default: (SlowerOperator(3.0), SlowerOperator(3.5)),
        aten.hardswish.default: (SlowerOperator(4.6), SlowerOperator(4.2)),
        aten.hardswish_backward.default: (SlowerOperator(5.1), SlowerOperator(5.1)),
        aten.hardsigmoid.default: (SlowerOperator(2.2), SlowerOperator(2.0)),
        aten.hardsigmoid_backward.default: (SlowerOperator(3.3), SlowerOperator(4.0)),
        aten._prelu_kernel.default: (SlowerOperator(8.2), SlowerOperator(8.6)),
        aten.rsqrt.default: (SlowerOperator(2.5), SlowerOperator(4.9)),
        aten.huber_loss.default: (SlowerOperator(5.4), SlowerOperator(6.0)),
        aten.huber_loss_backward.default: (SlowerOperator(2.5), SlowerOperator(2.3)),
        aten.smooth_l1_loss.default: (SlowerOperator(4.9), SlowerOperator(5.1)),
        aten.smooth_l1_loss_backward.default: (SlowerOperator(2.6), SlowerOperator(2.6)),
        aten.nll_loss_forward.default: (SlowerOperator(4.7), SlowerOperator(6.9)),
        aten.nll_loss_backward.default: (SlowerOperator(4.0), SlowerOperator(4.4)),
        aten.native_layer_norm.default: (SlowerOperator(1.4), SlowerOperator(2.9)),
        aten.native_layer_norm_backward.default: (SlowerOperator(3.4), SlowerOperator(2.6)),
        aten.native_group_norm.default: (SlowerOperator(3.0), SlowerOperator(2.9)),
        aten.native_group_norm_backward.default: (SlowerOperator(3.4), SlowerOperator(2.9)),
        aten.clone.default: (SlowerOperator(3.4), SlowerOperator(2.7)),
        aten.linalg_vector_norm.default: (SlowerOperator(5.3), SlowerOperator(6.3)),
        aten.prod.default: (SlowerOperator(4.6), SlowerOperator(4.8)),
        # Loops that all elements stay in for as long as one of them needs.
        aten.igamma.default: (SlowerOperator(5.4, 240), SlowerOperator(5.9, 260)),
        aten.igammac.default: (SlowerOperator(5.4, 240), SlowerOperator(5.9, 260)),
        # A scan is log2(n) operators on the whole tensor; CumSum, which is one, is not for these.
        aten.cummax.default: (SlowerOperator(7.2, 3.8), SlowerOperator(7.6, 4.1)),
        aten.cummin.default: (SlowerOperator(7.2, 3.8), SlowerOperator(7.6, 4.1)),
        aten.cumprod.default: (SlowerOperator(4.2, 2.3), SlowerOperator(4.5, 2.6)),
        # CumSum steps from entry to entry along the last dimension; ours transposes before and after.
        aten.cumsum.default: (SlowerOperator(3.1, 1.6), SlowerOperator(4.0, 2.4)),
        # ReduceProd multiplies one entry after another.
        aten.prod.dim_int: (SlowerOperator(5.1, 0.7), SlowerOperator(5.1, 0.8)),
        # Slice with a negative step copies entry by entry.
        aten.flip.default: (SlowerOperator(3.7, 0.85), SlowerOperator(3.6, 0.84)),
        # Gather, scatter and GatherElements with arithmetic on indices around them.
        aten._embedding_bag.default: (SlowerOperator(9.9, 3.4), SlowerOperator(9.0, 3.0)),
        aten._embedding_bag_forward_only.default: (SlowerOperator(9.9, 3.4), SlowerOperator(9.0, 3.0)),
        aten.grid_sampler_2d.default: (SlowerOperator(5.5, 14), SlowerOperator(5.8, 13)),
        aten.grid_sampler_2d_backward.default: (SlowerOperator(4.7, 30), SlowerOperator(4.8, 28)),
        aten.adaptive_max_pool2d.default: (SlowerOperator(4.0, 8.2), SlowerOperator(4.8, 8.2)),
        aten.upsample_nearest2d_backward.default: (SlowerOperator(3.3, 8.4), SlowerOperator(2.6, 5.9)),
        # ScatterElements reduces on one thread, entry by entry. torch's kernels take slices as a whole: of those, an
        # entry of index_add and scatter_add takes up to 8 ns longer than torch's, not 3.
        aten.index_add.default: (SlowerOperator(3.6, 2.8), SlowerOperator(3.9, 3.0)),
        aten.scatter.src: (SlowerOperator(3.4, 2.2), SlowerOperator(3.8, 2.7)),
        aten.scatter.value: (SlowerOperator(3.4, 2.2), SlowerOperator(3.8, 2.7)),
        aten.scatter_add.default: (SlowerOperator(3.1, 2.7), SlowerOperator(3.5, 3.0)),
        aten.scatter_reduce.two: (SlowerOperator(9.3, 4.7), SlowerOperator(6.7, 4.3)),
        aten.index_reduce.default: (SlowerOperator(26, 8.3), SlowerOperator(11, 6.0)),
        aten.index_copy.default: (SlowerOperator(15, 7.8), SlowerOperator(6.4, 5.1)),
        aten.col2im.default: (SlowerOperator(8.0, 6.7), SlowerOperator(7.1, 5.9)),
        aten.masked_scatter.default: (SlowerOperator(3.3, 9.3), SlowerOperator(11, 39)),
        aten.index_put.default: (SlowerOperator(2.4, 2.5), SlowerOperator(2.8, 2.1)),
        aten.embedding_dense_backward.default: (SlowerOperator(2.3, 3.0), SlowerOperator(2.1, 2.5)),
    }
)
"""Overload -> its times in ONNX Runtime 1.31.1 and in onnxruntime-training 1.19.2.

Measured: each operator as a graph of its own, a million float32 elements, one thread, beside eager in interleaved
rounds (bench/bench_operators.py). `ratio` of a gradient is that of forward and gradient together, and `saved` is the
difference to the forward alone. cummin, igammac, scatter.value, remainder.Tensor and the forward-only embedding bag
have the numbers of the overload beside them. exp2, col2im, masked_scatter, index_copy, index_reduce and scatter_reduce
were measured on an AMD EPYC, the best of 21 rounds, slices with 64 entries.

A row is there where a session took about three times eager's time or more, or, in gradients that many models have, a
few nanoseconds an element longer, and where no better form in ONNX is known. No graph is cut for pointwise operators of
a nanosecond or two, nor for normalizations, which stand in chains: a tensor that crosses a boundary costs half of one.
They are torch's where there is no boundary. Beside some stand the forward or the gradient that a graph has with them,
with the ratio of both.
"""


def _operators(column: int) -> OperatorPrices:
    """Give the prices of single operators by one runtime's column.

    Measured: an operator for which both take the same time, between matmuls, in torch beside in the session
    (docs/internals/placement.md has the times). Both runtimes have the same cut, crossing and spinning.
    """
    slower = {overload: row[column] for overload, row in _SLOWER.items()}
    return OperatorPrices(cut=10_000, crossing=0.5, spinning=5_000_000, slower=slower)


CPU = Prices(_CONVOLUTIONS, _operators(0))
"""Stock ONNX Runtime on a CPU."""

CPU_TRAINING = Prices(_CONVOLUTIONS, _operators(1))
"""The training build on a CPU."""

# -- CUDA ----------------------------------------------------------------------------------------------------------

_BATCH_NORM, _BATCH_NORM_GRADIENT = SavedWork(16, 6), SavedWork(14, 10)

_BY_CHANNEL: Mapping[OpOverload, SavedWork] = present(
    {
        aten._native_batch_norm_legit_functional.default: _BATCH_NORM,
        aten._native_batch_norm_legit.no_stats: _BATCH_NORM,
        aten._batch_norm_with_update_functional.default: _BATCH_NORM,
        aten.native_batch_norm_backward.default: _BATCH_NORM_GRADIENT,
        aten.batch_norm_backward.default: _BATCH_NORM_GRADIENT,
        aten.native_group_norm.default: SavedWork(10, 8),
        aten.native_group_norm_backward.default: SavedWork(18, 11),
    }
)
_BY_ROW: Mapping[OpOverload, SavedWork] = present(
    {
        aten.native_layer_norm_backward.default: SavedWork(10, 19),
        aten._fused_rms_norm_backward.default: SavedWork(7, 14),
    }
)
"""Overload -> the work that torch's kernel saves: our lowering's nodes less torch's kernels, counted and not measured.

One table is of operators that normalize channels, the other of operators that normalize rows. A layer norm's forward is
one kernel in a session, too: LayerNormalization hands out mean and deviation itself.
"""


def _kernels(normalizations: Mapping[OpOverload, SavedWork]) -> Prices:
    return Prices(kernels=KernelPrices(cut=60.0, launch=4.0, rate=1.5e6, width=4, normalizations=normalizations))


CUDA_FUSED = _kernels(_BY_CHANNEL)
"""The same as CUDA with fused kernels, which compute the operators that normalize rows."""

CUDA = _kernels({**_BY_CHANNEL, **_BY_ROW})
"""ONNX Runtime on CUDA, for any version. Estimates: an elementwise kernel takes the time of its memory traffic, or of a
launch; an element has four bytes, as lowerings compute in float32."""
