"""Fake tensors: shapes, dtypes and strides without numbers."""

from __future__ import annotations

from typing import Any

import torch

# Every tested version has them here; the fake values of a traced graph are made of them.
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Node

from ort_dynamo.torch_internals.lookup import private
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = [
    "FAKE_TENSOR_LOG",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "fakes_around",
    "of_fixed_sizes",
    "storage_identity",
]

_tracing_context = private("torch._guards:TracingContext")


def of_fixed_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with static sizes, in the running trace, for a tensor that Dynamo has not seen.

    AOTAutograd would make its sizes symbolic. Outside of a trace, or if torch has no access to it, give the tensor.
    """
    context = None if _tracing_context is None else _tracing_context.try_get()
    mode = None if context is None else context.fake_mode
    if mode is None or isinstance(tensor, FakeTensor):
        return tensor
    return mode.from_tensor(tensor, static_shapes=True)


def fakes_around(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors of a node's result and of its arguments."""
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The logger on which torch reports calls that do not fit. Under another name, reports are only not silenced."""


def storage_identity(tensor: torch.Tensor) -> int:
    """Identify the allocation of a tensor, also of a fake one; views of it give the same number.

    It is the address of torch's storage object, since data_ptr() works for real tensors alone. A torch without that
    address gives the hash of the Python storage object, which versions before 2.1 make anew at each call.
    """
    storage: Any = tensor.untyped_storage()
    found = getattr(storage, "_cdata", None)
    return hash(storage) if found is None else int(found)
