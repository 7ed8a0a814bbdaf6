"""What a graph is compiled for, as a value: passes and lowerings ask it, never the installed runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ort_dynamo.fused_op import OWN_KERNELS

if TYPE_CHECKING:
    from ort_dynamo.prices import Prices

__all__ = ["OPSET", "TRAINING_PACKAGE", "KernelTable", "Target"]

OPSET = 20
"""The ai.onnx opset of every model: the newest that both tested runtimes have kernels for and torch_lib can meet."""

TRAINING_PACKAGE = "onnxruntime-training"
"""The build with gradient kernels."""

KernelTable = Mapping[tuple[str, str], tuple[Mapping[str, frozenset[ir.DataType]], ...]]
"""(domain, op type) -> one entry per kernel: type variable -> dtypes it takes."""


@dataclass(frozen=True)
class Target:
    """One execution provider of one runtime.

    Attributes:
        package: distribution name, e.g. "onnxruntime-training".
        version: its version.
        provider: "CPUExecutionProvider" or "CUDAExecutionProvider".
        device_type: the torch device type of its tensors, "cpu" or "cuda". What follows from it has a name below:
            nobody else compares it.
        contrib_ops: whether operators outside ONNX (com.microsoft) may be used where they have kernels.
        stands_alone: whether a model is a file, with no torch around: it draws its random numbers itself, and leaves
            out what is there to raise torch's errors.
        fuses_kernels: whether groups of nodes become kernels of ours, which the session launches.
        gradient_kernels: whether the training build's gradient operators (com.microsoft) have kernels.
        kernels: which dtypes each operator's kernels take. Derived from the first three, so outside the repr
            that enters graph keys.
        defects: the names of what it does wrong, derived likewise (`runtime/defects.py`).
    """

    package: str
    version: str
    provider: str
    device_type: str
    gradient_kernels: bool
    kernels: KernelTable = field(repr=False, compare=False)
    defects: frozenset[str] = field(repr=False, compare=False)
    contrib_ops: bool = True
    stands_alone: bool = False
    fuses_kernels: bool = False

    def has_defect(self, name: str) -> bool:
        """Whether it does wrong what this row of `runtime/defects.py` says."""
        return name in self.defects

    def has_op(self, op_type: str, domain: str = "") -> bool:
        """Whether any kernel of this operator exists."""
        return (self.contrib_ops or not domain) and (domain, op_type) in self.kernels

    def takes(self, op_type: str, domain: str, types: Mapping[str, ir.DataType]) -> bool:
        """Whether one kernel of the operator takes all of these type-variable bindings.

        Variables that a kernel does not constrain are free. An operator without any kernel takes nothing.
        """
        asked = (op_type, domain, *types.items())
        if asked not in self._answers:
            self._answers[asked] = (self.contrib_ops or not domain) and any(
                all(dtype in kernel[variable] for variable, dtype in types.items() if variable in kernel)
                for kernel in self.kernels.get((domain, op_type), ())
            )
        return self._answers[asked]

    def makes_kernel(self, op_type: str, domain: str, types: Mapping[str, ir.DataType]) -> bool:
        """Whether each node of an operator becomes a fused kernel, alone if nothing joins it, and so needs no other.

        Its inputs and outputs then need sizes that a fused kernel takes: `fuse_kernels.unmade` tells.
        """
        return self.fuses_kernels and not domain and types.get("T") in OWN_KERNELS.get(op_type, ())

    @cached_property
    def _answers(self) -> dict[tuple[Any, ...], bool]:
        """Those of `takes`: a model asks the same few questions thousands of times."""
        return {}

    # -- what its kernels are good at ----------------------------------------------------------------------------------

    @property
    def sums_in_order(self) -> bool:
        """Whether its sums add one number after another, and so lose digits where they are long.

        The CPU's do; CUDA's add in a tree. A file does not know where it runs.
        """
        return self.device_type == "cpu" and not self.stands_alone

    @property
    def prefers_dense_products(self) -> bool:
        """Whether a product of matrices is cheaper than what moves, gathers or sums as many numbers.

        On the CPU it has the one kernel that uses all of the processor.
        """
        return self.device_type == "cpu"

    @property
    def walks_entries(self) -> bool:
        """Whether kernels that are no plain arithmetic take nanoseconds for each entry, or walk along memory badly.

        On the CPU: Gather of single entries, CumSum, Softmax over an axis that is not the last, Where, Softplus, Tan
        and its kin, scatters of single entries, a product of a row and a column.
        """
        return self.device_type == "cpu"

    @property
    def normalizes_batches(self) -> bool:
        """Whether BatchNormalization in training mode is used: the CPU's is the only one that was measured."""
        return self.device_type == "cpu"

    @property
    def convolves_slower_than_torch(self) -> bool:
        """Whether torch's convolutions take less time than the provider's, but for those that are products of matrices.

        On the CPU, where torch's are oneDNN's.
        """
        return self.device_type == "cpu" and not self.stands_alone

    @property
    def has_slower_operators(self) -> bool:
        """Whether the operators of `prices.operators` take longer than torch's kernels.

        On the CPU, where it was measured.
        """
        return self.device_type == "cpu" and not self.stands_alone

    @property
    def prices(self) -> Prices:
        """The numbers that decide what torch runs by choice. They follow from the other fields and enter no key."""
        # Here, for passes on ONNX models run without torch.
        from ort_dynamo.prices import CPU, CPU_TRAINING, CUDA, CUDA_FUSED

        if self.device_type == "cuda":
            return CUDA_FUSED if self.fuses_kernels else CUDA
        return CPU_TRAINING if self.is_training_build else CPU

    @property
    def lays_out_channels_last(self) -> bool:
        """Whether torch's kernels are faster in channels_last where they run all of a graph: measured on the CPU."""
        return self.device_type == "cpu"

    # -- forms for a device where each node is a launch and a pass over memory (docs/cuda.md): not measured ------------

    @property
    def leaves_convolution_gradients(self) -> bool:
        """Whether torch's kernels for a convolution's gradients are used: cuDNN's, where a session has none."""
        return self.device_type == "cuda" and not self.stands_alone

    @property
    def leaves_normalizations(self) -> bool:
        """Whether torch's kernel is used for a normalization, or its gradient, that takes a session many nodes."""
        return self.device_type == "cuda" and not self.stands_alone

    @property
    def lays_out_images(self) -> bool:
        """Whether torch convolves in channels_last between sessions, whose fused kernels compute in that order."""
        return self.device_type == "cuda" and self.fuses_kernels and not self.stands_alone

    @property
    def leaves_attention(self) -> bool:
        """Whether torch's fused attention and its gradient are used, which never make the scores as a whole."""
        return self.device_type == "cuda" and not self.stands_alone

    @property
    def weighs_by_convolution(self) -> bool:
        """Whether the gradient of a convolution's weight is one Conv rather than a product for each of its places."""
        return self.device_type == "cuda"

    @property
    def computes_in_half(self) -> bool:
        """Whether a single operator of float16 or bfloat16 stays in that, where a kernel takes it."""
        return self.device_type == "cuda" and not self.fuses_kernels

    @property
    def is_training_build(self) -> bool:
        """Whether its kernels are those of onnxruntime-training 1.19.2, which are older than all others'."""
        return self.package == TRAINING_PACKAGE

    @property
    def shares_the_processor(self) -> bool:
        """Whether its threads and torch's want the same cores: on the CPU."""
        return self.device_type == "cpu"

    @property
    def shares_an_arena(self) -> bool:
        """Whether all sessions of the process take their memory from one arena: on the CPU."""
        return self.device_type == "cpu"

    @property
    def section_bytes(self) -> int:
        """Bytes that a section of a backward frees at least: so much that its session's call is nothing beside it.

        On the CPU a further section takes 0.1 ms (measured), and what frees so much of a transformer some 20 ms. On
        CUDA it is an estimate.
        """
        return (16 if self.device_type == "cpu" else 64) << 20

    @property
    def repeated_bytes(self) -> int | None:
        """Bytes of a result from which arithmetic is done again in the backward, which takes no longer; None for never.

        On the CPU such a result has left the caches when the backward reads it (measured). Fused kernels compute while
        they read. On CUDA without them nobody has measured.
        """
        return 1 << 20 if self.device_type == "cpu" or self.fuses_kernels else None

    @property
    def computes_on_streams(self) -> bool:
        """Whether its kernels run on a stream of torch's, in memory of torch's allocator, after the call: on CUDA."""
        return self.device_type == "cuda"

    # -- what torch's kernels do on the same device --------------------------------------------------------------------

    @property
    def raises_at_data(self) -> bool:
        """Whether torch raises at data that its kernel refuses, such as an integer divisor of zero: on the CPU.

        On CUDA its kernels give some number, or stop the device.
        """
        return self.device_type == "cpu"

    @property
    def scans_in_double(self) -> bool:
        """Whether torch accumulates running sums and products in float64, whatever the dtype: on the CPU."""
        return self.device_type == "cpu"

    @property
    def samples_in_own_dtype(self) -> bool:
        """Whether torch finds the places of a grid in the rounding of its dtype: on the CPU. On CUDA, in float32."""
        return self.device_type == "cpu"
