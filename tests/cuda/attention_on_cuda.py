"""Puts into a graph that was traced on the CPU the attention operators that torch dispatches to on CUDA.

There `scaled_dot_product_attention` becomes one operator before AOTAutograd traces it, as on the CPU: flash attention
for float16 and bfloat16 without a mask, the memory-efficient one otherwise (sdp_utils.cpp in torch's source; cuDNN's,
which newer devices prefer, has the form of flash attention). A CPU cannot be asked to trace them with a gradient.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.fakes import FakeTensor

__all__ = ["attend_as_on_cuda"]

aten = torch.ops.aten


def attend_as_on_cuda(gm: GraphModule) -> None:
    """Exchange the CPU's fused attention and its gradient in a joint graph, in place."""
    graph, made = gm.graph, dict[Node, tuple[Node, tuple[Node, Node]]]()
    for node in list(
        graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default)
    ):
        made[node] = _forward(node)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for node in list(graph.find_nodes(op="call_function", target=backward)):
        _gradient(node, made[_maker(node.args[4])][1])
    for node, (new, _) in made.items():
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    gm.recompile()


def _maker(result: Any) -> Node:
    """The operator with several results that gave `result`, which may be detached from the gradient."""
    while result.target is not operator.getitem:
        result = result.args[0]
    found: Node = result.args[0]
    return found


def _is_flash(node: Node, query: int) -> bool:
    fake: Any = node.args[query]
    half = fake.meta["val"].dtype in (torch.float16, torch.bfloat16)
    return half and node.kwargs.get("attn_mask") is None


def _forward(node: Node) -> tuple[Node, tuple[Node, Node]]:
    """The new node, and the generator's state that its gradient needs."""
    query, key, value, *rest = node.args
    dropout, causal = [*rest, *(0.0, False)[len(rest) :]]
    scale, (out, _) = node.kwargs.get("scale"), node.meta["val"]
    batch, heads, rows, _ = out.shape
    graph, flash = node.graph, _is_flash(node, 0)
    target: Any
    with graph.inserting_after(node):
        if flash:
            target, arguments = aten._scaled_dot_product_flash_attention.default, (dropout, causal, False)
            lse, state, place = _like(out, (batch, heads, rows), torch.float32), _state(out, (2,)), 6
            columns: Any = key
            lengths = (rows, columns.meta["val"].shape[2])
            found = (out, lse, None, None, *lengths, state, _state(out, ()), _like(out, (0,), out.dtype))
        else:
            target = aten._scaled_dot_product_efficient_attention.default
            arguments = (node.kwargs.get("attn_mask"), True, dropout, causal)
            lse, place = _like(out, (batch, heads, -(-rows // 32) * 32), torch.float32), 2
            found = (out, lse, _state(out, (), torch.int64), _state(out, (), torch.int64))
        new = graph.call_function(target, (query, key, value, *arguments), {"scale": scale})
    new.meta = {**node.meta, "val": found}
    for user in list(node.users):
        if user.target is operator.getitem:
            user.meta["val"] = found[user.args[1]]  # type: ignore[call-overload]
    seeds = []
    for index in (place + 1, place):
        with graph.inserting_after(new):
            seed = graph.call_function(operator.getitem, (new, index))
        seed.meta = {**node.meta, "val": found[index]}
        seeds.insert(0, seed)
    return new, (seeds[0], seeds[1])


def _gradient(node: Node, seeds: tuple[Node, Node]) -> None:
    grad, query, key, value, out, lse, *rest = node.args
    dropout, causal = rest
    first: Any = query
    second: Any = key
    target: Any
    if _is_flash(node, 1):
        target = aten._scaled_dot_product_flash_attention_backward.default
        lengths = (first.meta["val"].shape[2], second.meta["val"].shape[2])
        arguments: tuple[Any, ...] = (out, lse, None, None, *lengths, dropout, causal, *seeds)
    else:
        target = aten._scaled_dot_product_efficient_attention_backward.default
        mask = node.kwargs.get("attn_mask")
        arguments = (mask, out, lse, *seeds, dropout, [True, True, True, False], causal)
    found = (*node.meta["val"], *([] if _is_flash(node, 1) else [None]))
    with node.graph.inserting_after(node):
        new = node.graph.call_function(
            target, (grad, query, key, value, *arguments), {"scale": node.kwargs.get("scale")}
        )
    new.meta = {**node.meta, "val": found}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _like(fake: FakeTensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return fake.new_empty(shape, dtype=dtype)


def _state(fake: FakeTensor, shape: tuple[int, ...], dtype: torch.dtype = torch.uint64) -> torch.Tensor:
    return _like(fake, shape, dtype)
