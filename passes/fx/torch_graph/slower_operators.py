"""The forms of operators that sessions on a CPU run several times slower than torch: which elements count, and when.

`ort_dynamo/targets/prices.py` has the times of the same overloads. Times hold for the forms here, in float32 alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.analysis.views import is_expanded
from ort_dynamo.passes.fx.torch_graph.count_multiplications import example_elements, example_sizes
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present

__all__ = ["FORMS", "Form"]


def _result(node: Node) -> int:
    value = node.meta["val"]
    results = (value,) if isinstance(value, torch.Tensor) else value
    return max(
        (example_elements(one) for one in results if one is not None), default=0
    )  # None for results that a mask leaves out


def _argument(index: int) -> Callable[[Node], int]:
    return lambda node: example_elements(_given(node, index))


def _read_of_table(node: Node) -> int:
    """Count the elements of the rows that an embedding bag reads, not those of its results."""
    return example_elements(_given(node, 1)) * example_sizes(_given(node, 0))[-1]


def _given(node: Node, index: int) -> torch.Tensor:
    argument = node.args[index]
    assert isinstance(argument, Node)
    value: torch.Tensor = argument.meta["val"]
    return value


def _always(_: Node) -> bool:
    return True


@dataclass(frozen=True)
class Form:
    """The measured form of an operator.

    Attributes:
        counts: gives the number of elements of a node, by the example's sizes.
        when: checks whether a node has the form; the dtype is checked separately.
    """

    counts: Callable[[Node], int] = _result
    when: Callable[[Node], bool] = _always

    def takes(self, node: Node) -> bool:
        """Check whether a node is of the measured form and dtype."""
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


def _has_slices(node: Node) -> bool:
    return bool(node.meta["val"].dim() > 1)


def _copies_inner_slices(node: Node) -> bool:
    """Rows are copied as fast as by torch."""
    rank = node.meta["val"].dim()
    return bool(rank > 1 and node.args[1] % rank)


def _scatters_slices(node: Node) -> bool:
    """Check for an index that was expanded from one number for each slice, as graph networks have for each edge."""
    index = _given(node, 2)
    return index.dim() > 1 and not _along_last(node) and is_expanded(index, -1)


def _along_last_or_slices(node: Node) -> bool:
    return _along_last(node) or _scatters_slices(node)


def _overlaps_with_a_stride(node: Node) -> bool:
    """Patches that do not overlap, and those of each pixel, take the same time."""
    kernel, stride = node.args[2], node.args[5]
    return any(step > 1 and size > step for size, step in zip(kernel, stride, strict=True))  # type: ignore[arg-type]


def _accumulates(node: Node) -> bool:
    return len(node.args) > 3 and node.args[3] is True


def _gives_places(node: Node) -> bool:
    """Without the indices, which the gradient reads, it is twice torch's time."""
    return any(user.target is operator.getitem and user.args[1] == 1 and bool(user.users) for user in node.users)


FORMS: Mapping[OpOverload, Form] = present(
    {
        # All nodes in float32, by the elements of their largest result.
        aten.nextafter.default: Form(),
        aten.frexp.Tensor: Form(),
        aten.atan2.default: Form(),
        aten.lgamma.default: Form(),
        aten.remainder.Scalar: Form(),
        aten.remainder.Tensor: Form(),
        aten.log1p.default: Form(),
        aten.exp2.default: Form(),
        aten.threshold.default: Form(),
        aten.threshold_backward.default: Form(),
        aten.sign.default: Form(),
        aten.hardshrink.default: Form(),
        aten.hardshrink_backward.default: Form(),
        aten.softshrink.default: Form(),
        aten.softshrink_backward.default: Form(),
        aten.hardswish.default: Form(),
        aten.hardswish_backward.default: Form(),
        aten.hardsigmoid.default: Form(),
        aten.hardsigmoid_backward.default: Form(),
        aten._prelu_kernel.default: Form(),
        aten.rsqrt.default: Form(),
        aten.huber_loss.default: Form(),
        aten.huber_loss_backward.default: Form(),
        aten.smooth_l1_loss.default: Form(),
        aten.smooth_l1_loss_backward.default: Form(),
        aten.masked_scatter.default: Form(),
        aten.nll_loss_forward.default: Form(),
        aten.nll_loss_backward.default: Form(),
        aten.native_layer_norm.default: Form(),
        aten.native_layer_norm_backward.default: Form(),
        aten.native_group_norm.default: Form(),
        aten.native_group_norm_backward.default: Form(),
        aten.prod.default: Form(),
        aten.igamma.default: Form(),
        aten.igammac.default: Form(),
        aten.grid_sampler_2d.default: Form(),
        aten.upsample_nearest2d_backward.default: Form(),
        # Some nodes, or counted otherwise.
        aten.clone.default: Form(when=_repeats),
        aten.linalg_vector_norm.default: Form(when=_norm_of_rows),
        aten.cummax.default: Form(when=_along_last),
        aten.cummin.default: Form(when=_along_last),
        aten.cumprod.default: Form(when=_along_last),
        aten.cumsum.default: Form(when=_along_last),
        aten.prod.dim_int: Form(_argument(0), _along_last),
        aten.flip.default: Form(when=_flips_last),
        aten._embedding_bag.default: Form(_read_of_table),
        aten._embedding_bag_forward_only.default: Form(_read_of_table),
        aten.grid_sampler_2d_backward.default: Form(_argument(0)),
        aten.adaptive_max_pool2d.default: Form(_argument(0), _gives_places),
        aten.col2im.default: Form(_argument(0), _overlaps_with_a_stride),
        aten.index_add.default: Form(_argument(3), _has_slices),
        aten.index_reduce.default: Form(_argument(3), _has_slices),
        aten.index_copy.default: Form(_argument(3), _copies_inner_slices),
        aten.scatter.src: Form(_argument(2), _along_last_or_slices),
        aten.scatter.value: Form(_argument(2), _along_last),
        aten.scatter_add.default: Form(_argument(2), _along_last_or_slices),
        aten.scatter_reduce.two: Form(_argument(2), _scatters_slices),
        aten.index_put.default: Form(_argument(2), _accumulates),
        aten.embedding_dense_backward.default: Form(_argument(0)),
    }
)
"""Overload -> its form."""
