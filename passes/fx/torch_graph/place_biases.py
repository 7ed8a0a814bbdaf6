"""Add a bias for free: in the kernel that reads a matmul's result, or in torch's own matmul."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN, HALF
from ort_dynamo.passes.fx.analysis.fake_values import add_call, derived_meta
from ort_dynamo.passes.fx.analysis.fused_readers import is_read_in_kernel
from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["PlaceBiases"]

EPILOGUE = "torch adds the bias inside the matmul, and only torch reads the result"


@dataclass(frozen=True)
class PlaceBiases(PassBase):
    """`addmm` becomes `mm` and `add` if fused kernels read it, and torch's if only torch reads it.

    For a `Gemm` with a bias, ONNX Runtime's CUDA kernel first writes the bias to the whole result, and then adds the
    matmul to it. A fused kernel reads the bias beside the matmul. Torch's kernel adds it before it writes the result.

    Args:
        chooses: whether torch may run an operator by choice.
    """

    chooses: bool
    name: str = "place_biases"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place, and mark nodes of it."""
        graph, modified, split = graph_module.graph, False, False
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            readers = list(_readers(node))
            if not readers or node.kwargs or node.args[0].meta["val"].dim() != 1 or CHOSEN in node.meta:
                continue
            if all(map(is_read_in_kernel, readers)) and not any(CHOSEN in reader.meta for reader in readers):
                _split(node)
                split = True
            elif self.chooses and all(CHOSEN in reader.meta for reader in readers):
                modified |= choose([node], EPILOGUE)
        if split:
            graph_module.recompile()
        return PassResult(graph_module, modified or split)


def _readers(value: Node) -> Iterator[Node]:
    """Yield the readers of the value in the forward or backward graph, through views."""
    for user in value.users:
        if user.meta.get(HALF) != value.meta.get(HALF) and user.op != "output":
            continue
        if is_remakable_view(user):
            yield from _readers(user)
        else:
            yield user


def _split(node: Node) -> None:
    bias, *factors = node.args
    graph, meta = node.graph, derived_meta(node)
    with graph.inserting_before(node):
        product = add_call(graph, aten.mm.default, tuple(factors), meta=meta)
        result = add_call(graph, aten.add.Tensor, (product, bias), meta=meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
