"""Compute images between torch's convolutions in channels_last, the layout of Tensor Cores, in sessions too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.boundary import has_strides
from ort_dynamo.graph.marks import CHANNELS_LAST, CHOSEN
from ort_dynamo.passes.fx.analysis.fake_values import add_call, propagate
from ort_dynamo.passes.fx.analysis.fused_readers import is_pointwise
from ort_dynamo.passes.fx.analysis.saved_tensors import is_random
from ort_dynamo.passes.fx.torch_graph.image_nodes import ImageNodes
from ort_dynamo.passes.fx.torch_graph.images import (
    CAST_ARGUMENTS,
    POINTWISE,
    POOLS,
    SUMS,
    channels_last,
    is_back,
    is_normalized,
    is_of_channels,
    is_permuted,
    origin,
    viewed,
)
from ort_dynamo.passes.fx.torch_graph.instance_norm_sums import group_instance_norms
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose
from ort_dynamo.passes.fx.torch_graph.normalization_sums import (
    FORWARD,
    GRADIENTS,
    GROUP_NORM,
    GROUP_NORM_GRADIENT,
    Normalized,
    gradients_of,
    group_gradients_of,
    group_normalized,
    normalized,
)
from ort_dynamo.torch_internals.kernels.kernel_layouts import CONVOLUTIONS
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_equal

__all__ = ["PermuteImages"]

CONVOLVES = "torch's convolutions are faster in channels_last, which ONNX Runtime does not have"
READS = "torch's kernel reads channels_last, and ONNX Runtime's does not"


@dataclass(frozen=True)
class PermuteImages(PassBase):
    """Compute images around two-dimensional convolutions in channels_last, and let torch run those convolutions.

    The graph gets explicit permutations. The result of a convolution is permuted to (rows, height, width, channels),
    which is a view. The next operators compute such contiguous tensors, and the next convolution reads the inverse
    permutation. Values do not change, whatever layout the tensors get. A batch norm in training mode, or a group or
    instance norm, becomes sums over positions and arithmetic (`normalization_sums.py`), for fused kernels, if it
    normalizes at least four elements together. An operator without a channels_last form reads a
    contiguous copy.

    The pass handles half dtypes, float32 if cuDNN may use TF32, and static sizes, except for the batch.
    """

    name: str = "permute_images"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place."""
        graph = graph_module.graph
        if not any(map(is_permuted, graph.nodes)):
            return PassResult(graph_module, False)
        group_instance_norms(graph, _add)
        _Images(graph).change()
        graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, True)


def _add(node: Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
    return add_call(node.graph, target, args, kwargs, origin(node))


class _Images(ImageNodes):
    """Goes through a graph once, and finds a form for each operator that reads images."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._weights: dict[Node, Node] = {}
        self._wide: dict[Node, Node] = {}  # statistic in the dtype of its fake tensor -> in the one it is computed in

    def change(self) -> None:
        """Rewrite the graph."""
        (output,) = self._graph.find_nodes(op="output")
        for node in tuple(self._graph.nodes):
            if node.op == "call_function" and node not in self._gone:
                with self._graph.inserting_before(node):
                    self._follow(node)
                    if not self._visit(node):
                        self._read_as_traced(node)
        self._return_as_traced(output)
        for node in reversed(tuple(self._graph.nodes)):
            if node in self._gone and not node.users:
                self._graph.erase_node(node)

    def _visit(self, node: Node) -> bool:
        """Rewrite a node; False if it reads its images as they were traced."""
        if is_permuted(node):
            self._convolve(node)
            return True
        if not any(one in self._inner for one in node.all_input_nodes):
            return (is_back(node) and self._begin(node)) or self._expand(node)
        for form in (self._normalize, self._pool, self._compute, self._sum, self._join, self._view):
            if form(node):
                return True
        return False

    # -- nodes that torch runs ---------------------------------------------------------------------------------------

    def _convolve(self, node: Node) -> None:
        is_forward = node.target is CONVOLUTIONS[0]
        images = 1 if is_forward else 2
        args: list[Any] = list(node.args)
        for place in range(images):
            args[place] = self._image(args[place], node)
        is_ordered = has_strides(args[images].meta["val"], channels_last(4))  # its gradient is to be so as well
        args[images] = self._weight(args[images], node)
        node.args = tuple(args)
        self._run_in_torch(node, CONVOLVES)
        if not is_forward and not is_ordered:
            for item in [one for one in node.users if one.args[1] == 1]:
                self._order_weight(item)

    def _weight(self, weight: Node, reader: Node) -> Node:
        """Return a weight in channels_last; one of a single position is in both layouts."""
        fake = weight.meta["val"]
        if tuple(fake.shape[2:]) == (1, 1) or has_strides(fake, channels_last(4)):
            return weight
        if weight not in self._weights:
            kwargs: dict[str, Any] = {"memory_format": torch.channels_last}
            if weight.target is aten._to_copy.default and weight.kwargs.keys() <= CAST_ARGUMENTS:
                target, args, kwargs = weight.target, weight.args, {**weight.kwargs, **kwargs}
            else:
                target, args = aten.clone.default, (weight,)
            meta = origin(reader) | {CHOSEN: CONVOLVES}
            self._weights[weight] = add_call(self._graph, target, args, kwargs, meta)
        return self._weights[weight]

    def _order_weight(self, gradient: Node) -> None:
        """Make the gradient of a weight contiguous for its readers; the kernel gives it the layout of the images."""
        if tuple(gradient.meta["val"].shape[2:]) == (1, 1):
            return
        for user in tuple(gradient.users):
            if user.target is aten._to_copy.default and user.kwargs.keys() <= CAST_ARGUMENTS:
                user.kwargs = {**user.kwargs, "memory_format": torch.contiguous_format}
                choose([user], CONVOLVES)
                propagate([user])
            else:
                meta = origin(gradient) | {CHOSEN: CONVOLVES}
                with self._graph.inserting_before(user):
                    made = add_call(self._graph, aten.contiguous.default, (gradient,), meta=meta)
                user.replace_input_with(gradient, made)

    def _pool(self, node: Node) -> bool:
        if node.target not in POOLS:
            return False
        images = [one for one in node.all_input_nodes if one.meta["val"].dim() == 4]
        found = {one: self._image(one, node) for one in images}
        for one, image in found.items():
            node.replace_input_with(one, image)
        self._run_in_torch(node, READS)
        return True

    def _run_in_torch(self, node: Node, reason: str) -> None:
        """Make torch run an operator whose results are in channels_last, and record these."""
        traced, is_gradient = self._value(node), node.target is CONVOLUTIONS[1]
        results = [traced] if isinstance(traced, torch.Tensor) else [*traced]
        images = [n for n, one in enumerate(results) if one is not None and one.dim() == 4 and not (is_gradient and n)]
        node.meta[CHANNELS_LAST] = frozenset(images)
        choose([node], reason)
        propagate([node])
        if isinstance(traced, torch.Tensor):
            self._note(node, traced)
            return
        for item in tuple(node.users):
            propagate([item])
            if item.args[1] in images:
                self._note(item, traced[item.args[1]])

    # -- nodes that sessions compute ---------------------------------------------------------------------------------

    def _compute(self, node: Node) -> bool:
        """Compute a pointwise op on activations in channels_last."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or is_random(node):
            return False
        if not (is_pointwise(node) or node.target in POINTWISE):
            return False
        tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
        if not any(one in self._inner and known_equal(one.meta["val"].shape, value.shape) for one in tensors):
            return False
        if any(one.meta["val"].dim() > value.dim() for one in tensors) or len(tensors) != len(node.all_input_nodes):
            return False
        found = {one: self._operand(one, value.dim(), node) for one in tensors}
        both: Any = map_arg((node.args, node.kwargs), found.__getitem__)
        args, kwargs = both
        if "memory_format" in kwargs:
            kwargs = {key: one for key, one in kwargs.items() if key != "memory_format"}
        self._give(node, self._add(node, node.target, *args, **kwargs))
        return True

    def _operand(self, node: Node, rank: int, reader: Node) -> Node:
        """Return an operand of an image's operator, with channels last; one with fewer axes is broadcast."""
        fake = node.meta["val"]
        if not fake.dim():
            return node
        for _ in range(rank - fake.dim()):
            node = self._add(reader, aten.unsqueeze.default, node, 0)
        return self._permuted(node, reader)

    def _normalize(self, node: Node) -> bool:
        if node.target in FORWARD or node.target is GROUP_NORM:
            return self._normalized(node)
        return (node.target in GRADIENTS or node.target is GROUP_NORM_GRADIENT) and self._gradients(node)

    def _normalized(self, node: Node) -> bool:
        image: Any = node.args[0]
        is_grouped = node.target is GROUP_NORM
        groups: Any = node.args[6] if is_grouped else None
        if image not in self._inner or not is_normalized(image.meta["val"], groups):
            return False
        if is_grouped:
            self._take(node, group_normalized(node, self._dense(image, node), origin(node)), None)
            return True
        places = FORWARD[node.target]  # type: ignore[index]
        trains = places.trains is None or node.args[places.trains]
        if not trains or not isinstance(node.args[places.momentum], float):
            return False
        self._take(node, normalized(node, self._dense(image, node), origin(node)), places.new)
        return True

    def _dense(self, image: Node, reader: Node) -> Node:
        """Return the inner node of an image, contiguous."""
        inner = self._inner[image]
        is_dense = has_strides(inner.meta["val"], range(inner.meta["val"].dim()))
        return inner if is_dense else self._contiguous(inner, reader)

    def _take(self, node: Node, found: Normalized, new: int | None) -> None:
        """Have readers of a normalization's results read others; `new` is the index of the running mean."""
        results: dict[int, Node] = {1: found.mean, 2: found.deviation}
        if new is not None and found.running is not None:
            results |= {new: found.running[0], new + 1: found.running[1]}
        for item in tuple(node.users):
            index: Any = item.args[1]
            if index == 0:
                self._give(item, found.image)
            elif index in results:
                self._replace(item, results[index])
            else:
                value = item.meta["val"]
                empty = self._add(node, aten.full.default, [0], 0, dtype=value.dtype, device=value.device)
                self._replace(item, empty)  # memory of cuDNN's, which nothing else reads
        self._gone.add(node)

    def _gradients(self, node: Node) -> bool:
        args: Any = node.args
        gradient, image = args[:2]
        is_grouped = node.target is GROUP_NORM_GRADIENT
        statistics = args[2:4] if is_grouped else args[5:7]
        if not is_normalized(image.meta["val"], args[8] if is_grouped else None) or None in statistics:
            return False
        if not is_grouped and not args[7]:  # in eval mode
            return False
        mean, deviation = (self._wide.get(one, one) for one in statistics)
        gradient, image = (self._permuted(one, node) for one in (gradient, image))
        make = group_gradients_of if is_grouped else gradients_of
        found = make(node, gradient, image, mean, deviation, origin(node))
        for item in tuple(node.users):
            index: Any = item.args[1]
            result = found[index]
            if index == 0:
                assert result is not None
                self._give(item, result)
            elif result is not None:
                self._replace(item, result)
        self._gone.add(node)
        return True

    def _replace(self, node: Node, other: Node) -> None:
        """Make readers read another node, in the same dtype."""
        dtype = node.meta["val"].dtype
        if other.meta["val"].dtype != dtype:
            wide, other = other, self._add(node, aten._to_copy.default, other, dtype=dtype)
            self._wide[other] = wide
        node.replace_all_uses_with(other)
        self._gone.add(node)

    def _sum(self, node: Node) -> bool:
        """Sum over axes of an image."""
        args: Any = node.args
        if node.target not in SUMS or not args[1]:
            return False
        source, axes, *rest = args
        rank = source.meta["val"].dim()
        order = channels_last(rank)
        places = sorted(order.index(axis % rank) for axis in axes)
        left = [axis for place, axis in enumerate(order) if place not in places]
        kept = bool(rest and rest[0])
        if not kept and left != sorted(left):
            return False
        made = self._add(node, node.target, self._inner[source], places, *rest, **node.kwargs)
        (self._give if kept else self._replace)(node, made)
        return True

    def _join(self, node: Node) -> bool:
        """Join images along an axis."""
        if node.target is not aten.cat.default:
            return False
        parts: Any
        parts, *rest = node.args
        axis: Any = rest[0] if rest else 0
        rank = node.meta["val"].dim()
        if any(one.meta["val"].dim() != rank for one in parts):
            return False
        inner = [self._permuted(one, node) for one in parts]
        self._give(node, self._add(node, node.target, inner, channels_last(rank).index(axis % rank)))
        return True

    def _expand(self, node: Node) -> bool:
        """Expand one scalar per channel to all positions, such as the gradient of a mean over positions."""
        if not is_of_channels(node):
            return False
        args: Any = node.args
        source, sizes = args[:2]
        permuted = self._permuted(source, node)
        sizes = [sizes[axis] for axis in channels_last(len(sizes))]
        self._give(node, self._add(node, aten.expand.default, permuted, sizes))
        return True

    def _view(self, node: Node) -> bool:
        source: Any = node.args[0]
        if source not in self._inner or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        made = viewed(node, self._inner[source])
        if made is None:
            return False
        target, args, is_image = made
        result = self._add(node, target, *args)
        if is_image:
            self._give(node, result)
        else:
            self._plain[node] = result
            self._gone.add(node)
        return True
