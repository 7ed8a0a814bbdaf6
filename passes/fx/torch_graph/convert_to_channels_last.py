"""Compute a graph of convolutions that torch runs whole in channels_last, the layout of torch's kernels."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.boundary import has_strides, inverse, physical_order
from ort_dynamo.graph.marks import CHOSEN, HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.aliases import AliasSets
from ort_dynamo.passes.fx.analysis.fake_values import propagate
from ort_dynamo.passes.fx.analysis.saved_tensors import is_random
from ort_dynamo.passes.fx.analysis.storage_places import reads_by_place
from ort_dynamo.passes.fx.analysis.views import is_expanded
from ort_dynamo.passes.fx.torch_graph.channels_last_forms import (
    GROUP_NORM,
    asks_size,
    can_center,
    center,
    decides_layout,
    has_sizes_of_images,
    is_alias,
    is_of_one_expanded,
    puts_in_order,
    slice_of,
    with_views,
)
from ort_dynamo.passes.fx.torch_graph.count_multiplications import (
    CONVOLUTIONS,
    convolution_weight,
    convolves_images,
    weighs_more_than_images,
)
from ort_dynamo.passes.fx.torch_graph.instance_norm_sums import sum_instance_norms
from ort_dynamo.passes.fx.torch_graph.mark_chosen import KEPT, add_chosen
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.kernel_layouts import IMAGE_OPERATORS, convolves_in_onednn, follows_layout
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten
from ort_dynamo.torch_internals.kernels.view_operators import ALIASES
from ort_dynamo.torch_internals.sizes.symbols import known_equal, known_true

__all__ = ["ConvertToChannelsLast"]

_VIEWS = (aten.slice.Tensor, aten.permute.default, *ALIASES)
"""Views that a tensor in channels_last allows just like a contiguous one."""

_CONTIGUOUS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
"""Operators that read contiguous tensors, and are left alone where they find them.

A permutation of a tensor in channels_last is contiguous, so a layer normalization of channels copies nothing."""

_CONTIGUOUS_IMAGES, _CHANNELS_LAST = (0, 1, 2, 3), (0, 2, 3, 1)


@ordering(needs=[Condition.PLACED])
@dataclass(frozen=True)
class ConvertToChannelsLast(PassBase):
    """Convert to channels_last the inputs of two-dimensional convolutions in torch, and all operators that follow.

    oneDNN's kernels compute in channels_last; they reorder a contiguous tensor before each of them and its result
    afterwards. Where sessions take part of the graph, the pass changes nothing: a session's tensors are contiguous, and
    each boundary would reorder. Nor does it convert a convolution whose weight, which is contiguous as its gradient has
    to be, is larger than the images and its kernel than one element: the weight would be reordered instead.

    An operator reads all its images in channels_last, or all as they were traced. It follows if the table of kernels
    (`kernel_layouts.py`) promises the layout of its results and fake tensors agree. Outputs, and the
    inputs of other operators, have the strides that they were traced with. Values stay the same, but for the order in
    which sums are taken. Without oneDNN the pass does nothing.
    """

    name: str = "convert_to_channels_last"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint graph or an inference graph in place."""
        graph = graph_module.graph
        computing = [node for node in graph.nodes if _is_tensor(node)]
        convolutions = [node for node in computing if convolves_images(node)]
        if not convolutions or not all(CHOSEN in node.meta or _is_unplaced(node) for node in computing):
            return PassResult(graph_module, False)
        onednn: Any = torch.backends.mkldnn
        if not (onednn.is_available() and onednn.enabled):
            return PassResult(graph_module, False)
        is_changed = sum_instance_norms(graph, _add)
        modified = _Layout(graph_module).change() or is_changed
        if modified:
            graph.lint()
            graph_module.recompile()
        return PassResult(graph_module, modified)


class _Layout:
    """Goes through a graph once; `_moved` holds the nodes that have other strides now."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._moved: dict[Node, Any] = {}  # node -> the fake value that it was traced with
        self._back: dict[tuple[Node, Any], Node] = {}  # node that moved, direction of a reader -> a copy as traced
        self._over: dict[Node, Node] = {}  # node that did not -> a copy in channels_last
        self._modified = False

    def change(self) -> bool:
        for node in tuple(self._gm.graph.nodes):
            if node.op == "output":
                self._read_as_traced(node)
            elif node.op == "call_function":
                self._visit(node)
        for copied in [one for one in self._over.values() if not one.users]:  # of an operator that did not follow
            self._gm.graph.erase_node(copied)
        return self._modified

    def _visit(self, node: Node) -> None:
        if convolves_images(node) and not self._wants_channels_last(node):
            self._read_as_traced(node)
        elif is_of_one_expanded(node):
            self._expand_late(node)
        elif asks_size(node) or (not convolves_images(node) and self._is_as_traced(node)):
            return
        elif puts_in_order(node):
            self._merge_copy(node)
        elif node.target is operator.getitem or node.target in _VIEWS or is_alias(node):
            self._propagate(node)
        elif node.users and all(map(slice_of, node.users)):  # a split, whose parts become slices
            self._slice(node)
        elif not self._follow(node):
            self._read_as_traced(node)
            propagate(with_views(node))

    def _wants_channels_last(self, convolution: Node) -> bool:
        """Check whether a convolution gains: oneDNN takes its dtype, and no larger weight is reordered instead."""
        weight = convolution_weight(convolution)
        reorders = weighs_more_than_images(convolution) and math.prod(weight.shape[2:]) != 1
        return convolves_in_onednn(weight.dtype) and not reorders

    def _is_as_traced(self, node: Node) -> bool:
        """Check whether the operands have their traced layout, or are contiguous for a node that only asks that."""
        moved = [argument for argument in node.all_input_nodes if argument in self._moved]
        return not moved or (node.target in _CONTIGUOUS and all(_is_contiguous(one.meta["val"]) for one in moved))

    def _expand_late(self, node: Node) -> None:
        """Compute each element once, before it is expanded: the expanded result then has any layout.

        An example is the gradient of a mean: a division by the number of elements, which a convolution reads.
        """
        expanded: Any = node.args[0]
        with self._gm.graph.inserting_before(node):
            computed = _add(node, node.target, (expanded.args[0], *node.args[1:]), node.kwargs)
            late = _add(node, expanded.target, (computed, *expanded.args[1:]), expanded.kwargs)
        node.replace_all_uses_with(late)
        self._gm.graph.erase_node(node)
        self._moved[late] = node.meta["val"]
        self._modified = True

    def _slice(self, split: Node) -> None:
        """Make slices of the parts of a split."""
        for part in tuple(split.users):
            part.args, part.target = slice_of(part) or (), aten.slice.Tensor
            part.meta[CHOSEN] = split.meta[CHOSEN]
        self._gm.graph.erase_node(split)
        self._modified = True

    def _merge_copy(self, node: Node) -> None:
        """Make a copy in contiguous order an alias, where its source is contiguous now and no caller can tell."""
        (source,) = node.all_input_nodes
        graph, fake = self._gm.graph, source.meta["val"]
        begins = fake.storage_offset() == node.meta["val"].storage_offset()
        moves = not known_true(begins) and reads_by_place(graph)
        if _is_contiguous(fake) and not moves and AliasSets(graph).may_merge(node, source):
            node.target, node.args, node.kwargs = aten.alias.default, (source,), {}
            propagate([node])
            self._modified = True

    # -- following ---------------------------------------------------------------------------------------------------

    def _follow(self, node: Node) -> bool:
        """Make a node read all its images in one layout and return it; give False, without a change, if impossible."""
        layout, images = self._images(node)
        centers = node.target is GROUP_NORM and layout == _CHANNELS_LAST
        if layout is None or (centers and not can_center(node)):
            return False
        in_layout = {image: self._in_layout(image, layout, node) for image in images}
        if None in in_layout.values():
            return False
        if all(copied is image and image not in self._moved for image, copied in in_layout.items()):
            return True  # the program has laid them out
        before, arguments = node.meta.get("val"), (node.args, node.kwargs)
        for image, copied in in_layout.items():
            if copied is not image:
                node.replace_input_with(image, copied)  # type: ignore[arg-type]
        propagate([node])
        if not _keeps_promise(node, layout):
            node.args, node.kwargs = arguments
            return False
        if node.target is CONVOLUTIONS[1]:
            self._keep_weights(node, before)
        else:
            self._note(node, before)
        if centers:
            given: Any = arguments[0][0]
            self._moved |= dict.fromkeys(center(node, given, _add), self._moved.get(given, given.meta["val"]))
        self._modified |= any(copied is not image for image, copied in in_layout.items())
        return True

    def _images(self, node: Node) -> tuple[tuple[int, ...] | None, list[Node]]:
        """Return the layout in which a node can read its images, and the operands to convert; None without one."""
        tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
        if node.target in CONVOLUTIONS:
            weight = node.args[1 if node.target is CONVOLUTIONS[0] else 2]
            return _CHANNELS_LAST, [one for one in tensors if one.meta["val"].dim() == 4 and one is not weight]
        if node.target in IMAGE_OPERATORS and has_sizes_of_images(node):
            images = [one for one in tensors if one.meta["val"].dim() == 4]
        elif follows_layout(node.target) and not is_random(node):
            value = next(one for one in _values(node) if isinstance(one, torch.Tensor))
            images = [one for one in tensors if _has_shape(one, value) and not _is_repeated(one.meta["val"])]
        else:
            return None, []
        orders = [order for one in images if one in self._moved and (order := _order(one)) is not None]
        if not orders:
            return None, []
        if node.target in IMAGE_OPERATORS:
            return (orders[0] if orders[0] in (_CONTIGUOUS_IMAGES, _CHANNELS_LAST) else None), images
        return orders[0], [*images, *(o for o in tensors if o not in images and not _agrees(o.meta["val"], orders[0]))]

    def _in_layout(self, image: Node, layout: tuple[int, ...], reader: Node) -> Node | None:
        """Return an operand in a layout: itself, or a copy; None if a copy would gain nothing."""
        fake = image.meta["val"]
        unsure = decides_layout(image, reader)
        if fake.dim() == len(layout) and has_strides(fake, layout) and not unsure:
            return image
        order = _order(image)
        is_followed = image in self._moved and (order is not None or image.target is aten.expand.default)
        if layout != _CHANNELS_LAST or fake.dim() != 4 or not (is_followed or unsure or order == _CONTIGUOUS_IMAGES):
            return None
        if image not in self._over:
            with self._gm.graph.inserting_before(reader):
                copied = self._over[image] = _copy(image, torch.channels_last)
            _put_in_half_of(copied, reader)
            self._moved[copied] = self._moved.get(image, fake)
        return self._over[image]

    def _propagate(self, node: Node) -> None:
        before = node.meta.get("val")
        if before is not None:
            propagate([node])
            self._note(node, before)

    def _note(self, node: Node, before: Any) -> None:
        if _strides(before) != _strides(node.meta["val"]):
            self._moved[node] = before

    def _keep_weights(self, convolution: Node, before: Any) -> None:
        """Restore the traced layout of a convolution's weight gradient, which may follow the layout of the images."""
        for item in tuple(convolution.users):
            if item.args[1] == 1:
                with self._gm.graph.inserting_before(item.next):
                    made = _ordered_as(before[1], item)
                item.replace_all_uses_with(made[-1], lambda user, first=made[0]: user is not first)  # type: ignore[misc]
        value = convolution.meta["val"]
        self._moved[convolution] = type(value)((before[0], *value[1:]))
        self._modified = True

    # -- going back --------------------------------------------------------------------------------------------------

    def _read_as_traced(self, reader: Node) -> None:
        for argument in reader.all_input_nodes:
            if argument in self._moved:
                reader.replace_input_with(argument, self._as_traced(argument, reader))
                self._modified = True

    def _as_traced(self, moved: Node, reader: Node) -> Node:
        """Return `moved` in its traced layout: a copy; for a view, the same view of its base's copy.

        It belongs to the graph (forward or backward) of its first reader: the forward saves no copy that only the
        backward reads.
        """
        source = moved if reader.op == "output" else reader
        half = source.meta.get(HALF)
        if (moved, half) not in self._back:
            base: Any = self._as_traced(moved.args[0], reader) if moved.target in _VIEWS else None  # type: ignore[arg-type]
            after = moved if base is None or base < moved else base  # a view's sizes may be computed between them
            with self._gm.graph.inserting_before(after.next if reader.op == "output" else reader):
                if base is None:
                    made = _copied_as(self._moved[moved], moved)
                else:
                    made = [_add(base, moved.target, (base, *moved.args[1:]), moved.kwargs)]
            for one in made:
                _put_in_half_of(one, source)
            self._back[moved, half] = made[-1]
        return self._back[moved, half]


_REASON = "torch's convolutions are faster in channels_last"


def _add(like: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    return add_chosen(like, _REASON, KEPT, target, args, kwargs or {})


def _put_in_half_of(copied: Node, reader: Node) -> None:
    """Compute a copy in its reader's graph: the forward does not copy a tensor that only the backward reads."""
    if reader.meta.get(HALF) == copied.meta.get(HALF):
        return
    for key in (HALF, RECOMPUTE, "ac_graph_id"):
        copied.meta.pop(key, None)
    if HALF in reader.meta:
        copied.meta[HALF] = reader.meta[HALF]


def _copy(source: Node, layout: torch.memory_format) -> Node:
    return _add(source, aten.clone.default, (source,), {"memory_format": layout})


def _copied_as(traced: torch.Tensor, source: Node) -> list[Node]:
    """Give a copy of `source` with the strides of a fake value, which is contiguous in some order of its dimensions."""
    if _is_contiguous(traced):
        return [_copy(source, torch.contiguous_format)]
    order = physical_order(traced)
    permuted = _add(source, aten.permute.default, (source, [*order]), {})
    copied = _copy(permuted, torch.contiguous_format)
    return [permuted, copied, _add(source, aten.permute.default, (copied, inverse(order)), {})]


def _ordered_as(traced: torch.Tensor, source: Node) -> list[Node]:
    """Return the same, without a copy where `source` turns out to be contiguous and was traced so."""
    if _is_contiguous(traced):
        return [_add(source, aten.contiguous.default, (source,), {})]
    return _copied_as(traced, source)


def _is_tensor(node: Node) -> bool:
    return any(isinstance(one, torch.Tensor) for one in _values(node))


def _values(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (tuple, list)) else [value]


def _is_unplaced(node: Node) -> bool:
    """Check whether no session runs the node and it needs no placement: an input, a collective, a getitem."""
    return not isinstance(node.target, OpOverload)


def _keeps_promise(node: Node, layout: tuple[int, ...]) -> bool:
    """Check that fake results of the layout's rank have it; the gradient of a convolution's weight may have any."""
    results = [_values(node)[0]] if node.target is CONVOLUTIONS[1] else _values(node)
    tensors = [one for one in results if isinstance(one, torch.Tensor) and one.dim() == len(layout)]
    return all(has_strides(one, layout) for one in tensors)


def _has_shape(node: Node, value: torch.Tensor) -> bool:
    return known_equal(node.meta["val"].shape, value.shape)


def _is_repeated(fake: torch.Tensor) -> bool:
    return any(is_expanded(fake, axis) for axis in range(fake.dim()))


def _agrees(fake: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Check whether a broadcast or expanded operand leaves the order of the other operands' dimensions unchanged.

    It has at most one dimension of several elements, or these lie in memory in that order.
    """
    missing = len(order) - fake.dim()
    axes = [axis - missing for axis in order if axis >= missing]
    long = [axis for axis in axes if not known_true(fake.shape[axis] == 1) and not known_true(fake.stride(axis) == 0)]
    return len(long) < 2 or has_strides(fake, axes)


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.stride())
    return [_strides(one) for one in value] if isinstance(value, (tuple, list)) else None


def _order(image: Node) -> tuple[int, ...] | None:
    """Return the order of an image's dimensions in memory; a slice has that of its source, with gaps."""
    order, part = _order_of(image.meta["val"]), image.args if image.target is aten.slice.Tensor else slice_of(image)
    return order if order or not part else _order(part[0])  # type: ignore[arg-type]


def _order_of(fake: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from slowest to fastest in memory, without gaps; None where there is no such order."""
    if _is_channels_last(fake):
        return _CHANNELS_LAST
    return tuple(range(fake.dim())) if _is_contiguous(fake) else physical_order(fake) or None


def _is_contiguous(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and has_strides(fake, range(fake.dim()))


def _is_channels_last(fake: torch.Tensor) -> bool:
    return fake.dim() == 4 and has_strides(fake, _CHANNELS_LAST)
