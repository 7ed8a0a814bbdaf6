"""Graph optimizers of a program's own, as ORTModule registered them: functions that change an ONNX graph in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import onnx
import onnx_ir as ir

__all__ = ["GraphOptimizer", "graph_optimizers", "register_graph_optimizer", "registered_optimizers"]

GraphFunction = Callable[[onnx.GraphProto], object]
_F = TypeVar("_F", bound=GraphFunction)


@dataclass(frozen=True, repr=False)
class GraphOptimizer(ir.passes.InPlacePass):
    """Has a function change the graph of a model.

    Attributes:
        function: gets the model's onnx.GraphProto and changes it in place; its behaviour is part of graph keys.
        target_modules: class names of the wrapped modules that it is for, or ("all",).
        devices: device types that it is for, or ("all",).
        priority: functions with a higher priority run first.
    """

    function: GraphFunction
    target_modules: tuple[str, ...] = ("all",)
    devices: tuple[str, ...] = ("all",)
    priority: int = 0

    def __repr__(self) -> str:
        return f"GraphOptimizer({self.function.__module__}.{self.function.__qualname__}, priority={self.priority})"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the function on a copy of the graph, which takes the graph's place if the function has changed it."""
        proto = ir.to_proto(model)
        before = proto.graph.SerializeToString(deterministic=True)
        self.function(proto.graph)
        if proto.graph.SerializeToString(deterministic=True) == before:
            return ir.passes.PassResult(model, modified=False)
        domains = {entry.domain for entry in proto.opset_import}
        proto.opset_import.extend(
            onnx.helper.make_opsetid(domain, 1) for domain in sorted({n.domain for n in proto.graph.node} - domains)
        )
        model.graph = ir.from_proto(proto).graph
        return ir.passes.PassResult(model, modified=True)


_REGISTERED: list[GraphOptimizer] = []


def register_graph_optimizer(
    target_modules: str = "all", devices: str = "all", priority: int = 0
) -> Callable[[_F], _F]:
    """Register a function that changes the ONNX graph of each forward, backward or inference that ORTModule compiles.

    It runs after our own passes and before ONNX Runtime's optimizers, for ORTModules that are created later. Its
    behaviour is part of the graph key.

    Args:
        target_modules: class names of wrapped modules, joined by "|", or "all".
        devices: device types, joined by "|", or "all".
        priority: functions with a higher priority run first.

    Returns:
        A decorator that returns the function unchanged. The function changes an onnx.GraphProto in place.
    """

    def register(function: _F) -> _F:
        _REGISTERED.append(
            GraphOptimizer(function, tuple(target_modules.split("|")), tuple(devices.split("|")), priority)
        )
        return function

    return register


def graph_optimizers(module_name: str, device: str) -> tuple[GraphOptimizer, ...]:
    """Return the optimizers for a module's class and a device type, in the order in which they run."""
    return tuple(
        one
        for one in sorted(_REGISTERED, key=lambda one: -one.priority)
        if {"all", module_name} & set(one.target_modules) and {"all", device} & set(one.devices)
    )


def registered_optimizers() -> int:
    """Count the registrations."""
    return len(_REGISTERED)
