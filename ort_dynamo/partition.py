"""The cut of the joint graph into forward and backward: our passes mark it, torch's partitioner cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule

from ort_dynamo.options import Options, PassOptions
from ort_dynamo.passes.pipelines import fx_passes, recompute_passes

__all__ = ["mark", "partitioner"]


def mark(gm: GraphModule, options: PassOptions) -> None:
    """Run the FX passes on a joint or inference graph, in place."""
    for pass_ in fx_passes(options):
        pass_(gm)


def partitioner(options: Options) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """The partition function for AOTAutograd.

    The default partition saves what the backward reads. The min-cut partition would recompute pointwise chains on
    the premise that a code generator fuses them for free; ONNX Runtime runs each of them as a kernel.
    """

    def partition(joint: GraphModule, inputs: Sequence[torch.Tensor], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        mark(joint, options.passes)
        for pass_ in recompute_passes(options.recompute):
            pass_(joint)
        return default_partition(joint, inputs, **kwargs)

    return partition
