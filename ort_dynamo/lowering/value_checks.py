"""Refuses tensors that no session can hold, where they enter a graph or a node gives them."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch.fx import Node

from ort_dynamo.errors import UnsupportedNodeError
from ort_dynamo.graph.boundary import ValueSpec, input_spec
from ort_dynamo.graph.dtypes import is_representable
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.sizes.symbols import given_expression

__all__ = ["check_outputs", "check_tensor", "entering_spec", "is_number"]


def entering_spec(node: Node, target: Target) -> ValueSpec:
    """Give the form in which the value of a node enters a graph; raises UnsupportedNodeError if it cannot."""
    fake = node.meta["val"]
    if isinstance(fake, torch.Tensor):
        check_tensor(fake)
    spec = input_spec(fake)
    if spec is None:
        raise UnsupportedNodeError(f"it has an input of type {type(fake).__name__}")
    if target.facts.keeps_sizes_on_host and isinstance(fake, torch.SymInt) and given_expression(fake).is_nonnegative:
        return dataclasses.replace(spec, as_rows=True)
    return spec


def is_number(node: Node) -> bool:
    """Check whether a node computes a Python scalar: arithmetic on sizes."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def check_outputs(node: Node) -> None:
    """Refuse outputs that no session can give, unless no node reads them."""
    fake = node.meta.get("val")
    if fake is None:
        raise UnsupportedNodeError("it has no output, and runs for its side effect")
    if isinstance(fake, (tuple, list)):
        read = [user.args[1] for user in node.users if user.target is operator.getitem]
        fakes = [one for index, one in enumerate(fake) if index in read]
    else:
        fakes = [fake]
    for one in fakes:
        if isinstance(one, torch.Tensor):
            check_tensor(one)
        elif one is not None:
            raise UnsupportedNodeError(f"it has an output of type {type(one).__name__}")


def check_tensor(fake: torch.Tensor) -> None:
    """Refuse a tensor that no session can give or take."""
    if fake.layout is not torch.strided:
        raise UnsupportedNodeError(f"it has a tensor of layout {fake.layout}")
    if not is_representable(fake.dtype):
        raise UnsupportedNodeError(f"dtype {fake.dtype} has no ONNX Runtime tensor")
