"""Flattens a trainer's state to {name: tensor} and back, and joins those of several ranks.

Weights have their own names. An optimizer's tensors of a weight are "Moment_1_", "Moment_2_" or "Update_Count_" and the
weight's name; its tensor of all weights is "Step". A tensor that ZeRO split is flattened, and "_view_" and the rank
follow its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ort_dynamo.training.checkpointing.array_types import array_of, tensor_of

__all__ = ["flatten", "join", "unflatten"]

_SPLIT = ("Moment_1", "Moment_2")
_OF_A_WEIGHT = re.compile("(Moment_1|Moment_2|Update_Count)_(.*)", re.DOTALL)
_VIEW = re.compile("(.*)_view_([0-9]+)", re.DOTALL)


def flatten(state: Mapping[str, Any], include_optimizer_state: bool) -> dict[str, torch.Tensor]:
    """Flatten a state, as `ORTTrainer.state_dict()` has it, into tensors of their own memory, on the CPU.

    Raises:
        ValueError: a weight has the name that an optimizer's state gets.
    """
    partitions = state.get("partition_info", {})
    rank = int(state.get("trainer_options", {}).get("world_rank", 0))
    flat: dict[str, torch.Tensor] = {}

    def add(key: str, value: Any, weight: str | None = None) -> None:
        array = np.array(array_of(value) if isinstance(value, torch.Tensor) else value)
        if weight in partitions and list(array.shape) != _shape(partitions[weight]["original_dim"]):
            key = f"{key}_view_{rank}"
        if key in flat:
            raise ValueError(f"{key!r} is the name of both a weight and an optimizer's state")
        flat[key] = tensor_of(array)

    for name, value in state.get("model", {}).get("full_precision", {}).items():
        add(name, value, name)
    for name, states in state.get("optimizer", {}).items() if include_optimizer_state else ():
        for key, value in states.items():
            if name == "shared_optimizer_state":
                add("Step", value)
            else:
                add(f"{key}_{name}", value, name if key in _SPLIT else None)
    return flat


def unflatten(flat: Mapping[str, torch.Tensor], partitions: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Bring flat tensors into the sections `model`, `optimizer` and `partition_info` of `ORTTrainer.state_dict()`.

    Args:
        flat: {name: tensor}; the half-precision copies of weights that onnxruntime.training had are left out.
        partitions: {weight: shape of the whole} for weights that ZeRO split.
    """
    bare = {_bare(key) for key in flat}
    weights: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for key, tensor in flat.items():
        name = _bare(key)
        found = _OF_A_WEIGHT.fullmatch(name)
        if found and found[2] in bare:
            optimizer.setdefault(found[2], {})[found[1]] = array_of(tensor)
        elif name == "Step" and tensor.dtype == torch.int64:
            optimizer["shared_optimizer_state"] = {"step": array_of(tensor)}
        elif not (name.endswith("_fp16") and name.removesuffix("_fp16") in bare):
            weights[name] = array_of(tensor)
    state: dict[str, Any] = {"model": {"full_precision": weights}}
    if optimizer:
        state["optimizer"] = optimizer
    if partitions:
        state["partition_info"] = {name: {"original_dim": np.array(shape)} for name, shape in partitions.items()}
    return state


def join(
    ranks: Sequence[Mapping[str, torch.Tensor]], partitions: Mapping[str, Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Join the flat tensors of all ranks, in their order.

    Args:
        ranks: {name: tensor} of each rank.
        partitions: {weight: shape of the whole}; otherwise it is that of a tensor of the weight that was not split.

    Raises:
        AssertionError: an unsplit tensor differs between ranks, or the shape of a split one is not known.
    """
    whole: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[torch.Tensor]] = {}
    for flat in ranks:
        for key, tensor in flat.items():
            if _VIEW.fullmatch(key):
                pieces.setdefault(_bare(key), []).append(tensor.reshape(-1))
            elif key in whole:
                assert torch.equal(whole[key], tensor), f"Unsharded params must have the same value: {key}"
            else:
                whole[key] = tensor
    shapes = {name: list(tensor.shape) for name, tensor in whole.items()}
    for name, parts in pieces.items():
        found = _OF_A_WEIGHT.fullmatch(name)
        weight = found[2] if found and found[2] in {*shapes, *pieces, *partitions} else name.removesuffix("_fp16")
        if name in whole and not any(len(part) for part in parts):
            continue  # one rank has all of it
        if found and found[1] not in _SPLIT:
            whole[name] = parts[0]
            continue
        shape = partitions.get(weight, shapes.get(weight, shapes.get(f"{weight}_fp16")))
        assert shape is not None, f"Missing information: the shape of {weight}"
        joined = torch.cat(parts)
        assert joined.numel() == np.prod(shape, dtype=int), f"The parts of {name} do not make up the shape {shape}"
        whole[name] = joined.reshape(list(shape))
    return whole


def _bare(key: str) -> str:
    found = _VIEW.fullmatch(key)
    return found[1] if found else key


def _shape(original: Any) -> list[int]:
    shape: list[int] = np.asarray(original).reshape(-1).tolist()
    return shape
