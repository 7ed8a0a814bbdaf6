"""Compute images between torch's convolutions in channels_last, the layout of Tensor Cores, in sessions too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.boundary import in_order, inverse, physical_order
from ort_dynamo.marks import CHANNELS_LAST, CHOSEN, HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.fake_values import FakeValues, add_call, propagate
from ort_dynamo.passes.fx.analysis.fused_readers import is_pointwise
from ort_dynamo.passes.fx.analysis.saved_tensors import draws
from ort_dynamo.passes.fx.analysis.views import ALIASES, RESHAPES
from ort_dynamo.passes.fx.torch_graph.batch_norm_sums import FORWARD, GRADIENTS, gradients_of, normalized
from ort_dynamo.passes.fx.torch_graph.choice import ORIGIN, choose
from ort_dynamo.passes.fx.torch_graph.work import CONVOLUTIONS
from ort_dynamo.torch_internals.operators import aten
from ort_dynamo.torch_internals.precision import convolves_in_tf32

__all__ = ["LayOutImages"]

CONVOLVES = "torch's convolutions are faster in channels_last, which a session's are not computed in"
POOLS = "torch's kernel reads channels_last, a session's does not"

_POOLS = frozenset(
    {
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
    }
)
"""Operators whose CUDA kernels compute channels_last images in channels_last."""

_POINTWISE = frozenset({aten.hardtanh_backward.default, aten.hardswish_backward.default, aten.elu_backward.default,
                        aten.leaky_relu_backward.default})  # fmt: skip
"""Pointwise operators without torch's tag."""

_VIEWS = frozenset({*ALIASES, *RESHAPES, aten.permute.default, aten.transpose.int, aten.slice.Tensor})

_SUMS = frozenset({aten.mean.dim, aten.sum.dim_IntList})


@dataclass(frozen=True)
class LayOutImages(PassBase):
    """Lay out images around two-dimensional convolutions in channels_last, and have torch run those convolutions.

    The graph is rewritten with explicit permutations: what a convolution gives is permuted to (rows, height, width,
    channels), which is a view, the operators that follow compute such contiguous tensors, and the next convolution
    reads the permutation back. Values do not change, whatever the layout of the tensors turns out to be. A batch norm
    that trains becomes sums over places and arithmetic (`batch_norm_sums.py`), which fused kernels compute. An operator
    that has no form here reads a contiguous copy.

    It fires for half types, and for float32 if cuDNN may use TF32; for known sizes.
    """

    name: str = "lay_out_images"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place."""
        graph = graph_module.graph
        if not any(map(_is_laid_out, graph.nodes)):
            return PassResult(graph_module, False)
        _Images(graph_module).change()
        graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, True)


def _is_laid_out(node: Node) -> bool:
    """Ask whether a node is a convolution that the pass lays out."""
    if node.target not in CONVOLUTIONS or CHANNELS_LAST in node.meta:
        return False
    operands = [one.meta["val"] for one in node.all_input_nodes]
    if not all(isinstance(one, torch.Tensor) for one in operands):
        return False
    images = [one for one in operands if one.dim() == 4]
    dtypes = {one.dtype for one in images}
    if len(images) < 2 or not all(map(_is_known, operands)) or len(dtypes) != 1:
        return False
    (dtype,) = dtypes
    return dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and convolves_in_tf32())


def _is_known(fake: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*fake.shape, *fake.stride())) and fake.numel() > 0


class _Images:
    """Goes through a graph once.

    An image has channels as axis 1, and any number of other axes. What is laid out has an inner node, which is
    contiguous with the channels last. The image's own node goes, if a session computes the inner one in its place.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._graph, self._values = gm.graph, FakeValues(gm)
        self._inner: dict[Node, Node] = {}
        self._gone: set[Node] = set()
        self._laid_out: dict[Node, torch.Tensor] = {}  # node that is in channels_last itself -> its value as traced
        self._plain: dict[Node, Node] = {}  # view of an image -> its inner node, which shows the same in memory's order
        self._outer: dict[Node, Node] = {}  # image -> the permutation back of its inner node
        self._traced: dict[tuple[Node, Any], Node] = {}  # image, half of a reader -> a copy as it was traced
        self._weights: dict[Node, Node] = {}
        self._wide: dict[Node, Node] = {}  # statistic in the dtype of its fake tensor -> in the one it is computed in

    def change(self) -> None:
        """Rewrite the graph."""
        (output,) = self._graph.find_nodes(op="output")
        for node in tuple(self._graph.nodes):
            if node.op == "call_function" and node not in self._gone:
                for one in node.all_input_nodes:
                    if one in self._plain:
                        node.replace_input_with(one, self._plain[one])
                with self._graph.inserting_before(node):
                    if not self._visit(node):
                        self._read_as_traced(node)
        self._return_as_traced(output)
        for node in reversed(tuple(self._graph.nodes)):
            if node in self._gone and not node.users:
                self._graph.erase_node(node)

    def _visit(self, node: Node) -> bool:
        """Rewrite a node; False if it reads its images as they were traced."""
        if _is_laid_out(node):
            self._convolve(node)
            return True
        if not any(one in self._inner for one in node.all_input_nodes):
            return _is_back(node) and self._begin(node)
        for form in (self._normalize, self._pool, self._compute, self._sum, self._join, self._view):
            if form(node):
                return True
        return False

    # -- images ------------------------------------------------------------------------------------------------------

    def _add(self, reader: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call where the graph inserts, which belongs to a node and runs where that does not say."""
        return add_call(self._graph, target, args, kwargs, _meta(reader))

    def _give(self, node: Node, inner: Node) -> None:
        """Have an image's readers find it as `inner`, and its node go."""
        self._inner[node] = inner
        self._gone.add(node)

    def _note(self, node: Node, traced: torch.Tensor) -> None:
        """Note an image that torch gives in channels_last."""
        with self._graph.inserting_before(node.next):
            self._inner[node] = self._add(node, aten.permute.default, node, [*_order(4)])
        self._laid_out[node] = traced

    def _begin(self, node: Node) -> bool:
        """Note a permutation of a contiguous tensor that gives an image in channels_last."""
        source: Any = node.args[0]
        self._inner[node], self._laid_out[node] = source, node.meta["val"]
        return True

    def _image(self, node: Node, reader: Node) -> Node:
        """The node of an image in the strides of channels_last."""
        if node not in self._inner:
            if _has_strides(node.meta["val"], _order(4)):
                return node
            permuted = self._add(reader, aten.permute.default, node, [*_order(4)])
            self._inner[node] = self._contiguous(permuted, reader)
        return node if node in self._laid_out else self._permuted_back(node, reader)

    def _permuted_back(self, node: Node, reader: Node) -> Node:
        """The permutation back of an image's inner node."""
        if node not in self._outer:
            inner = self._inner[node]
            order = inverse(_order(inner.meta["val"].dim()))
            self._outer[node] = self._add(reader, aten.permute.default, inner, order)
        return self._outer[node]

    def _permuted(self, node: Node, reader: Node) -> Node:
        """The inner node of an operand with all axes of an image, which may not be laid out itself."""
        if node in self._inner:
            return self._inner[node]
        return self._add(reader, aten.permute.default, node, [*_order(node.meta["val"].dim())])

    def _contiguous(self, node: Node, reader: Node) -> Node:
        return self._add(reader, aten.clone.default, node, memory_format=torch.contiguous_format)

    # -- what torch runs ---------------------------------------------------------------------------------------------

    def _convolve(self, node: Node) -> None:
        is_forward = node.target is CONVOLUTIONS[0]
        images = 1 if is_forward else 2
        args = list(node.args)
        for place in range(images):
            args[place] = self._image(args[place], node)  # type: ignore[arg-type]
        args[images] = self._weight(args[images], node)  # type: ignore[arg-type]
        node.args = tuple(args)
        self._run_in_torch(node, CONVOLVES)
        if not is_forward:
            for item in [one for one in node.users if one.args[1] == 1]:
                _order_weight(self._graph, item)

    def _weight(self, weight: Node, reader: Node) -> Node:
        """A weight in channels_last; one of a single place is in both layouts."""
        fake = weight.meta["val"]
        if tuple(fake.shape[2:]) == (1, 1) or _has_strides(fake, _order(4)):
            return weight
        if weight not in self._weights:
            kwargs = {"memory_format": torch.channels_last}
            if weight.target is aten._to_copy.default and weight.kwargs.keys() <= _CAST_ARGUMENTS:
                target, args, kwargs = weight.target, weight.args, {**weight.kwargs, **kwargs}  # type: ignore[dict-item]
            else:
                target, args = aten.clone.default, (weight,)
            meta = _meta(reader) | {CHOSEN: CONVOLVES}
            self._weights[weight] = add_call(self._graph, target, args, kwargs, meta)
        return self._weights[weight]

    def _pool(self, node: Node) -> bool:
        if node.target not in _POOLS:
            return False
        images = [one for one in node.all_input_nodes if one.meta["val"].dim() == 4]
        found = {one: self._image(one, node) for one in images}
        for one, image in found.items():
            node.replace_input_with(one, image)
        self._run_in_torch(node, POOLS)
        return True

    def _run_in_torch(self, node: Node, reason: str) -> None:
        """Have torch run an operator that gives channels_last, and note its results."""
        traced, is_gradient = node.meta["val"], node.target is CONVOLUTIONS[1]
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
                self._note(item, traced[item.args[1]])  # type: ignore[index]

    # -- what sessions compute ---------------------------------------------------------------------------------------

    def _compute(self, node: Node) -> bool:
        """Compute element by element what was computed so, of images with their channels last."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or draws(node):
            return False
        if not (is_pointwise(node) or node.target in _POINTWISE):
            return False
        tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
        if not any(one in self._inner and one.meta["val"].shape == value.shape for one in tensors):
            return False
        if any(one.meta["val"].dim() > value.dim() for one in tensors) or len(tensors) != len(node.all_input_nodes):
            return False
        found = {one: self._operand(one, value.dim(), node) for one in tensors}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)  # type: ignore[misc]
        if "memory_format" in kwargs:
            kwargs = {key: one for key, one in kwargs.items() if key != "memory_format"}
        self._give(node, self._add(node, node.target, *args, **kwargs))  # type: ignore[misc]
        return True

    def _operand(self, node: Node, rank: int, reader: Node) -> Node:
        """An operand of an image's operator, with channels last; one with fewer axes is broadcast."""
        fake = node.meta["val"]
        if not fake.dim():
            return node
        for _ in range(rank - fake.dim()):
            node = self._add(reader, aten.unsqueeze.default, node, 0)
        return self._permuted(node, reader)

    def _normalize(self, node: Node) -> bool:
        if node.target in FORWARD:
            return self._normalized(node)
        return node.target in GRADIENTS and self._gradients(node)

    def _normalized(self, node: Node) -> bool:
        places = FORWARD[node.target]  # type: ignore[index]
        image: Any = node.args[0]
        trains = places.trains is None or node.args[places.trains]
        if not trains or not _is_normalized(image.meta["val"]) or not isinstance(node.args[places.momentum], float):
            return False
        inner = self._inner[image]
        if not _has_strides(inner.meta["val"], range(inner.meta["val"].dim())):
            inner = self._contiguous(inner, node)
        found = normalized(node, inner, _meta(node))
        results: dict[int, Node] = {1: found.mean, 2: found.deviation}
        if places.new is not None and found.running is not None:
            results |= {places.new: found.running[0], places.new + 1: found.running[1]}
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
        return True

    def _gradients(self, node: Node) -> bool:
        gradient, image, *_ = node.args
        assert isinstance(gradient, Node)
        assert isinstance(image, Node)
        if not node.args[7] or not _is_normalized(image.meta["val"]) or None in node.args[5:7]:
            return False
        mean, deviation = (self._wide.get(one, one) for one in node.args[5:7])  # type: ignore[arg-type, call-overload]
        images = (self._permuted(one, node) for one in (gradient, image))
        found = gradients_of(node, *images, mean, deviation, _meta(node))
        for item in tuple(node.users):
            result = found[item.args[1]]  # type: ignore[index]
            if item.args[1] == 0:
                assert result is not None
                self._give(item, result)
            elif result is not None:
                self._replace(item, result)
        self._gone.add(node)
        return True

    def _replace(self, node: Node, other: Node) -> None:
        """Have readers read another node, of the same dtype."""
        dtype = node.meta["val"].dtype
        if other.meta["val"].dtype != dtype:
            wide, other = other, self._add(node, aten._to_copy.default, other, dtype=dtype)
            self._wide[other] = wide
        node.replace_all_uses_with(other)
        self._gone.add(node)

    def _sum(self, node: Node) -> bool:
        """Sum over axes of an image."""
        if node.target not in _SUMS or not node.args[1]:
            return False
        source, axes, *rest = node.args
        rank = source.meta["val"].dim()  # type: ignore[union-attr]
        order = _order(rank)
        places = sorted(order.index(axis % rank) for axis in axes)  # type: ignore[union-attr]
        kept = bool(rest and rest[0])
        left = [axis for place, axis in enumerate(order) if place not in places]
        if not kept and left != sorted(left):
            return False
        made = self._add(node, node.target, self._inner[source], places, *rest, **node.kwargs)  # type: ignore[index]
        if kept:
            self._give(node, made)
        else:
            self._replace(node, made)
        return True

    def _join(self, node: Node) -> bool:
        if node.target is not aten.cat.default:
            return False
        parts: Any = node.args[0]
        rank = node.meta["val"].dim()
        if any(one.meta["val"].dim() != rank for one in parts):
            return False
        axis = node.args[1] if len(node.args) > 1 else 0
        inner = [self._permuted(one, node) for one in parts]
        place = _order(rank).index(axis % rank)  # type: ignore[operator]
        self._give(node, self._add(node, node.target, inner, place))
        return True

    def _view(self, node: Node) -> bool:
        source: Any = node.args[0]
        if source not in self._inner or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        made = _viewed(node, self._inner[source])
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

    # -- going back --------------------------------------------------------------------------------------------------

    def _read_as_traced(self, reader: Node) -> None:
        for node in reader.all_input_nodes:
            if node in self._gone or node in self._laid_out:
                reader.replace_input_with(node, self._as_traced(node, reader))

    def _return_as_traced(self, output: Node) -> None:
        """Have results in the strides that they were traced with, each computed where its image is."""
        traced = {node: node.meta["val"] for node in output.all_input_nodes}
        for node in output.all_input_nodes:
            if node in self._gone or node in self._laid_out:
                with self._graph.inserting_before(node.next):
                    result = self._as_traced(node, output)
                output.replace_input_with(node, result)
                traced[result] = self._laid_out.get(node, node.meta["val"])
        self._values.update()
        for node in output.all_input_nodes:
            if isinstance(value := traced[node], torch.Tensor):
                with self._graph.inserting_before(node.next):
                    output.replace_input_with(node, self._ordered(node, value, node))

    def _as_traced(self, node: Node, reader: Node) -> Node:
        """An image in the strides that it was traced with; of a view, the same view of its base."""
        like = node if reader.op == "output" else reader
        key = node, like.meta.get(HALF)
        if key not in self._traced:
            is_there, source = node in self._laid_out, node.args[0] if node.args else None
            if node in self._gone and node.target in _VIEWS and source in self._gone.union(self._laid_out):
                base = self._as_traced(source, reader)
                self._traced[key] = self._add(like, node.target, base, *node.args[1:])
            else:
                image = node if is_there else self._permuted_back(node, like)
                self._traced[key] = self._ordered(image, self._laid_out[node] if is_there else node.meta["val"], like)
        return self._traced[key]

    def _ordered(self, image: Node, traced: torch.Tensor, reader: Node) -> Node:
        """An image in the order of a fake tensor's axes in memory."""
        order = physical_order(traced) or tuple(range(traced.dim()))
        if _has_strides(image.meta["val"], order) or not _has_strides(traced, order):
            return image
        if order == tuple(range(traced.dim())):
            return self._contiguous(image, reader)
        permuted = self._add(reader, aten.permute.default, image, [*order])
        return self._add(reader, aten.permute.default, self._contiguous(permuted, reader), inverse(order))


_CAST_ARGUMENTS = frozenset({"dtype", "layout", "device"})


_KEPT = (*ORIGIN, RECOMPUTE, "ac_graph_id")
"""What a call has of the node that it is added for, whether torch.utils.checkpoint recomputes it included."""


def _meta(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _KEPT if key in node.meta}


def _order(rank: int) -> tuple[int, ...]:
    """The axes of an image with its channels last."""
    return (0, *range(2, rank), 1) if rank > 1 else tuple(range(rank))


def _has_strides(fake: torch.Tensor, order: Sequence[int]) -> bool:
    """Ask whether memory goes through the axes in `order`, without gaps."""
    return in_order([fake.shape[axis] for axis in order], [fake.stride(axis) for axis in order])


def _is_back(node: Node) -> bool:
    """Ask whether a node permutes a contiguous tensor with the channels last to an image."""
    if node.target is not aten.permute.default:
        return False
    source: Any = node.args[0]
    fake = source.meta["val"]
    axes = [axis % fake.dim() for axis in node.args[1]]  # type: ignore[union-attr]
    is_image = fake.dim() > 2 and axes == inverse(_order(fake.dim()))
    return is_image and _is_known(fake) and _has_strides(fake, range(fake.dim()))


def _is_normalized(fake: torch.Tensor) -> bool:
    """Ask whether a batch norm of an image becomes sums: it has several channels and places."""
    rows = fake.numel() // fake.shape[1] if _is_known(fake) else 0
    return rows > 1 and fake.shape[1] > 1 and fake.is_floating_point()


def _order_weight(graph: Graph, gradient: Node) -> None:
    """Have the gradient of a weight, which the kernel lays out as the images, contiguous for its readers."""
    if tuple(gradient.meta["val"].shape[2:]) == (1, 1):
        return
    for user in tuple(gradient.users):
        if user.target is aten._to_copy.default and user.kwargs.keys() <= _CAST_ARGUMENTS:
            user.kwargs = {**user.kwargs, "memory_format": torch.contiguous_format}
            choose([user], CONVOLVES)
            propagate([user])
        else:
            with graph.inserting_before(user):
                made = add_call(graph, aten.contiguous.default, (gradient,), meta=_meta(gradient) | {CHOSEN: CONVOLVES})
            user.replace_input_with(gradient, made)


def _viewed(node: Node, inner: Node) -> tuple[Any, tuple[Any, ...], bool] | None:
    """Write a view of an image as a call on its inner node.

    Returns:
        What it calls, the arguments, and whether the result is an image with its channels last rather than the view
        itself. None if there is no such call.
    """
    source: Any = node.args[0]
    rank, shape = source.meta["val"].dim(), node.meta["val"].shape
    order = _order(rank)
    if node.target in ALIASES:
        return node.target, (inner,), True
    if node.target in (aten.permute.default, aten.transpose.int):
        axes = [axis % rank for axis in node.args[1]] if node.target is aten.permute.default else list(range(rank))  # type: ignore[union-attr]
        if node.target is aten.transpose.int:
            first, second = (int(axis) % rank for axis in node.args[1:])  # type: ignore[arg-type]
            axes[first], axes[second] = axes[second], axes[first]
        return (aten.alias.default, (inner,), False) if axes == list(order) else None
    if node.target is aten.slice.Tensor and len(node.args) > 1:
        return node.target, (inner, order.index(int(node.args[1]) % rank), *node.args[2:]), True  # type: ignore[arg-type]
    if node.target in RESHAPES and all(isinstance(size, int) for size in shape):
        whole = source.meta["val"].shape
        is_contiguous = _has_strides(inner.meta["val"], range(rank))
        if len(shape) > 1 and tuple(shape[:2]) == tuple(whole[:2]) and is_contiguous:
            return aten.view.default, (inner, [shape[0], *shape[2:], shape[1]]), True
    return None
