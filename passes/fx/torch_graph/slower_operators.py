"""The table of operators that sessions on a CPU run several times slower than torch, with what was measured of each.

Measured: each operator as a graph of its own, a million float32 elements, one thread, AVX-512, torch 2.13, beside eager
in interleaved rounds (bench/bench_operators.py). Of a gradient, `ratio` is that of forward and gradient together, and
`saved` what these take more than the forward alone. cummin, igammac, scatter.value, remainder.Tensor and the
forward-only embedding bag have the numbers of the overload beside them.

A row is there where a session took about three times eager's time or more, or, in gradients that many models have, a
few nanoseconds an element longer, and where no better form in ONNX is known. For pointwise operators of a nanosecond or
two, and for normalizations, which stand in chains, no graph is cut: a tensor that crosses a boundary costs half of one.
They are torch's where there is no boundary. Beside some stand the forward or the gradient that a graph has with them,
with the ratio of both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.torch_graph.work import example_elements, example_sizes
from ort_dynamo.target import Target
from ort_dynamo.torch_internals.operators import OpOverload, aten, present

__all__ = ["SLOWER", "Measured", "Slower"]


@dataclass(frozen=True)
class Measured:
    """What one runtime took.

    Attributes:
        ratio: of a session's time to torch's.
        saved: nanoseconds for each element that torch takes less, on one thread; 0 where no graph is cut for it.
    """

    ratio: float
    saved: float = 0


def _result(node: Node) -> int:
    value = node.meta["val"]
    results = (value,) if isinstance(value, torch.Tensor) else value
    return max(
        (example_elements(one) for one in results if one is not None), default=0
    )  # None of what a mask leaves out


def _argument(index: int) -> Callable[[Node], int]:
    return lambda node: example_elements(_given(node, index))


def _read_of_table(node: Node) -> int:
    """Of an embedding bag: of the rows that are read, not of their sums."""
    return example_elements(_given(node, 1)) * example_sizes(_given(node, 0))[-1]


def _given(node: Node, index: int) -> torch.Tensor:
    argument = node.args[index]
    assert isinstance(argument, Node)
    value: torch.Tensor = argument.meta["val"]
    return value


def _always(_: Node) -> bool:
    return True


@dataclass(frozen=True)
class Slower:
    """One row.

    Attributes:
        stock: of onnxruntime 1.31.1.
        training: of onnxruntime-training 1.19.2.
        counts: how many elements a node has, by the example's sizes.
        when: whether a node is of the form that was measured.
    """

    stock: Measured
    training: Measured
    counts: Callable[[Node], int] = _result
    when: Callable[[Node], bool] = _always

    def of(self, target: Target) -> Measured:
        """What was measured of the target's kernels."""
        return self.training if target.is_training_build else self.stock

    def takes(self, node: Node) -> bool:
        """Whether a node is of the form and dtype that were measured."""
        first = node.args[0]
        return isinstance(first, Node) and bool(first.meta["val"].dtype == torch.float32) and self.when(node)


# -- forms that were measured --------------------------------------------------------------------------------------


def _along_last(node: Node) -> bool:
    """Along others, ONNX Runtime's kernels go through whole rows."""
    return _is_last(node, node.args[1])


def _repeats(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and source.target is aten.expand.default


def _norm_of_rows(node: Node) -> bool:
    order: Any = node.args[1] if len(node.args) > 1 else 2
    dims: Any = node.args[2] if len(node.args) > 2 else None
    return order == 2 and dims is not None and len(dims) == 1 and _is_last(node, dims[0])


def _flips_last(node: Node) -> bool:
    dims: Any = node.args[1]
    return any(_is_last(node, dim) for dim in dims)


def _is_last(node: Node, dim: Any) -> bool:
    rank = _given(node, 0).dim()
    return rank > 0 and bool(dim % rank == rank - 1)


def _adds_rows(node: Node) -> bool:
    return bool(node.args[1] == 0) and node.meta["val"].dim() > 1


def _accumulates(node: Node) -> bool:
    return len(node.args) > 3 and node.args[3] is True


def _gives_places(node: Node) -> bool:
    """Without the places, which the gradient reads, it is twice torch's time."""
    return any(user.target is operator.getitem and user.args[1] == 1 and bool(user.users) for user in node.users)


def _steps(node: Node) -> bool:
    """With step 1 it is a Pad."""
    return bool(node.args[5] != 1)


SLOWER: Mapping[OpOverload, Slower] = present(
    {
        # Elementwise, of ten and more ONNX operators each.
        aten.nextafter.default: Slower(Measured(56, 22), Measured(80, 37)),
        aten.frexp.Tensor: Slower(Measured(11, 13), Measured(15, 22)),
        aten.atan2.default: Slower(Measured(8.7, 7.5), Measured(38, 38)),
        aten.lgamma.default: Slower(Measured(6.9, 16), Measured(8.7, 21)),
        aten.remainder.Scalar: Slower(Measured(5.8, 5.2), Measured(19, 19)),
        aten.remainder.Tensor: Slower(Measured(5.8, 5.2), Measured(19, 19)),
        # ONNX Runtime's Log alone takes three times as long as torch's log1p.
        aten.log1p.default: Slower(Measured(6.2, 2.7), Measured(7.8, 3.8)),
        # Several passes over memory where torch has one. ONNX Runtime's own kernels differ at nan or infinity.
        aten.threshold.default: Slower(Measured(6.9), Measured(33, 4.2)),
        aten.threshold_backward.default: Slower(Measured(3.6), Measured(10)),
        aten.sign.default: Slower(Measured(7.2), Measured(10)),
        aten.hardshrink.default: Slower(Measured(5.1), Measured(6.3)),
        aten.hardshrink_backward.default: Slower(Measured(3.3), Measured(2.3)),
        aten.softshrink.default: Slower(Measured(3.6), Measured(3.6)),
        aten.softshrink_backward.default: Slower(Measured(3.0), Measured(3.5)),
        aten.hardswish.default: Slower(Measured(4.6), Measured(4.2)),
        aten.hardswish_backward.default: Slower(Measured(5.1), Measured(5.1)),
        aten.hardsigmoid.default: Slower(Measured(2.2), Measured(2.0)),
        aten.hardsigmoid_backward.default: Slower(Measured(3.3), Measured(4.0)),
        aten._prelu_kernel.default: Slower(Measured(8.2), Measured(8.6)),
        aten.rsqrt.default: Slower(Measured(2.5), Measured(4.9)),
        aten.huber_loss.default: Slower(Measured(5.4), Measured(6.0)),
        aten.huber_loss_backward.default: Slower(Measured(2.5), Measured(2.3)),
        aten.smooth_l1_loss.default: Slower(Measured(4.9), Measured(5.1)),
        aten.smooth_l1_loss_backward.default: Slower(Measured(2.6), Measured(2.6)),
        aten.nll_loss_forward.default: Slower(Measured(4.7), Measured(6.9)),
        aten.nll_loss_backward.default: Slower(Measured(4.0), Measured(4.4)),
        aten.native_layer_norm.default: Slower(Measured(1.4), Measured(2.9)),
        aten.native_layer_norm_backward.default: Slower(Measured(3.4), Measured(2.6)),
        aten.native_group_norm.default: Slower(Measured(3.0), Measured(2.9)),
        aten.native_group_norm_backward.default: Slower(Measured(3.4), Measured(2.9)),
        aten.clone.default: Slower(Measured(3.4), Measured(2.7), when=_repeats),
        aten.linalg_vector_norm.default: Slower(Measured(5.3), Measured(6.3), when=_norm_of_rows),
        aten.prod.default: Slower(Measured(4.6), Measured(4.8)),
        # Loops that all elements stay in for as long as one of them needs.
        aten.igamma.default: Slower(Measured(5.4, 240), Measured(5.9, 260)),
        aten.igammac.default: Slower(Measured(5.4, 240), Measured(5.9, 260)),
        # A scan is log2(n) operators on the whole tensor; CumSum, which is one, is not for these.
        aten.cummax.default: Slower(Measured(7.2, 3.8), Measured(7.6, 4.1), when=_along_last),
        aten.cummin.default: Slower(Measured(7.2, 3.8), Measured(7.6, 4.1), when=_along_last),
        aten.cumprod.default: Slower(Measured(4.2, 2.3), Measured(4.5, 2.6), when=_along_last),
        # CumSum steps from entry to entry along the last dimension; ours transposes before and after.
        aten.cumsum.default: Slower(Measured(3.1, 1.6), Measured(4.0, 2.4), when=_along_last),
        # ReduceProd multiplies one entry after another.
        aten.prod.dim_int: Slower(Measured(5.1, 0.7), Measured(5.1, 0.8), _argument(0), _along_last),
        # Slice with a negative step copies entry by entry.
        aten.flip.default: Slower(Measured(3.7, 0.85), Measured(3.6, 0.84), when=_flips_last),
        # Gather, scatter and GatherElements with arithmetic on places around them.
        aten._embedding_bag.default: Slower(Measured(9.9, 3.4), Measured(9.0, 3.0), _read_of_table),
        aten._embedding_bag_forward_only.default: Slower(Measured(9.9, 3.4), Measured(9.0, 3.0), _read_of_table),
        aten.grid_sampler_2d.default: Slower(Measured(5.5, 14), Measured(5.8, 13)),
        aten.grid_sampler_2d_backward.default: Slower(Measured(4.7, 30), Measured(4.8, 28), _argument(0)),
        aten.adaptive_max_pool2d.default: Slower(Measured(4.0, 8.2), Measured(4.8, 8.2), _argument(0), _gives_places),
        aten.upsample_nearest2d_backward.default: Slower(Measured(3.3, 8.4), Measured(2.6, 5.9)),
        aten.slice_backward.default: Slower(Measured(3.1, 1.3), Measured(4.4, 1.9), when=_steps),
        # ScatterElements adds on one thread, entry by entry.
        aten.index_add.default: Slower(Measured(3.6, 2.8), Measured(3.9, 3.0), _argument(3), _adds_rows),
        aten.scatter.src: Slower(Measured(3.4, 2.2), Measured(3.8, 2.7), _argument(2), _along_last),
        aten.scatter.value: Slower(Measured(3.4, 2.2), Measured(3.8, 2.7), _argument(2), _along_last),
        aten.scatter_add.default: Slower(Measured(3.1, 2.7), Measured(3.5, 3.0), _argument(2), _along_last),
        aten.index_put.default: Slower(Measured(2.4, 2.5), Measured(2.8, 2.1), _argument(2), _accumulates),
        aten.embedding_dense_backward.default: Slower(Measured(2.3, 3.0), Measured(2.1, 2.5), _argument(0)),
    }
)
"""Overload -> its row."""
