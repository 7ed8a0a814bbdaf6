"""Joint graphs for tests of passes that run before the cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule

from ort_dynamo.lowering.decompositions import decompositions
from ort_dynamo.options import PassOptions
from ort_dynamo.passes.pipelines import fx_passes


@pytest.fixture
def joint_graph() -> Callable[..., GraphModule]:
    """joint_graph(function, *args) -> the joint graph that the recomputation passes get, draws hoisted."""

    def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> GraphModule:
        found: list[GraphModule] = []

        def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            for pass_ in fx_passes(PassOptions()):
                pass_(joint)
            found.append(joint)
            return default_partition(joint, inputs, **kwargs)

        backend = aot_autograd(
            fw_compiler=lambda gm, _: gm,
            bw_compiler=lambda gm, _: gm,
            partition_fn=partition,
            decompositions=decompositions(),
        )
        torch.compile(function, backend=backend, dynamic=dynamic)(*args)
        (gm,) = found
        return gm

    return capture
