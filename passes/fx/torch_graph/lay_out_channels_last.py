"""A graph of convolutions that torch runs whole is computed in channels_last, as torch's kernels are made for it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.boundary import in_order, inverse, physical_order
from ort_dynamo.marks import CHOSEN, HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.saved_tensors import draws
from ort_dynamo.passes.fx.analysis.views import ALIASES
from ort_dynamo.passes.fx.torch_graph.choice import ORIGIN, add_chosen
from ort_dynamo.passes.fx.torch_graph.work import (
    CONVOLUTIONS,
    convolution_weight,
    convolves_images,
    weighs_more_than_images,
)
from ort_dynamo.torch_internals.fakes import detect_fake_mode
from ort_dynamo.torch_internals.operators import OpOverload, aten, is_pointwise

__all__ = ["LayOutChannelsLast"]

_FOLLOWING = frozenset(
    {
        *CONVOLUTIONS,
        operator.getitem,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d_backward.default,
        aten.mean.default,
        aten.mean.dim,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.native_dropout.default,
        # Pointwise ones without the tag.
        aten.hardtanh_backward.default,
        aten.hardswish_backward.default,
        aten.elu_backward.default,
        aten.leaky_relu_backward.default,
    }
)
"""Operators beside the pointwise ones whose kernels take channels_last and give it."""

_VIEWS = (aten.slice.Tensor, aten.permute.default, *ALIASES)
"""Views that are made of a tensor in channels_last as they are of a contiguous one."""

_CONTIGUOUS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
"""Operators whose kernels read their inputs in any layout and give what is contiguous.

A permutation of what is in channels_last is contiguous, so that a layer normalization of channels copies nothing."""


@dataclass(frozen=True)
class LayOutChannelsLast(PassBase):
    """What two-dimensional convolutions in torch read is laid out in channels_last, and so is all that follows from it.

    oneDNN's kernels compute in channels_last; a contiguous tensor is put in order before each of them and its result
    back afterwards. Where sessions take part of the graph, nothing is changed: a session's tensors are contiguous, and
    would be put in order at each boundary. Nor where a convolution's weight, which is contiguous as its gradient has to
    be, is larger than the images and its kernel than one place: it would be put in order in their place.

    What leaves the graph, and what an operator reads that is not known to follow its input's layout, has the strides
    that it was traced with. Values stay the same, but for the order in which sums are taken.
    """

    name: str = "lay_out_channels_last"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place."""
        graph = graph_module.graph
        computing = [node for node in graph.nodes if node.op == "call_function" and _is_tensor(node)]
        convolutions = [node for node in computing if convolves_images(node)]
        if not convolutions or not all(CHOSEN in node.meta or _is_unplaced(node) for node in computing):
            return PassResult(graph_module, False)
        values = [node.meta.get("val") for node in graph.nodes]
        with detect_fake_mode(values) or nullcontext():
            modified = _Layout(graph_module).change()
        if modified:
            graph.lint()
            graph_module.recompile()
        return PassResult(graph_module, modified)


class _Layout:
    """Goes through a graph once; `_moved` holds the nodes that have other strides now."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._moved: dict[Node, Any] = {}  # node -> the fake value that it was traced with
        self._back: dict[Node, Node] = {}  # node that moved -> a copy as it was traced
        self._over: dict[Node, Node] = {}  # node that did not -> a copy in channels_last
        self._modified = False

    def change(self) -> bool:
        for node in tuple(self._gm.graph.nodes):
            if node.op == "output":
                self._read_as_traced(node)
            elif node.op == "call_function":
                self._visit(node)
        return self._modified

    def _visit(self, node: Node) -> None:
        if convolves_images(node):
            # Its weight is contiguous, and would be put in order in their place; not if its kernel has one place.
            if weighs_more_than_images(node) and math.prod(convolution_weight(node).shape[2:]) != 1:
                self._read_as_traced(node)
                return
            images = node.args[:1] if node.target is CONVOLUTIONS[0] else node.args[:2]
            for image in images:
                self._read_channels_last(node, image)  # type: ignore[arg-type]
        if _is_of_one_expanded(node):
            self._expand_late(node)
            return
        moved = [argument for argument in node.all_input_nodes if argument in self._moved]
        if not moved or node.target in _CONTIGUOUS:
            return
        if _puts_in_order(node):
            self._order(node)
            return
        if not _follows(node):
            self._read_as_traced(node)
            return
        if is_pointwise(node.target) and any(_is_channels_last(argument.meta["val"]) for argument in moved):
            for argument in node.all_input_nodes:
                if argument not in self._moved and _shape(argument) == _shape(node):
                    self._read_channels_last(node, argument)
        self._trace_again(node)

    def _expand_late(self, node: Node) -> None:
        """Compute of an element what was computed of each copy of it: what is expanded then has any layout.

        As the gradient of a mean, which is divided by how many they were, is read by a convolution.
        """
        expanded: Any = node.args[0]
        with self._gm.graph.inserting_before(node):
            computed = _add(node, node.target, (expanded.args[0], *node.args[1:]), node.kwargs)
            late = _add(node, expanded.target, (computed, *expanded.args[1:]), expanded.kwargs)
        node.replace_all_uses_with(late)
        self._gm.graph.erase_node(node)
        self._moved[late] = node.meta["val"]
        self._modified = True

    def _order(self, node: Node) -> None:
        """What put a tensor in order may find that it is."""
        (source,) = node.all_input_nodes
        if _is_contiguous(source.meta["val"]):
            node.target, node.args, node.kwargs = aten.alias.default, (source,), {}
            node.meta["val"] = aten.alias.default(source.meta["val"])
            self._modified = True

    def _trace_again(self, node: Node) -> None:
        """Give `node` the fake value that follows from its inputs' present ones."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        before, after = node.meta.get("val"), node.target(*args, **kwargs)  # type: ignore[operator]
        if before is None:  # a gradient that is not asked for
            return
        if node.target is CONVOLUTIONS[1] and isinstance(after, (tuple, list)):
            after = [after[0], *before[1:]]  # _keep_weights sees to the weight's
        node.meta["val"] = after if isinstance(after, torch.Tensor) else type(before)(after)
        if _strides(before) != _strides(after):
            self._moved[node] = before
        if node.target is CONVOLUTIONS[1]:
            self._keep_weights(node)

    def _keep_weights(self, convolution: Node) -> None:
        """Have the gradient of a convolution's weight contiguous as it was traced: its kernel may follow the images."""
        for item in tuple(convolution.users):
            if item.args[1] == 1:
                with self._gm.graph.inserting_after(item):
                    kept = _add(item, aten.contiguous.default, (item,), {})
                item.replace_all_uses_with(kept, lambda user, kept=kept: user is not kept)  # type: ignore[misc]
                self._modified = True

    def _read_channels_last(self, reader: Node, image: Node) -> None:
        fake = image.meta["val"]
        is_put_in_order = _is_contiguous(fake) or (image in self._moved and (_is_dense(fake) or _is_expanded(image)))
        if not is_put_in_order or _is_channels_last(fake):
            return
        if image not in self._over:
            with self._gm.graph.inserting_before(reader):
                copied = self._over[image] = _copy(image, torch.channels_last)
            copied.meta.pop(HALF, None)
            if HALF in reader.meta:  # a forward's tensor that the backward alone wants so is not the forward's to copy
                copied.meta[HALF] = reader.meta[HALF]
            self._moved[copied] = self._moved.get(image, fake)
        reader.replace_input_with(image, self._over[image])
        self._modified = True

    def _read_as_traced(self, reader: Node) -> None:
        for argument in reader.all_input_nodes:
            if argument in self._moved:
                reader.replace_input_with(argument, self._as_traced(argument))

    def _as_traced(self, moved: Node) -> Node:
        """The node of what `moved` was traced as: a copy, and of a view the same view of its base's copy."""
        if moved not in self._back:
            base = self._as_traced(moved.args[0]) if moved.target in _VIEWS else None  # type: ignore[arg-type]
            with self._gm.graph.inserting_before(moved.next):
                if base is None:
                    self._back[moved] = _copied_as(self._moved[moved], moved)
                else:
                    self._back[moved] = _add(base, moved.target, (base, *moved.args[1:]), moved.kwargs)
        return self._back[moved]


_KEPT = (*ORIGIN, RECOMPUTE, "ac_graph_id")
"""What a node that is made has of the one that it is for, whether torch.utils.checkpoint computes it again included."""
_REASON = "torch's convolutions are faster in channels_last"


def _add(like: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
    return add_chosen(like, _REASON, _KEPT, target, args, kwargs)


def _copy(source: Node, layout: torch.memory_format) -> Node:
    return _add(source, aten.clone.default, (source,), {"memory_format": layout})


def _copied_as(traced: torch.Tensor, source: Node) -> Node:
    """A copy of `source` with the strides of a fake value, which is contiguous or a permutation of what is."""
    if _is_contiguous(traced):
        return _copy(source, torch.contiguous_format)
    order = physical_order(traced)
    copied = _copy(_add(source, aten.permute.default, (source, [*order]), {}), torch.contiguous_format)
    return _add(source, aten.permute.default, (copied, inverse(order)), {})


def _is_tensor(node: Node) -> bool:
    return any(isinstance(one, torch.Tensor) for one in _values(node))


def _values(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (tuple, list)) else [value]


def _is_unplaced(node: Node) -> bool:
    """Whether the node has no place of its own, or one that no session has: a draw, a collective, part of a tuple."""
    return node.target is operator.getitem or not isinstance(node.target, OpOverload)


def _follows(node: Node) -> bool:
    """Whether the node can be given inputs in another layout: its results can be put in order, or follow."""
    if node.target is operator.getitem or node.target in _VIEWS:
        return True
    tensors = [one for one in _values(node) if isinstance(one, torch.Tensor)]
    if is_pointwise(node.target):
        return all(map(_is_dense, tensors))
    return node.target in _FOLLOWING and all(map(_is_contiguous, tensors))


def _is_expanded(node: Any) -> bool:
    return isinstance(node, Node) and node.target is aten.expand.default


def _is_of_one_expanded(node: Node) -> bool:
    """Whether a pointwise operator reads one tensor, an expanded one, and computes of each copy the same."""
    return (
        is_pointwise(node.target)
        and node.target is not aten.clone.default
        and len(node.all_input_nodes) == 1
        and not draws(node)
        and _is_expanded(node.args[0])
        and _is_contiguous(node.meta["val"])
    )


def _puts_in_order(node: Node) -> bool:
    return node.target is aten.clone.default and node.kwargs == {"memory_format": torch.contiguous_format}


def _shape(node: Node) -> Any:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) and value.dim() == 4 else None


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.stride())
    return [_strides(one) for one in value] if isinstance(value, (tuple, list)) else None


def _is_contiguous(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and _has_strides(fake, range(fake.dim()))


def _is_dense(fake: torch.Tensor) -> bool:
    """Whether some order of the dimensions makes the tensor contiguous."""
    return _is_contiguous(fake) or bool(physical_order(fake))


def _is_channels_last(fake: torch.Tensor) -> bool:
    return fake.dim() == 4 and _has_strides(fake, (0, 2, 3, 1))


def _has_strides(fake: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether memory goes through the dimensions in `order`, without gaps."""
    return in_order([fake.shape[axis] for axis in order], [fake.stride(axis) for axis in order])
