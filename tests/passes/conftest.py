"""Joint graphs for tests of passes that run before the cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

from ort_dynamo.capture.trace import trace
from ort_dynamo.options.groups import PassOptions
from ort_dynamo.passes.pipelines import fx_passes
from ort_dynamo.passes.running import run_passes


@pytest.fixture
def joint_graph() -> Callable[..., GraphModule]:
    """joint_graph(function, *args) -> the joint graph that the recomputation passes get, with random ops hoisted."""

    def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> GraphModule:
        found: list[GraphModule] = []

        def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            passes = fx_passes(PassOptions())
            run_passes(passes, joint)
            run_passes(passes[:1], joint, check=True)  # test_contract.py checks after each
            found.append(joint)
            raise _Captured  # the compiled forward and backward are not needed here

        backend = partial(trace, forward=_run, backward=_run, inference=_run, partition=partition)
        with pytest.raises(BackendCompilerFailed, match="_Captured"):
            torch.compile(function, backend=backend, dynamic=dynamic)(*args)
        (gm,) = found
        return gm

    return capture


class _Captured(Exception):  # noqa: N818
    """Ends a compile that has given its joint graph."""


def _run(gm: GraphModule, _: slice) -> GraphModule:
    return gm
