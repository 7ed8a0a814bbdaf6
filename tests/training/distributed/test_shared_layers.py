"""Several processes share layers, and train as one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shared_layers
from ranks import Ranks
from replicated import joined, make, train
from shared_layers import CASES, MODELS, Attention, model_steps
from small_trainers import make_trainer
from torch import nn

from ort_dynamo.errors import ProcessGroupError, SeveralProcessesError
from ort_dynamo.training.trainer.distributed.parallel import plan_of

CLOSE: dict[str, float] = {"rtol": 3e-5, "atol": 3e-6}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_share_layers_train_as_one_does(ranks: Ranks, tmp_path: Path, world: int) -> None:
    found = ranks.run(shared_layers.cases, world, tmp_path, timeout=220)
    whole = sum(one.numel() for one in Attention().parameters())
    for name, (config, levels) in CASES.items():
        levels = {key: value for key, value in levels.items() if key != "distributed"}
        trainer = make(0, 1, config, levels, Attention)
        expected = train(trainer, joined(24))
        losses = [rank[name]["losses"] for rank in found]
        np.testing.assert_allclose(np.mean(losses, 0), expected, err_msg=name, **CLOSE)
        assert all(rank[name]["elements"] < 0.7 * whole for rank in found)
        loaded = make(0, 1, config, levels, Attention)
        loaded.load_checkpoint(*(tmp_path / f"{name}-{rank}" for rank in range(world)))
        np.testing.assert_allclose(train(loaded, joined(24)[20:]), expected[20:], err_msg=name, **CLOSE)
    for rank in found:
        assert "block.q_proj" in rank["refused"]
        assert "number of heads" in rank["refused"]


@pytest.mark.slow
def test_models_as_they_are_share_layers(ranks: Ranks) -> None:
    found = ranks.run(shared_layers.models, 2, timeout=150)
    for name in MODELS:
        losses, elements = model_steps(name, 0, 1)
        for rank in found:
            np.testing.assert_allclose(rank[name][0], losses, err_msg=name, rtol=1e-4, atol=1e-5)
            assert rank[name][1] < elements


def test_a_plan_is_found_by_structure() -> None:
    assert list(plan_of(Attention(), 2)) == [
        "block.q_proj",
        "block.k_proj",
        "block.v_proj",
        "block.o_proj",
        "feed.0",
        "feed.2",
    ]
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    assert list(plan_of(encoder, 2)) == ["linear1", "linear2"]


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)), nn.Conv1d(1, 1, 1)]
)
def test_a_model_without_pairs_is_an_error(model: nn.Module) -> None:
    with pytest.raises(SeveralProcessesError, match="no two linear layers in a row"):
        plan_of(model, 2)


def test_a_models_own_plan_comes_first() -> None:
    model = Attention()
    model.tp_plan = {"feed.*": "colwise"}  # type: ignore[assignment]
    assert list(plan_of(model, 2)) == ["feed.0", "feed.1", "feed.2"]
    model.tp_plan = {"feed.0": "grouped_gemm"}  # type: ignore[assignment]
    with pytest.raises(SeveralProcessesError, match="grouped_gemm"):
        plan_of(model, 2)


@pytest.mark.parametrize("other", [{"enable_adasum": True}, {"deepspeed_zero_optimization": {"stage": 1}}])
def test_options_incompatible_with_shared_layers_are_refused(other: dict[str, object]) -> None:
    trainer = make_trainer(distributed={"world_size": 2, "horizontal_parallel_size": 2, **other})
    with pytest.raises(SeveralProcessesError, match="do not go together"):
        trainer.train_step(*joined(1)[0])


def test_sizes_that_do_not_divide_are_an_error() -> None:
    trainer = make_trainer(distributed={"world_size": 3, "horizontal_parallel_size": 2})
    with pytest.raises(ProcessGroupError, match=r"does not divide world_size \(3\)"):
        trainer.train_step(*joined(1)[0])
