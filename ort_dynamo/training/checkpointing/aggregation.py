"""Joins the checkpoints of all ranks into one: optimizer states that ZeRO split, weights that Megatron split.

A rank's "partition_info" has, for each weight that is split, `original_dim`, the shape of the whole, and
`megatron_row_partition`: 1 split along the first axis, 0 along the last, -1 (or nothing) not by Megatron. ZeRO splits
the flattened array. Of H horizontal ranks for each data-parallel one, rank r is the horizontal rank r % H.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training import _checkpoint_storage
from ort_dynamo.training.checkpointing.sealed_file import PathOrFile, describe
from ort_dynamo.training.checkpointing.state_sections import check_sections

__all__ = ["aggregate", "needs_aggregation"]

_SPLIT_OPTIMIZER_KEYS = ("Moment_1", "Moment_2")
_OWN_TO_A_RANK = ("random", "gradient_accumulation")
"""Sections that each rank has its own of, and nothing can be made of for one trainer."""

_STAGES = "pipeline_parallel_size"
"""The one option that may be missing."""

_SAME = {
    "mixed_precision": "Mixed precision state mismatch among checkpoint files. File: {}",
    "world_size": "World size state mismatch among checkpoint files. File: {}",
    "zero_stage": "Zero stage mismatch among checkpoint files. File: {}",
    "optimizer_name": "Optimizer name mismatch among checkpoint files. File: {}",
    "data_parallel_size": "Data parallel size mismatch among checkpoint files. File: {}",
    "horizontal_parallel_size": "Horizontal parallel size mismatch among checkpoint files. File: {}",
}


def needs_aggregation(trainer_options: Mapping[str, Any]) -> bool:
    """Check whether a rank of these options has only a part of the states."""
    split = int(trainer_options["zero_stage"]) > 0 or int(trainer_options["horizontal_parallel_size"]) > 1
    return split or _stages(trainer_options) > 1


def _stages(trainer_options: Mapping[str, Any]) -> int:
    return int(trainer_options.get(_STAGES, 1))


def aggregate(paths: Sequence[PathOrFile]) -> dict[str, Any]:
    """Join the checkpoints of ranks 0 to n-1, given in any order, into the state of one trainer.

    All ranks' trainer options and steps have to agree, and values that are not split have to be equal. Files are read
    one at a time; without ZeRO only those of the first data-parallel rank, as the others have the same. Values that
    only one rank can say (the user's values, say) are rank 0's.

    Raises:
        AssertionError: a rank is missing, there twice or of another run, or states that should be equal are not.
        CheckpointFileError, OSError: a file cannot be read.
    """
    ordered = _order(paths)
    options = ordered[0][1]
    zero, horizontal = int(options["zero_stage"]) > 0, int(options["horizontal_parallel_size"])
    parts = _Parts(zero, zero and bool(options["mixed_precision"]), horizontal)
    first: dict[str, Any] = {}
    for rank, (path, _) in enumerate(ordered if zero else ordered[: horizontal * _stages(options)]):
        loaded = check_sections(_checkpoint_storage.load(path), path)
        assert "partition_info" in loaded or not needs_aggregation(options), "Missing information: partition_info"
        first = first or {key: value for key, value in loaded.items() if key not in ("model", "optimizer")}
        assert loaded.get("train_step_info") == first.get("train_step_info"), (
            f"Train step info mismatch among checkpoint files. File: {describe(path)}"
        )
        parts.add(loaded, rank)
    lost = [key for key in _OWN_TO_A_RANK if key in first and len(ordered) > 1]
    if lost:
        warnings.warn(
            f"The aggregated state leaves out values that differ from rank to rank: {', '.join(lost)}", stacklevel=3
        )
    rest = {key: value for key, value in first.items() if key not in ("partition_info", *lost)}
    one_rank = {"zero_stage": 0, "world_rank": 0, "world_size": 1}
    sizes = {"data_parallel_size": 1, "horizontal_parallel_size": 1}
    joined = {key: value for key, value in options.items() if key != "pipeline_parallel_size"}
    return {**parts.join(), **rest, "trainer_options": {**joined, **one_rank, **sizes}}


def _order(paths: Sequence[PathOrFile]) -> list[tuple[PathOrFile, dict[str, Any]]]:
    """Order files by rank, each with its trainer options, and check that they are the ranks of one run."""
    assert len(paths) > 0, "Expected number of files to load: at least 1, got 0"
    found = []
    for path in paths:
        try:
            loaded = {"trainer_options": _checkpoint_storage.load(path, key="trainer_options")}
        except KeyError:
            raise AssertionError("Missing information: trainer_options") from None
        options = check_sections(loaded, path)["trainer_options"]
        _check_options(options, path)
        found.append((path, options))
    found.sort(key=lambda pair: int(pair[1]["world_rank"]))
    first = found[0][1]
    for rank, (path, options) in enumerate(found):
        name = describe(path)
        for key, message in _SAME.items():
            assert options[key] == first[key], message.format(name)
        assert options["world_rank"] == rank, (
            f"Unexpected rank in file at path {name}. Expected {rank}, got {options['world_rank']}"
        )
    expected = int(first["world_size"])
    assert len(found) == expected, f"Expected number of files to load: {expected}, got {len(found)}"
    ranks = int(first["data_parallel_size"]) * int(first["horizontal_parallel_size"]) * _stages(first)
    assert ranks == expected, f"World size {expected} is not the product of the parallel sizes, {ranks}"
    return found


def _check_options(options: Mapping[str, Any], path: PathOrFile) -> None:
    options = {_STAGES: 1, **options}
    least = {"world_rank": 0, "world_size": 1, "zero_stage": 0, "data_parallel_size": 1, "horizontal_parallel_size": 1}
    least[_STAGES] = 1
    for key in ("world_rank", *_SAME, _STAGES):
        if key not in options:
            raise CheckpointFileError(path=describe(path), reason=f"its trainer_options have no {key!r}")
        if key in least and not (isinstance(options[key], int) and options[key] >= least[key]):
            reason = f"its trainer option {key!r} cannot be {options[key]!r}"
            raise CheckpointFileError(path=describe(path), reason=reason)


class _Parts:
    """Collects the pieces of a state rank by rank, and joins them.

    Args:
        split_moments: whether ZeRO splits the moments of optimizers.
        split_weights: whether ZeRO splits the weights, too.
        horizontal: ranks next to each other that have the parts of Megatron's split tensors.
    """

    def __init__(self, split_moments: bool, split_weights: bool, horizontal: int) -> None:
        self._split = {"model": split_weights, "optimizer": split_moments}
        self._horizontal = horizontal
        self._pieces: dict[str, dict[tuple[str, str], dict[int, Any]]] = {}
        self._partitions: dict[str, Mapping[str, Any]] = {}

    def add(self, loaded: Mapping[str, Any], rank: int) -> None:
        """Add the pieces of a rank."""
        self._partitions = {**loaded.get("partition_info", {}), **self._partitions}
        if "model" in loaded:
            pieces = self._pieces.setdefault("model", {})
            for name, value in loaded["model"].get("full_precision", {}).items():
                pieces.setdefault((name, ""), {})[rank] = value
        if "optimizer" in loaded:
            pieces = self._pieces.setdefault("optimizer", {})
            for name, states in loaded["optimizer"].items():
                for key, value in states.items():
                    pieces.setdefault((name, key), {})[rank] = value

    def join(self) -> dict[str, Any]:
        """Join the sections that any rank had."""
        whole: dict[str, Any] = {}
        for section, pieces in self._pieces.items():
            tree = whole.setdefault(section, {})
            if section == "model":
                tree = tree.setdefault("full_precision", {})
            while pieces:
                (name, key), by_rank = pieces.popitem()  # so that not all are in memory twice
                if section == "model":
                    tree[name] = self._join_one(section, name, by_rank, f"model state {name}")
                    continue
                what = f"model state {name} and optimizer state {key}"
                joined = self._join_one(section, name, by_rank, what, key in _SPLIT_OPTIMIZER_KEYS)
                tree.setdefault(name, {})[key] = joined
        return whole

    def _join_one(self, section: str, name: str, by_rank: Mapping[int, Any], what: str, may_split: bool = True) -> Any:
        partition = self._partitions.get(name)
        if partition is None or not may_split:
            return _the_same(list(by_rank.values()), what)
        shape = tuple(int(size) for size in np.asarray(partition["original_dim"]).reshape(-1))
        row = int(np.asarray(partition.get("megatron_row_partition", -1)).reshape(-1)[0])
        by_megatron = self._horizontal > 1 and row in (0, 1)
        axis = 0 if row == 1 else -1
        local = _part_of(shape, axis, self._horizontal, what) if by_megatron else shape
        joined = []
        for index in range(self._horizontal):
            values = [by_rank[rank] for rank in sorted(by_rank) if rank % self._horizontal == index]
            assert values, f"Missing information: {what} of horizontal rank {index}"
            joined.append(_put_together(values, local, what) if self._split[section] else _the_same(values, what))
        if not by_megatron:
            return _the_same(joined, what)
        fits = all(np.shape(part) == local for part in joined)
        assert fits, f"The parts of {what} have the shapes {[*map(np.shape, joined)]}, not {local}"
        return np.concatenate(joined, axis)


def _part_of(shape: tuple[int, ...], axis: int, parts: int, what: str) -> tuple[int, ...]:
    fits = len(shape) > 0 and shape[axis] % parts == 0
    assert fits, f"Shape {shape} of {what} cannot be split in {parts} along axis {axis}"
    part = list(shape)
    part[axis] //= parts
    return tuple(part)


def _put_together(values: Sequence[Any], shape: tuple[int, ...], what: str) -> Any:
    flat = np.concatenate([np.asarray(value).reshape(-1) for value in values])
    assert flat.size == math.prod(shape), f"The parts of {what} have {flat.size} elements, its shape {shape} has others"
    return flat.reshape(shape)


def _the_same(values: Sequence[Any], what: str) -> Any:
    """Return the value that all ranks have; NaN is the same as NaN here."""
    for value in values[1:]:
        same = np.asarray(value).shape == np.asarray(values[0]).shape and _equal(np.asarray(value), values[0])
        assert same, f"Value mismatch for {what}"
    return values[0]


def _equal(array: np.ndarray[Any, Any], other: Any) -> bool:
    return bool(((array == other) | ((array != array) & (other != other))).all())
