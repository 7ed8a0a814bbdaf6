"""Several processes train as one does on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replicated
import torch
from ranks import Ranks
from replicated import CASES, SAVED, Normed, joined, make, share, train, weights_of
from small_trainers import DESC, Mlp, classify, make_options, make_trainer
from torch import Tensor

from ort_dynamo import ORTTrainer, optim
from ort_dynamo.errors import CheckpointFileError, ProcessGroupError, SeveralProcessesError
from ort_dynamo.training.checkpoint import aggregate_checkpoints

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 2e-6}


def assert_like_one(found: list[Any], name: str) -> None:
    """Compare the losses' mean and all weights with those of one process that began with rank 0's weights."""
    config, levels = CASES[name]
    levels = {key: value for key, value in levels.items() if key != "distributed"}
    trainer = make(0, 1, config, levels)
    expected = train(trainer, joined())
    of_ranks = [rank["cases"][name] for rank in found]
    np.testing.assert_allclose(np.mean([one["losses"] for one in of_ranks], 0), expected, err_msg=name, **CLOSE)
    for weight, value in weights_of(trainer).items():
        for one in of_ranks:
            assert np.array_equal(one["weights"][weight], of_ranks[0]["weights"][weight]), (name, weight)
        np.testing.assert_allclose(of_ranks[0]["weights"][weight], value, err_msg=f"{name} {weight}", **CLOSE)


def assert_cases(found: list[Any]) -> None:
    for name in CASES:
        assert_like_one(found, name)
    elements = sum(one.numel() for one in Mlp().parameters())
    whole = {rank["cases"]["adam"]["moments"] for rank in found}
    assert whole == {2 * elements}
    divided = [rank["cases"]["zero"]["moments"] for rank in found]
    assert sum(divided) == 2 * elements
    assert max(divided) < 2 * elements
    config, levels = CASES["sgd"]
    expected = train(make(0, 1, config, levels), joined())
    np.testing.assert_allclose(np.mean([rank["first"] for rank in found], 0), expected, **CLOSE)
    for rank in found:
        steps = [(all_finite, step, scale) for all_finite, step, scale, _ in rank["overflow"]]
        assert steps == [(True, 1, 1024.0), (True, 2, 1024.0), (False, 2, 512.0), (True, 3, 512.0)]
        before, after = rank["overflow"][1][3], rank["overflow"][2][3]
        assert all(np.array_equal(before[name], after[name]) for name in before)
    torch.manual_seed(1)
    first = Normed().state_dict()
    for rank in found:
        assert np.array_equal(rank["buffers"]["unused.weight"], first["unused.weight"].numpy())
        for name, value in found[0]["buffers"].items():
            assert "running" in name or np.array_equal(rank["buffers"][name], value), name


def test_two_processes_train_as_one_does(ranks: Ranks) -> None:
    assert_cases(ranks.run(replicated.cases, 2, timeout=150))


@pytest.mark.slow
def test_four_processes_train_as_one_does(ranks: Ranks) -> None:
    assert_cases(ranks.run(replicated.cases, 4, timeout=220))


# -- Adasum --------------------------------------------------------------------------------------------------------


def adasum_of(gradients: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The formula, in float64, over neighbours, pairs of pairs, and so on."""
    while len(gradients) > 1:
        pairs = zip(gradients[::2], gradients[1::2], strict=True)
        gradients = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a + (1 - (a * b).sum() / (2 * (b * b).sum())) * b
            for a, b in pairs
        ]
    return gradients[0]


def gradient_of(batch: tuple[Tensor, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    torch.manual_seed(1)
    model = Mlp().double()
    classify(model(batch[0].double()), batch[1]).backward()
    return {name: one.grad.numpy() for name, one in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_adasum_reduces_by_its_formula(ranks: Ranks, world: int) -> None:
    found = ranks.run(replicated.adasum, world)
    gradients = [gradient_of(share(joined(1), rank, world)[0]) for rank in range(world)]
    torch.manual_seed(1)
    for name, one in Mlp().named_parameters():
        expected = one.detach().double().numpy() - adasum_of([gradient[name] for gradient in gradients])
        for rank in found:
            assert np.array_equal(rank[name], found[0][name])
        np.testing.assert_allclose(found[0][name], expected, **CLOSE)
        mean = one.detach().double().numpy() - np.mean([gradient[name] for gradient in gradients], 0)
        assert not np.allclose(found[0][name], mean, rtol=1e-3, atol=1e-4), "the average would pass, too"


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "then"), [(2, 1), (4, 2)])
def test_training_resumes_on_fewer_ranks(ranks: Ranks, tmp_path: Path, world: int, then: int) -> None:
    went_on = ranks.run(replicated.save, world, tmp_path, timeout=150)
    resumed = (
        [replicated.resume(0, 1, tmp_path, world)]
        if then == 1
        else ranks.run(replicated.resume, then, tmp_path, world, timeout=150)
    )
    for name, (model, config) in SAVED.items():
        losses = [np.mean([rank[name] for rank in found], 0) for found in (resumed, went_on)]
        if model is not Normed:
            np.testing.assert_allclose(*losses, err_msg=name, **CLOSE)
        paths = [tmp_path / f"{name}-{rank}" for rank in range(world)]
        state = aggregate_checkpoints(paths, pytorch_format=False)
        assert state["trainer_options"]["world_size"] == 1
        assert set(state["model"]["full_precision"]) == set(model().state_dict())
        trainer = make(0, 1, config, {}, model)
        with pytest.raises(AssertionError, match="Expected number of files to load"):
            trainer.load_checkpoint(paths[0])
        cut = tmp_path / f"{name}-cut"
        cut.write_bytes(paths[-1].read_bytes()[:-100])
        with pytest.raises(CheckpointFileError):
            trainer.load_checkpoint(*paths[:-1], cut)
    # A batch's statistics are of a rank's share: where shares are larger than they were, the losses are others.
    for rank in range(world):
        trainer = make(0, 1, SAVED["normed"][1], {}, Normed)
        trainer.load_checkpoint(*(tmp_path / f"normed-{one}" for one in range(world)))
        own = share([joined()[10]], rank, world)[0]
        np.testing.assert_allclose(train(trainer, [own])[0], went_on[rank]["normed"][0], **CLOSE)


def test_a_weight_of_an_earlier_step_is_updated_alike_in_all_processes(ranks: Ranks) -> None:
    found = ranks.run(replicated.branches, 2)
    for name, expected in found[0][0].items():
        for each_step, last_step in found:
            assert np.array_equal(each_step[name], expected), name
            np.testing.assert_allclose(last_step[name], expected, err_msg=name, **CLOSE)


def test_processes_resume_within_an_accumulation(ranks: Ranks) -> None:
    for went_on, resumed in ranks.run(replicated.resume_within, 2):
        assert all(np.array_equal(one, resumed[name]) for name, one in went_on.items())


# -- errors --------------------------------------------------------------------------------------------------------


def test_the_others_get_an_error_where_a_rank_fails(ranks: Ranks) -> None:
    first, last = ranks.outcomes(replicated.fails, 2, timeout=90)
    assert "ValueError: this rank fails" in last.error
    assert "train_step" in first.error
    assert "RuntimeError" in first.error or "DistBackendError" in first.error
    assert first.exitcode == 1  # it did not wait until it was stopped


def test_options_that_say_something_else_than_the_group_are_errors(ranks: Ranks) -> None:
    told = ranks.run(replicated.disagrees, 2)
    for rank, text in enumerate(told):
        assert "distributed.world_size is 3, but the process group's size is 2" in text
        assert f"distributed.world_rank is {1 - rank}, but this process's rank is {rank}" in text
        assert f"distributed.local_rank is {rank + 1}, but the environment's LOCAL_RANK is {rank}" in text
        assert "distributed.world_size is 1, but the process group's size is 2" in text
        assert "Save it after a step that updates" in text


def refusal(monkeypatch: pytest.MonkeyPatch, **distributed: Any) -> str:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    trainer = make_trainer(distributed=distributed)
    with pytest.raises((ProcessGroupError, SeveralProcessesError)) as caught:
        trainer.train_step(*joined(1)[0])
    return str(caught.value)


def test_without_a_group_the_error_tells_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torchrun --nproc-per-node 4 PROGRAM" in refusal(monkeypatch, world_size=4, world_rank=1)


def test_adasum_of_three_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "world_size must be a power of two, not 3" in refusal(monkeypatch, world_size=3, enable_adasum=True)


def test_variables_of_another_size_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = ORTTrainer(Mlp(), DESC, optim.SGDConfig(), classify, make_options(distributed={"world_size": 2}))
    with pytest.raises(ProcessGroupError, match="the environment's WORLD_SIZE is 8"):
        trainer.train_step(*joined(1)[0])


def test_a_graph_of_a_divided_step_is_an_error() -> None:
    levels = {"world_size": 2, "deepspeed_zero_optimization": {"stage": 1}}
    paths = {"graph_save_paths": {"model_with_training_graph_path": "step.onnx"}}
    trainer = make_trainer(distributed=levels, debug=paths)
    with pytest.raises(SeveralProcessesError, match="Save the graphs in one process"):
        trainer.train_step(*joined(1)[0])


def test_one_process_with_zero_saves_and_loads(tmp_path: Path) -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.01), distributed={"deepspeed_zero_optimization": {"stage": 1}})
    train(trainer, joined(2))
    trainer.save_checkpoint(tmp_path / "one")
    again = make_trainer(optim.AdamConfig(lr=0.01))
    again.load_checkpoint(tmp_path / "one")
    assert train(again, joined(1)) == train(trainer, joined(1))
