"""Facts about execution providers, by which lowerings and passes choose a form: a frozen profile for each of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["CPU", "CUDA", "CUDA_FUSED", "Profile"]


@dataclass(frozen=True)
class Profile:
    """Facts about the kernels of a provider, and about torch's on the same device.

    Attributes:
        sums_in_order: its sums add one number after another, and so lose digits where they are long. CUDA's add in a
            tree.
        prefers_dense_products: a matmul is cheaper than nodes that move, gather or sum as many elements. On the CPU it
            has the one kernel that uses all of the processor.
        walks_entries: kernels that are no plain arithmetic take nanoseconds for each entry, or walk along memory badly.
            On the CPU: Gather of single entries, CumSum, Softmax over an axis that is not the last, Where, Softplus,
            Tan and its kin, scatters of single entries, a matmul of a row and a column.
        normalizes_batches: BatchNormalization in training mode is used; only the CPU's was measured.
        convolves_slower_than_torch: torch's convolutions take less time, but for those that are matmuls.
            On the CPU torch's are oneDNN's.
        has_slower_operators: the operators of `prices.operators` take longer than torch's kernels.
        lays_out_channels_last: torch's kernels are faster in channels_last where they run all of a graph.
        leaves_convolution_gradients: torch computes the gradients of convolutions: by cuDNN, where a session has none.
        leaves_normalizations: torch computes a normalization, or its gradient, that takes a session many nodes.
        lays_out_images: torch convolves in channels_last between sessions, whose fused kernels compute in that order.
        leaves_attention: torch computes attention and its gradient, which never make the scores as a whole.
        weighs_by_convolution: the gradient of a convolution's weight is one Conv, not a matmul for each of its
            positions.
        computes_in_half: a single operator of float16 or bfloat16 stays in that, where a kernel takes it.
        shares_the_processor: its threads and torch's want the same cores.
        shares_an_arena: all sessions of the process take their memory from one arena.
        section_bytes: bytes that a section of a backward frees at least, so that its session's call does not count. On
            the CPU a further section takes 0.1 ms (measured), and a section that frees so much of a transformer some 20
            ms. On CUDA it is an estimate.
        repeated_bytes: bytes of a result from which arithmetic is recomputed in the backward, which takes no longer;
            None for never. On the CPU such a result has left the caches when the backward reads it (measured). Fused
            kernels compute while they read. On CUDA without them nobody has measured.
        computes_on_streams: its kernels run on a stream of torch's, in memory of torch's allocator, after the call.
        raises_at_data: torch raises at data that its kernel refuses, such as an integer divisor of zero. On CUDA its
            kernels give some number, or stop the device.
        scans_in_double: torch accumulates running sums and products in float64, for any dtype.
        samples_in_own_dtype: torch finds the positions of a grid in the rounding of its dtype. On CUDA, in float32.
    """

    sums_in_order: bool
    prefers_dense_products: bool
    walks_entries: bool
    normalizes_batches: bool
    convolves_slower_than_torch: bool
    has_slower_operators: bool
    lays_out_channels_last: bool
    leaves_convolution_gradients: bool
    leaves_normalizations: bool
    lays_out_images: bool
    leaves_attention: bool
    weighs_by_convolution: bool
    computes_in_half: bool
    shares_the_processor: bool
    shares_an_arena: bool
    section_bytes: int
    repeated_bytes: int | None
    computes_on_streams: bool
    raises_at_data: bool
    scans_in_double: bool
    samples_in_own_dtype: bool

    def in_file(self) -> Profile:
        """Give the profile of a model that is a file: it has no torch around, and does not know where it runs."""
        return dataclasses.replace(
            self,
            sums_in_order=False,
            convolves_slower_than_torch=False,
            has_slower_operators=False,
            leaves_convolution_gradients=False,
            leaves_normalizations=False,
            lays_out_images=False,
            leaves_attention=False,
        )


CPU = Profile(
    sums_in_order=True,
    prefers_dense_products=True,
    walks_entries=True,
    normalizes_batches=True,
    convolves_slower_than_torch=True,
    has_slower_operators=True,
    lays_out_channels_last=True,
    leaves_convolution_gradients=False,
    leaves_normalizations=False,
    lays_out_images=False,
    leaves_attention=False,
    weighs_by_convolution=False,
    computes_in_half=False,
    shares_the_processor=True,
    shares_an_arena=True,
    section_bytes=16 << 20,
    repeated_bytes=1 << 20,
    computes_on_streams=False,
    raises_at_data=True,
    scans_in_double=True,
    samples_in_own_dtype=True,
)
"""CPUExecutionProvider."""

CUDA = Profile(
    sums_in_order=False,
    prefers_dense_products=False,
    walks_entries=False,
    normalizes_batches=False,
    convolves_slower_than_torch=False,
    has_slower_operators=False,
    lays_out_channels_last=False,
    leaves_convolution_gradients=True,
    leaves_normalizations=True,
    lays_out_images=False,
    leaves_attention=True,
    weighs_by_convolution=True,
    computes_in_half=True,
    shares_the_processor=False,
    shares_an_arena=False,
    section_bytes=64 << 20,
    repeated_bytes=None,
    computes_on_streams=True,
    raises_at_data=False,
    scans_in_double=False,
    samples_in_own_dtype=False,
)
"""CUDAExecutionProvider, where each node is a launch and a pass over memory (docs/internals/cuda.md)."""

CUDA_FUSED = dataclasses.replace(CUDA, lays_out_images=True, computes_in_half=False, repeated_bytes=1 << 20)
"""The same with fused kernels of ours."""
