"""Recurrent layers in Dynamo's graph, which is there where `torch._dynamo.config.allow_rnn` is set."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.decompositions import lstm_in_steps

__all__ = ["take_lstms_apart"]


def take_lstms_apart(gm: GraphModule) -> None:
    """Have AOTAutograd trace each LSTM that trains step by step, whatever the machine would run it by.

    On a CPU torch takes oneDNN's operator for an LSTM over data, whose gradient cannot be traced with any backend. One
    that does not train keeps that operator.
    """
    steps = lstm_in_steps()
    for node in gm.graph.find_nodes(op="call_function", target=torch.lstm):
        if steps is not None and _is_of_padded_sequences(node) and torch.is_grad_enabled() and _trains(node):
            node.target = steps


def _is_of_padded_sequences(node: Node) -> bool:
    """Whether the states are the second argument; of packed sequences that is the sizes of batches."""
    return len(node.args) == 9 and isinstance(node.args[1], (tuple, list))


def _trains(node: Node) -> bool:
    fakes = (value.meta.get("example_value") for value in node.all_input_nodes)
    return any(isinstance(fake, torch.Tensor) and fake.requires_grad for fake in fakes)
