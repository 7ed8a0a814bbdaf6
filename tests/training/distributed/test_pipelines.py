"""Several processes have stages of a model, and train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pipelines
import pytest
from pipelines import CASES
from ranks import Ranks
from replicated import joined, make, train
from small_graphs import perceptron
from small_trainers import DESC, Mlp, make_options, make_trainer

from ort_dynamo import ORTTrainer, optim
from ort_dynamo.errors import ProcessGroupError, SeveralProcessesError

CLOSE: dict[str, float] = {"rtol": 3e-5, "atol": 3e-6}


@pytest.mark.parametrize("world", [2, 4])
def test_stages_train_as_one_process_does(ranks: Ranks, tmp_path: Path, world: int) -> None:
    found = ranks.run(pipelines.cases, world, tmp_path, timeout=220)
    for name, (config, levels) in CASES.items():
        trainer = make(0, 1, config, levels)
        data = joined(10)
        expected = train(trainer, data)
        losses = [rank[name]["losses"] for rank in found]
        np.testing.assert_allclose(np.mean(losses, 0), expected, err_msg=name, **CLOSE)
        assert losses[0] == losses[1]
        assert found[0][name]["trained"] == ["fc1.weight", "fc1.bias"]
        assert found[1][name]["trained"] == ["fc2.weight", "fc2.bias"]
        evaluated = [one.numpy() for one in trainer.eval_step(*data[0])]
        every = found[::2]
        np.testing.assert_allclose(np.mean([rank[name]["eval"][0] for rank in every], 0), evaluated[0], **CLOSE)
        np.testing.assert_allclose(np.concatenate([rank[name]["eval"][1] for rank in every]), evaluated[1], **CLOSE)
        loaded = make(0, 1, config, levels)
        loaded.load_checkpoint(*(tmp_path / f"{name}-{rank}" for rank in range(world)))
        np.testing.assert_allclose(train(loaded, data[6:]), expected[6:], err_msg=name, **CLOSE)


def test_later_stages_read_inputs_of_the_model(ranks: Ranks) -> None:
    expected = pipelines.masked(0, 1)
    for rank in ranks.run(pipelines.masked, 3, timeout=150):
        np.testing.assert_allclose(rank["losses"], expected["losses"], **CLOSE)
        for one, other in zip(rank["eval"], expected["eval"], strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)
        np.testing.assert_allclose(rank["predicted"], expected["predicted"], **CLOSE)
        assert "several stages of the pipeline read the value" in rank["skipping"]


def test_models_of_other_forms_are_an_error(ranks: Ranks) -> None:
    found = ranks.run(pipelines.others, 2, timeout=150)
    for rank in found:
        assert "keeps no running statistics, and norm have them" in rank["normed"]
        assert "tracer cannot split this model" in rank["branching"]
        assert "num_pipeline_micro_batches (3) does not divide" in rank["odd"]
        assert "stages of the pipeline share fc1.weight. Cut so" in rank["tied"]
        assert "stage 1 of the pipeline has no weights to train" in rank["frozen"]


def _asked(cuts: str = "fc2", world: int = 2, size: int = 2, **other: Any) -> dict[str, Any]:
    asked = {"pipeline_parallel_size": size, "pipeline_cut_info_string": cuts}
    return {"world_size": world, "pipeline_parallel": asked, **other}


@pytest.mark.parametrize(
    ("cuts", "size", "message"),
    [
        ("fc3", 2, "names fc3, and the model has no such modules"),
        ("12:13/15", 2, "not ONNX edges"),
        ("", 2, "names 0 modules. Name 1"),
        ("drop,fc2", 2, "names 2 modules. Name 1"),
        ("fc2,fc2", 3, "names 1 modules. Name 2"),
    ],
)
def test_cuts_that_do_not_fit_are_an_error(cuts: str, size: int, message: str) -> None:
    trainer = make_trainer(distributed=_asked(cuts, world=size, size=size))
    with pytest.raises(SeveralProcessesError, match=message):
        trainer.train_step(*joined(1)[0])


@pytest.mark.parametrize(
    ("asked", "levels"),
    [
        ({"enable_adasum": True}, {}),
        ({"deepspeed_zero_optimization": {"stage": 1}}, {}),
        ({"horizontal_parallel_size": 2}, {}),
        ({}, {"mixed_precision": {"enabled": True}}),
        ({}, {"debug": {"check_model_export": True}}),
        ({}, {"debug": {"graph_save_paths": {"model_with_training_graph_path": "step.onnx"}}}),
    ],
)
def test_options_incompatible_with_a_pipeline_are_refused(asked: dict[str, Any], levels: dict[str, Any]) -> None:
    trainer = make_trainer(distributed=_asked(world=4, **asked), **levels)
    with pytest.raises(SeveralProcessesError, match=r"pipeline_parallel_size 2 and .* do not go together"):
        trainer.train_step(*joined(1)[0])


def test_a_pipeline_of_an_onnx_model_is_an_error() -> None:
    described = {"inputs": [("x", ["n", 4])], "outputs": [("y", ["n", 3], True)]}
    trainer = ORTTrainer(perceptron(), described, optim.SGDConfig(), None, make_options(distributed=_asked()))
    with pytest.raises(SeveralProcessesError, match="needs a torch model, not an ONNX model"):
        trainer.train_step(joined(1)[0][0])


def test_a_model_with_a_loss_of_its_own_is_an_error() -> None:
    trainer = ORTTrainer(Mlp(), DESC, optim.SGDConfig(), None, make_options(distributed=_asked()))
    with pytest.raises(SeveralProcessesError, match="needs a loss_fn"):
        trainer.train_step(*joined(1)[0])


def test_a_size_that_does_not_divide_the_processes_is_an_error() -> None:
    trainer = make_trainer(distributed=_asked(world=3))
    with pytest.raises(ProcessGroupError, match=r"pipeline_parallel_size \(2\) does not divide world_size \(3\)"):
        trainer.train_step(*joined(1)[0])
