"""Section 2.5 of ORTTrainer's reference: checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import DESC, batches, classify, losses, make_options, make_trainer, weights
from trained_trainers import CONFIGS, Normed, Scaled, trained

from ort_dynamo import ORTTrainer, amp
from ort_dynamo.errors import CheckpointFileError

ROOT = Path(__file__).resolve().parents[4]


def test_a_checkpoint_has_the_users_dict_and_is_not_overwritten(tmp_path: Path) -> None:
    trainer = trained()
    path = tmp_path / "checkpoint.ortcp"
    trainer.save_checkpoint(path, {"epoch": 3, "names": ["a", "b"]})
    with pytest.raises(FileExistsError):
        trainer.save_checkpoint(path)
    other = make_trainer(CONFIGS["adam"]())
    assert other.load_checkpoint(str(path)) == {"epoch": 3, "names": ["a", "b"]}
    other.eval_step(*batches(1)[0])
    tree = torch.utils._pytree.tree_leaves
    states = zip(tree(other.state_dict()), tree(trainer.state_dict()), strict=True)
    assert all(np.array_equal(a, b) for a, b in states)


def test_a_checkpoint_has_the_extra_state_of_modules(tmp_path: Path) -> None:
    trainer, other = trained("sgd", model=Scaled(3.0)), make_trainer(CONFIGS["sgd"](), model=Scaled())
    path = tmp_path / "checkpoint.ortcp"
    trainer.save_checkpoint(path, {"epoch": 3})
    assert other.load_checkpoint(path) == {"epoch": 3}
    batch = batches(1)[0]
    assert torch.equal(other.eval_step(*batch)[1], trainer.eval_step(*batch)[1])
    trainer._torch_model.get_extra_state = lambda: object()  # type: ignore[method-assign, union-attr]
    refused = ORTTrainer(trainer._torch_model, DESC, CONFIGS["sgd"](), classify, make_options())
    refused.eval_step(*batch)
    with pytest.raises(
        TypeError, match=r"state_dict\[extra_state\]\['_extra_state'\] cannot be stored in a checkpoint: obj"
    ):
        refused.save_checkpoint(tmp_path / "other.ortcp")


def test_a_checkpoint_without_optimizer_states_keeps_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.ortcp"
    trained(steps=3).save_checkpoint(path, include_optimizer_states=False)
    trainer = trained()
    before = trainer.state_dict()["optimizer"]["fc1.bias"]["Moment_1"]
    with pytest.warns(UserWarning, match="Missing key: optimizer in state_dict"):
        assert trainer.load_checkpoint(path) == {}
    assert np.array_equal(trainer.state_dict()["optimizer"]["fc1.bias"]["Moment_1"], before)
    assert trainer._train_step_info.step == 3


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trainer = trained("sgd")
    before = weights(trainer)
    path = tmp_path / "checkpoint.ortcp"
    trainer.save_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[-40] ^= 255
    path.write_bytes(content)
    with pytest.raises(CheckpointFileError):
        trainer.load_checkpoint(path)
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())


MATRIX = [(config, scaled, gathers) for config in CONFIGS for scaled in (False, True) for gathers in (1, 5)]
SAMPLE = [("adam", True, 5)]


def of_combination(config: str, scaled: bool, gathers: int) -> ORTTrainer:
    mixed = {"enabled": True, "loss_scaler": amp.DynamicLossScaler(up_scale_window=4)} if scaled else {}
    return make_trainer(
        CONFIGS[config](), Normed(), mixed_precision=mixed, batch={"gradient_accumulation_steps": gathers}
    )


def goes_on(trainer: ORTTrainer) -> list[str]:
    """The next 20 losses, to the last bit."""
    torch.manual_seed(13)
    return [loss.hex() for loss in losses(trainer, batches(20, seed=17))]


@pytest.mark.parametrize(
    "combinations", [SAMPLE, pytest.param(MATRIX, marks=pytest.mark.slow)], ids=["sample", "matrix"]
)
def test_training_goes_on_in_a_new_process_bit_for_bit(tmp_path: Path, combinations: list[Any]) -> None:
    expected = []
    for index, combination in enumerate(combinations):
        trainer = of_combination(*combination)
        losses(trainer, batches(7))  # in the middle of five gathered steps
        trainer.save_checkpoint(tmp_path / f"{index}.ortcp")
        expected.append(goes_on(trainer))
    assert all(len(set(one)) == 20 for one in expected)
    (tmp_path / "combinations.json").write_text(json.dumps(combinations))
    folders = (ROOT, Path(__file__).parent, Path(__file__).parents[1])
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def _in_a_new_process(folder: Path) -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else torch.get_num_threads())
    found = []
    for index, combination in enumerate(json.loads((folder / "combinations.json").read_text())):
        torch.manual_seed(99)
        trainer = of_combination(*combination)
        trainer.load_checkpoint(folder / f"{index}.ortcp")
        found.append(goes_on(trainer))
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    _in_a_new_process(Path(sys.argv[1]))
