"""Files as onnxruntime.training wrote them, states as ORTTrainer has them, and their comparison."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch


def write_old_file(path: Path | io.BytesIO, tree: Mapping[str, Any]) -> None:
    """Lay a state out as onnxruntime.training 1.7 to 1.13 did: groups, and h5py's choice for each value."""

    def fill(group: Any, tree: Mapping[str, Any]) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                fill(group.create_group(key), value)
            else:
                group[key] = value

    # Its mode was "w-", which h5py takes for a file object that has content, too.
    with h5py.File(path, "w-") as file:
        fill(file, tree)


def old_user_dict(user_dict: Any) -> str:
    return pickle.dumps(user_dict).hex()


def trainer_state(rank: int = 0, world_size: int = 1, zero_stage: int = 0, horizontal: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    return {
        "model": {"full_precision": weights},
        "optimizer": {
            name: {
                "Moment_1": rng.standard_normal(weight.shape, np.float32),
                "Moment_2": rng.random(weight.shape, np.float32),
                "Update_Count": np.array([5], np.int64),
            }
            for name, weight in weights.items()
        },
        "trainer_options": {
            "mixed_precision": False,
            "zero_stage": zero_stage,
            "world_rank": rank,
            "world_size": world_size,
            "optimizer_name": "AdamOptimizer",
            "data_parallel_size": world_size // horizontal,
            "horizontal_parallel_size": horizontal,
        },
        "train_step_info": {"optimization_step": 5, "step": 10},
    }


SHAPES = {"linear.weight": (4, 6), "linear.bias": (6,), "scale": (1,)}


def assert_same(found: Any, expected: Any, where: str = "value") -> None:
    """Assert that two values are of the same types and content, all the way down; NaN is NaN."""
    assert type(found) is type(expected), f"{where}: {type(found)} for {type(expected)}"
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*bits), where
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        assert found.tobytes() == expected.tobytes(), where
    elif isinstance(expected, float):
        assert found == expected or (found != found and expected != expected), where
    else:
        assert found == expected, where
