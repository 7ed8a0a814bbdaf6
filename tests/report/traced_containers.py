"""Asks torch whether Dynamo traces the modules of torch.nn itself that are compiled in place, as it does since 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["dynamo_traces_its_own_containers"]


def dynamo_traces_its_own_containers() -> bool:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    module = nn.Sequential(nn.ReLU())
    module.compile(backend=backend)
    module(torch.ones(1))
    return bool(graphs)
