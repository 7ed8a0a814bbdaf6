"""Graphs of convolutions that torch runs, before and after ConvertToChannelsLast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast
from ort_dynamo.testing import assert_close

__all__ = ["FASTER", "IMAGES", "WEIGHT", "assert_same", "block", "conv", "converted", "instance_norm", "traced"]


def strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A dimension of one element may have any stride.
        return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    return [strides(one) for one in value] if isinstance(value, (tuple, list)) else value


class _Checked(Interpreter):
    """Runs a graph and compares each result's strides with its fake value's."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not _is_free(n) and result is not None:
            assert strides(result) == strides(n.meta["val"]), n.format_node()
        return result


def _is_free(node: Node) -> bool:
    """Check for a node whose strides the kernel chooses; the next node restores those of the graph."""
    backward = torch.ops.aten.convolution_backward.default
    return node.target is backward or (bool(node.all_input_nodes) and node.all_input_nodes[0].target is backward)


def traced(function: Callable[..., Any], *inputs: torch.Tensor, chosen: bool = True, mode: str = "fake") -> GraphModule:
    """Trace a function, all of which torch runs; without `chosen`, all but its ReLU."""
    gm = make_fx(function, tracing_mode=mode)(*inputs)
    for node in gm.graph.nodes:
        if node.op == "call_function" and (chosen or "relu" not in node.name):
            node.meta[CHOSEN] = True
    return gm


def assert_same(gm: GraphModule, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Check that a graph computes the same as the function, in the same strides."""
    expected, actual = function(*inputs), _Checked(gm).run(*inputs)
    for index, (mine, theirs) in enumerate(zip(_leaves(actual), _leaves(expected), strict=True)):
        assert_close(mine, theirs, f"output {index}")


def converted(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> tuple[GraphModule, bool]:
    """The graph of `function`, all torch's, after the pass; it must compute the same, in the same strides."""
    gm = traced(function, *inputs, mode=mode)
    modified = run_twice(ConvertToChannelsLast(), gm)
    assert_same(gm, function, *inputs)
    return gm, modified


def _leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [one for one in value if one is not None]


_SEEDED = torch.Generator().manual_seed(0)
IMAGES = torch.randn(2, 8, 12, 12, generator=_SEEDED)
WEIGHT = torch.randn(8, 8, 3, 3, generator=_SEEDED)

FASTER = 'chosen="torch\'s convolutions are faster in channels_last"'
"""The mark of a node that the pass adds, in the text of a graph."""


def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1)


def instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    wanted: Sequence[bool] = (False, False, False),
) -> tuple[torch.Tensor, ...]:
    """Normalize each channel of each image, as torch does: by a batch normalization of a view.

    Returns:
        The result, and those gradients that are wanted of its exponential: of the image, weight and bias.
    """
    count, channels, *size = x.shape
    view = x.view(1, count * channels, *size)
    scale, shift = (None if one is None else one.repeat(count) for one in (weight, bias))
    result, mean, deviation = torch.ops.aten._native_batch_norm_legit.no_stats(view, scale, shift, True, 0.1, 1e-5)
    image = result.view(x.shape)
    if not any(wanted):
        return (image,)
    given = image.exp().view(view.shape), view, scale, None, None, mean, deviation, True, 1e-5, wanted
    gradients = torch.ops.aten.native_batch_norm_backward(*given)
    sizes = x.shape, (count, channels), (count, channels)
    pairs = zip(gradients, sizes, wanted, strict=True)
    return image, *(gradient.view(size) for gradient, size, is_wanted in pairs if is_wanted)


def block(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Compute a block of ConvNeXt, which normalizes and multiplies channels as the last dimension."""
    normed = F.layer_norm(conv(x, w).permute(0, 2, 3, 1), (8,))
    return x + (F.linear(normed, inside) * scale).permute(0, 3, 1, 2)
