"""Facts about execution providers, for choices of lowerings and passes: a frozen profile per provider."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["CPU", "CUDA", "CUDA_FUSED", "Profile"]


@dataclass(frozen=True)
class Profile:
    """Facts about the kernels of a provider, and about torch's on the same device.

    Attributes:
        sums_in_order: sums add elements sequentially, so long ones are inaccurate. CUDA's add in a tree.
        prefers_dense_products: a matmul is faster than nodes that move, gather or sum as many elements. On the CPU only
            the matmul kernel uses the whole processor.
        walks_entries: kernels other than plain arithmetic take nanoseconds per entry, or access memory badly. On the
            CPU: Gather of single entries, CumSum, Softmax over an axis that is not the last, Where, Softplus, Tan and
            similar functions, scatters of single entries, a matmul of a row and a column.
        slow_at_small_sizes: kernels take some time for each innermost run of a broadcast, each matrix of a batched
            matmul, and each block of a sum over middle axes. On the CPU: 10, 150 and 150 ns.
        normalizes_batches: BatchNormalization in training mode is used; only the CPU's was measured.
        convolves_slower_than_torch: torch's convolutions are faster, except for those that are matmuls. On the CPU
            torch's are oneDNN's.
        has_slower_operators: the operators of `prices.operators` are slower than torch's kernels.
        converts_to_channels_last: torch's kernels are faster in channels_last if they run a whole graph.
        leaves_convolution_gradients: torch computes the gradients of convolutions, by cuDNN; sessions have no kernel.
        leaves_normalizations: torch computes a normalization, or its gradient, that is many nodes in a session.
        permutes_images: torch runs convolutions in channels_last between sessions, whose fused kernels use that layout.
        leaves_attention: torch computes attention and its gradient, without the full matrix of scores.
        leaves_loops: torch computes an operator that is a loop in a session, whose rounds the host would wait for.
        adds_in_any_order: a scatter adds with atomics: a float sum differs from run to run. torch sorts indices first.
        weighs_by_convolution: the gradient of a convolution's weight is one Conv, not a matmul per position.
        computes_in_half: a single operator of float16 or bfloat16 stays in that dtype if it has a kernel.
        shares_the_processor: its threads and torch's compete for the same cores.
        shares_an_arena: all sessions of the process use one arena.
        section_bytes: the minimum bytes that a backward section frees, so that the session call does not matter. On the
            CPU a further section takes 0.1 ms, and a section of a transformer that frees this much 20 ms (measured). On
            CUDA it is an estimate.
        repeated_bytes: the minimum bytes of a result whose arithmetic is recomputed in the backward, without a loss of
            time; None for never. On the CPU such a result has left the caches when the backward reads it (measured).
            Fused kernels recompute while they read. CUDA without them was not measured.
        keeps_sizes_on_host: a tensor's shape is a value on the host, and its arithmetic runs on the CPU. That of other
            numbers runs on the device, and a shape made of them is copied to the host, which waits.
        computes_on_streams: its kernels run on torch's stream, in torch's memory, after the call returns.
        raises_at_data: torch raises at invalid data, such as an integer divisor of zero. torch's CUDA kernels give an
            undefined result, or stop the device.
        accumulates_in_double: torch accumulates variances, cumulative sums and products in float64, for any dtype.
        samples_in_own_dtype: torch rounds the positions of a grid to its dtype. On CUDA it uses float32.
    """

    sums_in_order: bool
    prefers_dense_products: bool
    walks_entries: bool
    slow_at_small_sizes: bool
    normalizes_batches: bool
    convolves_slower_than_torch: bool
    has_slower_operators: bool
    converts_to_channels_last: bool
    leaves_convolution_gradients: bool
    leaves_normalizations: bool
    permutes_images: bool
    leaves_attention: bool
    leaves_loops: bool
    adds_in_any_order: bool
    weighs_by_convolution: bool
    computes_in_half: bool
    shares_the_processor: bool
    shares_an_arena: bool
    section_bytes: int
    repeated_bytes: int | None
    keeps_sizes_on_host: bool
    computes_on_streams: bool
    raises_at_data: bool
    accumulates_in_double: bool
    samples_in_own_dtype: bool

    def in_file(self) -> Profile:
        """Give the profile of a model that is a file: it has no torch around, and does not know where it runs."""
        return dataclasses.replace(
            self,
            sums_in_order=False,
            slow_at_small_sizes=False,
            convolves_slower_than_torch=False,
            has_slower_operators=False,
            leaves_convolution_gradients=False,
            leaves_normalizations=False,
            permutes_images=False,
            leaves_attention=False,
            leaves_loops=False,
            adds_in_any_order=False,
            keeps_sizes_on_host=False,
        )


CPU = Profile(
    sums_in_order=True,
    prefers_dense_products=True,
    walks_entries=True,
    slow_at_small_sizes=True,
    normalizes_batches=True,
    convolves_slower_than_torch=True,
    has_slower_operators=True,
    converts_to_channels_last=True,
    leaves_convolution_gradients=False,
    leaves_normalizations=False,
    permutes_images=False,
    leaves_attention=False,
    leaves_loops=False,
    adds_in_any_order=False,
    weighs_by_convolution=False,
    computes_in_half=False,
    shares_the_processor=True,
    shares_an_arena=True,
    section_bytes=16 << 20,
    repeated_bytes=1 << 20,
    keeps_sizes_on_host=False,
    computes_on_streams=False,
    raises_at_data=True,
    accumulates_in_double=True,
    samples_in_own_dtype=True,
)
"""CPUExecutionProvider."""

CUDA = Profile(
    sums_in_order=False,
    prefers_dense_products=False,
    walks_entries=False,
    slow_at_small_sizes=False,
    normalizes_batches=False,
    convolves_slower_than_torch=False,
    has_slower_operators=False,
    converts_to_channels_last=False,
    leaves_convolution_gradients=True,
    leaves_normalizations=True,
    permutes_images=False,
    leaves_attention=True,
    leaves_loops=True,
    adds_in_any_order=True,
    weighs_by_convolution=True,
    computes_in_half=True,
    shares_the_processor=False,
    shares_an_arena=False,
    section_bytes=64 << 20,
    repeated_bytes=None,
    keeps_sizes_on_host=True,
    computes_on_streams=True,
    raises_at_data=False,
    accumulates_in_double=False,
    samples_in_own_dtype=False,
)
"""CUDAExecutionProvider, where each node is a launch and a pass over memory (docs/internals/cuda.md)."""

CUDA_FUSED = dataclasses.replace(CUDA, permutes_images=True, computes_in_half=False, repeated_bytes=1 << 20)
"""The same with fused kernels of ours."""
