"""A linear layer that torch runs is one call of oneDNN's: product, bias and the GELU after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.boundary import in_order
from ort_dynamo.passes.fx.analysis.views import RESHAPES
from ort_dynamo.passes.fx.analysis.work import multiplications
from ort_dynamo.torch_internals.operators import aten, is_absent, mkldnn
from ort_dynamo.torch_internals.processor import is_x86
from ort_dynamo.torch_internals.symbols import known_true

__all__ = ["FuseLinear"]

_LINEAR = mkldnn._linear_pointwise.default

_LEAST = 1 << 24
"""Multiplications from which the call gains: it takes some 15 µs more to begin, and 0.76 to 0.96 of the time (AVX-512,
48 to 3,072 wide, one thread and two)."""


@dataclass(frozen=True)
class FuseLinear(PassBase):
    """Products with a bias that torch runs on a CPU in float32 become calls of oneDNN's, with the GELU that follows.

    `addmm` writes the bias into the result and adds the product to it, and a GELU reads and writes all of it once more.
    Here each element is written once. A GELU is taken along where nothing else reads what it is of; its values are
    those of torch's kernel, which is oneDNN's, too. No other activation is: oneDNN's ReLU and clamp make a number of
    NaN, and its GELU by tanh is not torch's. Products differ by rounding.
    """

    name: str = "fuse_linear"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values."""
        if not _has_onednn():
            return PassResult(graph_module, False)
        graph = graph_module.graph
        layers = [node for node in graph.find_nodes(op="call_function", target=aten.addmm.default) if _is_layer(node)]
        for layer in layers:
            _fuse(layer)
        if layers:
            graph_module.recompile()
        return PassResult(graph_module, bool(layers))


def _has_onednn() -> bool:
    backend: Any = torch.backends.mkldnn
    return is_x86() and not is_absent(_LINEAR) and backend.is_available() and backend.enabled


def _is_layer(addmm: Node) -> bool:
    """Whether a product is of rows with a weight that is transposed, plus a bias for each column."""
    bias, image, transposed = addmm.args
    weight = _transposed(transposed)
    read = [one.meta["val"] for one in (bias, image, weight) if isinstance(one, Node)]
    return (
        len(read) == 3
        and not addmm.kwargs
        and read[0].dim() == 1
        and known_true(read[0].shape[0] == read[2].shape[0])
        and all(map(_is_plain, read))
        and multiplications(addmm) >= _LEAST
    )


def _transposed(node: Any) -> Any:
    """What a node is the transpose of, if it is one."""
    return node.args[0] if isinstance(node, Node) and node.target is aten.t.default else None


def _is_plain(fake: torch.Tensor) -> bool:
    is_float = fake.dtype == torch.float32 and fake.device.type == "cpu"
    return is_float and in_order(fake.shape, fake.stride())


def _fuse(addmm: Node) -> None:
    bias, image, transposed = addmm.args
    gelu = _gelu_of(addmm)
    addmm.target = _LINEAR
    addmm.args = (image, _transposed(transposed), bias, *(("none", [], "") if gelu is None else ("gelu", [], "none")))
    if not transposed.users:  # type: ignore[union-attr]
        addmm.graph.erase_node(transposed)  # type: ignore[arg-type]
    if gelu is not None:
        gelu.replace_all_uses_with(gelu.args[0])  # type: ignore[arg-type]
        addmm.graph.erase_node(gelu)


def _gelu_of(layer: Node) -> Node | None:
    """The GELU, by the error function, of a layer's result or a view of it, if it is all that reads it."""
    node = layer
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten.gelu.default:
            return node if node.kwargs.get("approximate", "none") == "none" else None
        if node.target not in RESHAPES:
            break
    return None
