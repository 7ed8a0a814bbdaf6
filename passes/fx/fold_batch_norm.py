"""A batch normalization by running statistics becomes part of the convolution before it, which torch runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.marks import CHOSEN
from ort_dynamo.passes.fx.analysis.choice import ORIGIN, add_chosen
from ort_dynamo.passes.fx.analysis.work import CONVOLUTIONS, example_elements
from ort_dynamo.torch_internals.fakes import detect_fake_mode
from ort_dynamo.torch_internals.operators import aten

__all__ = ["FoldBatchNorm"]

_REASON = "torch runs the convolution that it is part of"


@dataclass(frozen=True)
class FoldBatchNorm(PassBase):
    """Convolutions that torch runs are scaled and shifted by their weight and bias, not by a normalization after them.

    With scale s = weight / √(variance + eps), a normalization of x * w + b is x * (s w) + (s (b - mean) + bias). That
    is a product for each element of the weight in place of a pass over the images, whose result would be a tensor more.
    So it is done where the weight has no more elements than the images that it makes, in float32, and where nothing
    else, such as a gradient, reads what is between the two. Results differ by rounding.

    Scales of all of them are computed together, in few calls.
    """

    name: str = "fold_batch_norm"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place, after placement."""
        graph = graph_module.graph
        norms = [node for node in graph.find_nodes(op="call_function", target=_NORM) if _can_be_folded(node)]
        if not norms:
            return PassResult(graph_module, False)
        values = [node.meta.get("val") for node in graph.nodes]
        with detect_fake_mode(values) or nullcontext():
            for eps in dict.fromkeys(norm.args[6] for norm in norms):
                _fold([norm for norm in norms if norm.args[6] == eps], eps)
        graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, True)


_NORM = aten._native_batch_norm_legit_no_training.default


def _can_be_folded(norm: Node) -> bool:
    convolution, *parameters = norm.args[:5]
    if not isinstance(convolution, Node) or convolution.target is not CONVOLUTIONS[0]:
        return False
    is_transposed = convolution.args[6]
    read = [one for one in (*convolution.args[:3], *parameters) if one is not None]
    return (
        CHOSEN in convolution.meta
        and not is_transposed
        and set(convolution.users) == {norm}
        and all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in norm.users)
        and all(isinstance(one, Node) and one.meta["val"].dtype == torch.float32 for one in read)
        # Known before the first of them is.
        and all(isinstance(one, Node) and one.op == "placeholder" for one in parameters)
        and _elements(convolution.args[1]) <= _elements(convolution)
    )


def _elements(node: Any) -> int:
    return example_elements(node.meta["val"])


def _fold(norms: Sequence[Node], eps: Any) -> None:
    """Fold normalizations that have the same epsilon."""
    first = norms[0]
    weight, bias, mean, variance = (
        _add(first, aten.cat.default, [norm.args[index] for norm in norms]) for index in range(1, 5)
    )
    scale = _add(
        first, aten.mul.Tensor, _add(first, aten.rsqrt.default, _add(first, aten.add.Tensor, variance, eps)), weight
    )
    shift = _add(first, aten.addcmul.default, bias, mean, scale, value=-1)
    channels = [norm.args[3].meta["val"].shape[0] for norm in norms]  # type: ignore[union-attr]
    scales, shifts = (_add(first, aten.split_with_sizes.default, one, channels) for one in (scale, shift))
    for index, norm in enumerate(norms):
        _replace(norm, *(_add(norm, operator.getitem, one, index) for one in (scales, shifts)))


def _replace(norm: Node, scale: Node, shift: Node) -> None:
    convolution: Any = norm.args[0]
    image, kernel, offset, *form = convolution.args
    ones = [1] * (kernel.meta["val"].dim() - 1)
    scaled = _add(norm, aten.mul.Tensor, kernel, _add(norm, aten.view.default, scale, [-1, *ones]))
    if offset is not None:
        shift = _add(norm, aten.addcmul.default, shift, offset, scale)
    folded = _add(norm, convolution.target, image, scaled, shift, *form)
    folded.meta |= {"val": convolution.meta["val"], CHOSEN: convolution.meta[CHOSEN]}
    for item in tuple(norm.users):
        item.replace_all_uses_with(folded)
        norm.graph.erase_node(item)
    norm.graph.erase_node(norm)
    norm.graph.erase_node(convolution)


def _add(before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call before the normalization for which it is, with the fake value that it gives."""
    with before.graph.inserting_before(before):
        return add_chosen(before, _REASON, ORIGIN, target, args, kwargs)
