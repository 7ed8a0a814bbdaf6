"""Trainers are copied, pickled and dropped, and their files are written often."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import DESC, FORMS, Mlp, batches, make_options, make_trainer, weights

from ort_dynamo import ORTTrainer, optim
from ort_dynamo.training import torch_internals


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
@pytest.mark.parametrize("gathers", [1, 3])
def test_a_copied_trainer_continues_by_itself(copied: Any, gathers: int) -> None:
    loss_fn = torch.nn.CrossEntropyLoss()
    options = make_options(batch={"gradient_accumulation_steps": gathers})
    trainer = ORTTrainer(Mlp(), DESC, optim.AdamConfig(lr=0.1), loss_fn, options)
    first, *rest = batches(4)
    trainer.train_step(*first)
    before = weights(trainer)
    other = copied(trainer)
    losses = [other.train_step(*one)[0].item() for one in rest]
    for name, value in before.items():
        assert (weights(trainer)[name] == value).all()
    assert [trainer.train_step(*one)[0].item() for one in rest] == losses
    for name, value in weights(other).items():
        assert (weights(trainer)[name] == value).all()


def test_a_shallow_copy_counts_steps_by_itself() -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.1))
    first, second = batches(2)
    trainer.train_step(*first)
    other = copy.copy(trainer)
    other.train_step(*second)
    other._train_step_info.fetches.append("loss")
    assert (other._train_step_info.optimization_step, trainer._train_step_info.optimization_step) == (2, 1)
    assert not trainer._train_step_info.fetches


def test_a_copy_of_a_trainer_before_its_first_step_trains_alike() -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.1))
    other = copy.deepcopy(trainer)
    losses = [[one.train_step(*batch)[0].item() for batch in batches(2)] for one in (trainer, other)]
    assert losses[0] == losses[1]


@FORMS
def test_a_dropped_trainer_is_freed(one_session: bool) -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.1), one_session=one_session, batch={"gradient_accumulation_steps": 2})
    for batch in batches(2):
        trainer.train_step(*batch)
    trainer.eval_step(*batches(1)[0])
    assert trainer._running is not None
    gone = [weakref.ref(trainer._running), *map(weakref.ref, trainer._running.combined.parameters())]
    del trainer
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_graphs_of_a_state_that_was_replaced_are_freed() -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.1))
    (batch,) = batches(1)
    trainer.train_step(*batch)
    assert trainer._running is not None
    gone = weakref.ref(trainer._running._whole[True])
    trainer.load_state_dict(trainer.state_dict())
    trainer.train_step(*batch)
    gc.collect()
    assert gone() is None


def test_files_are_written_more_often_than_a_function_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "MOST_GRAPHS", 2)
    trainer = make_trainer()
    trainer.train_step(*batches(1)[0])
    gc.collect()
    graphs = _graph_modules()
    for _ in range(4):
        trainer.save_as_onnx(tmp_path / "model.onnx")
    gc.collect()
    assert _graph_modules() == graphs


def _graph_modules() -> int:
    return sum(isinstance(one, torch.fx.GraphModule) for one in gc.get_objects())
