"""Run a graph's own operators in torch, for a call whose tensors ONNX Runtime cannot read: dual and batched ones, say.

Such a call runs the graph as it was before it was cut into islands: the graph around these writes over its tensors,
which no transform of torch's allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.graph.serialized_graph import SerializedGraph
from ort_dynamo.runtime.generated_code import generate_function
from ort_dynamo.runtime.outer_code import outer_code
from ort_dynamo.torch_internals.kernels.decompositions import prim_function
from ort_dynamo.torch_internals.kernels.dispatcher import sees_calls
from ort_dynamo.torch_internals.kernels.operators import aten, prims
from ort_dynamo.torch_internals.tracing.wrappers import DUAL_LEVEL, are_plain, is_batched, transform_level

__all__ = ["InTorch"]


class InTorch:
    """Runs a graph in torch where a call needs it. Its code is written at the first such call.

    Args:
        whole: the graph before it was cut into islands.

    Attributes:
        whole: the same.
    """

    def __init__(self, whole: SerializedGraph) -> None:
        self.whole = whole
        self._run: Callable[[list[Any]], Any] | None = None

    def __call__(self, given: list[Any]) -> Any:
        """Run the graph on `given`, which it empties, or return None if all of that is plain."""
        if are_plain(given):
            return None
        if self._run is None:
            gm = self.whole.module({})
            _replace_operators(gm)
            self._run = generate_function("outer", *outer_code(gm, {}))
        return self._run(given)

    def around(self, run: Callable[[list[Any]], Any], gm: GraphModule) -> Callable[[list[Any]], Any]:
        """Put a check before calls of the boxed function `run`, as in `lines`."""
        lines, values = self.lines(gm)
        asked = generate_function(
            "asked", ["def asked(given):", *lines, "    return run(given)"], {**values, "run": run}
        )
        asked._boxed_call = True  # type: ignore[attr-defined]
        return asked

    def lines(self, gm: GraphModule) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Return the first lines of a boxed function, which check for transforms, and their values by name.

        Three checks find out whether torch transforms the call. The tangents of a backward are checked one by one,
        since only they have no guards, and a check for a level of the older vmap would be slower:

            try:
                unusual = DUAL_LEVEL._current_level >= 0 or transform_level() is not None or sees_calls()
                unusual = unusual or not given[3].data_ptr()
            except (AttributeError, RuntimeError):
                unusual = True
            if unusual:
                results = in_torch(given)
                if results is not None:
                    return results

        Args:
            gm: the graph around the islands, with the inputs of the graph.
        """
        inputs = gm.graph.find_nodes(op="placeholder")
        tangents = [index for index, node in enumerate(inputs) if "tangents" in node.name]
        read = " or ".join(f"not given[{index}].data_ptr()" for index in tangents)
        asked = "DUAL_LEVEL._current_level >= 0 or transform_level() is not None or sees_calls()"
        act = ["results = in_torch(given)", "if results is not None:", "    return results"]
        if tangents:
            lines = [
                "try:",
                f"    unusual = {asked} or {read}",
                "except (AttributeError, RuntimeError):",
                "    unusual = True",
                "if unusual:",
            ]
        else:
            lines = [f"if {asked}:"]
        return [f"    {line}" for line in (*lines, *(f"    {line}" for line in act))], {
            "DUAL_LEVEL": DUAL_LEVEL,
            "transform_level": transform_level,
            "sees_calls": sees_calls,
            "in_torch": self,
        }


# -- operators that transforms do not take, and those of the same results that they do -----------------------------


def _replace_operators(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _REPLACED:
            node.target = _REPLACED[node.target]
        elif (function := prim_function(node.target)) is not None:
            node.target = function  # a prim drops tangents, unsaid


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


def _clone(tensor: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Copy a tensor; vmap takes no layout of a whole batch, and its result may have any."""
    return tensor.clone() if memory_format is None or is_batched(tensor) else tensor.clone(memory_format=memory_format)


_REPLACED: Mapping[Any, Any] = {
    aten._unsafe_view.default: aten.reshape.default,
    aten.clone.default: _clone,
    aten.view.default: aten.reshape.default,  # a batch may have strides that do not allow the view
    prims.convert_element_type.default: _convert,
}
