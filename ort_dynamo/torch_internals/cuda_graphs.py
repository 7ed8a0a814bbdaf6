"""torch's CUDA graph trees, which record the launches on a stream and replay them in one launch.

They are inductor's, for functions in the boxed convention. They hold the memory of a forward's and a backward's
recordings in one pool, copy inputs that move, and record again where an address that was to stay does not. torch's own
backend "cudagraphs" calls them as is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.aot import metadata
from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "forget_recordings",
    "has_graph_trees",
    "mutated_inputs",
    "recorded",
    "resting_inputs",
    "running_backward",
    "unsafe_node",
]

Boxed = Callable[[list[Any]], Any]


def _trees(name: str) -> Any:
    # Imported on use: inductor takes a second to import.
    return private(f"torch._inductor.cudagraph_trees:{name}")


def _describe() -> Any:
    return private("torch._inductor.cudagraph_utils:get_placeholder_info")


def has_graph_trees() -> bool:
    """Check whether torch has its CUDA graph trees where this module looks for them; all tested versions do."""
    return not (_trees("cudagraphify_impl") is None or _trees("get_manager") is None or _describe() is None)


_made: list[str] = []
"""The roles of the graphs recorded since the last reset."""


def forget_recordings() -> None:
    """Free the memory of recordings of ours; inductor's go with them, as when torch._dynamo is reset."""
    reset = _trees("reset_cudagraph_trees") if _made else None
    _made.clear()
    if reset is not None:
        reset()


def resting_inputs(gm: GraphModule, role: str) -> tuple[int, ...]:
    """Return the indices of a graph's inputs whose addresses stay from call to call, so that they need not be copied.

    In a backward they are the tensors that its forward saved, which lie in the recording; else AOTAutograd knows
    parameters and buffers.
    """
    if role == "backward":
        inputs = gm.graph.find_nodes(op="placeholder")
        return tuple(index for index, node in enumerate(inputs) if "tangents" not in node.name)
    known = metadata()
    return () if known is None else tuple(getattr(known, "static_input_indices", None) or ())


def mutated_inputs(gm: GraphModule) -> frozenset[int]:
    """Return the indices of the inputs that a graph writes to."""
    found = private("torch._dynamo.backends.cudagraphs:find_input_mutations")
    return frozenset() if found is None else frozenset(found(gm.graph))


def unsafe_node(gm: GraphModule) -> Node | None:
    """Return a node that torch knows not to be fit for a recording: it waits for the device, say."""
    first = private("torch._inductor.utils:get_first_incompatible_cudagraph_node")
    node: Node | None = None if first is None else first(gm)
    return node


def recorded(
    run: Boxed, gm: GraphModule, role: str, device: torch.device, resting: Sequence[int], mutated: Collection[int]
) -> Boxed:
    """Wrap `run` to be recorded at its second call and replayed from the third on, by torch's graph trees.

    Args:
        run: the boxed function of `gm`.
        gm: the graph, all of it on one device and of static shapes.
        role: "forward", "backward", "inference" or "training".
        device: the device.
        resting: see `resting_inputs`.
        mutated: see `mutated_inputs`.
    """
    make, describe = _trees("cudagraphify_impl"), _describe()
    _made.append(role)
    results = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    assert isinstance(results, (tuple, list))
    replayed: Boxed = make(
        run,
        [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")],
        tuple(resting),
        device_index=device.index or 0,
        is_backward=role == "backward",
        is_inference=role in ("inference", "training"),
        stack_traces=[node.meta.get("stack_trace") if isinstance(node, Node) else None for node in results],
        placeholders=describe(gm.graph),
        mutated_input_idxs=tuple(sorted(mutated)),
    )
    replayed._boxed_call = True  # type: ignore[attr-defined]
    return replayed


def running_backward(run: Boxed, device: torch.device) -> Boxed:
    """`run`, a backward that is not recorded, which tells the trees that its forward's results are wanted no longer."""
    find = _trees("get_manager")

    def told(inputs: list[Any]) -> Any:
        manager = find(device.index or 0, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return run(inputs)

    told._boxed_call = True  # type: ignore[attr-defined]
    return told
