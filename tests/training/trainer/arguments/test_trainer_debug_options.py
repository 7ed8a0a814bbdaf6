"""Section 2.2 of ORTTrainer's reference: options of debugging, and internal ones, have their effect."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from small_trainers import Mlp, batches, losses, make_trainer
from torch import Tensor, nn

from ort_dynamo import optim
from ort_dynamo.options.groups import DumpOptions


def domains(path: Path) -> set[str]:
    return {node.domain for node in onnx.load(path).graph.node}


# -- debug -------------------------------------------------------------------------------------------------------------


def test_deterministic_compute_opens_deterministic_sessions() -> None:
    def seen(*_: Any) -> None:
        modes.append(torch.are_deterministic_algorithms_enabled())

    modes: list[bool] = []
    for deterministic in (True, False):
        model = Mlp()
        model.register_forward_hook(torch.compiler.disable(seen))
        trainer = make_trainer(model=model, one_session=False, debug={"deterministic_compute": deterministic})
        trainer.train_step(*batches(1)[0])
        assert not torch.are_deterministic_algorithms_enabled()
    assert modes == [True, False]


class Different(Mlp):
    """Computes something else when it is traced."""

    def forward(self, input1: Tensor) -> Tensor:
        found = super().forward(input1)
        return found + 1 if torch.compiler.is_compiling() else found


def test_check_model_export_compares_once_before_the_first_step() -> None:
    trainer = make_trainer(model=Different(), debug={"check_model_export": True})
    for _ in range(2):
        with pytest.raises(AssertionError, match="Mismatch between outputs of PyTorch model and exported ONNX model"):
            trainer.train_step(*batches(1)[0])
    assert trainer._train_step_info.step == 0
    make_trainer(model=Different()).train_step(*batches(1)[0])
    dropping = make_trainer(model=Mlp(dropout=0.5), debug={"check_model_export": True})
    dropping.train_step(*batches(1)[0])


def test_each_graph_is_written_to_its_path(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 8)
            self.norm = nn.LayerNorm(8)
            self.fc2 = nn.Linear(8, 3)

        def forward(self, input1: Tensor) -> Tensor:
            return self.fc2(self.norm(F.relu(self.fc1(input1))).transpose(0, 1).transpose(0, 1))

    names = (
        "model_after_graph_transforms_path",
        "model_with_gradient_graph_path",
        "model_with_training_graph_path",
        "model_with_training_graph_after_optimization_path",
    )
    paths = {name: str(tmp_path / f"{name}.onnx") for name in names}
    trainer = make_trainer(optim.AdamConfig(), Normed(), debug={"graph_save_paths": paths})
    trainer.train_step(*batches(1)[0])
    forward, gradients, step, optimized = (onnx.load(path).graph for path in paths.values())
    assert any(node.op_type == "LayerNormalization" for node in forward.node)
    assert not any("Grad" in node.name for node in forward.node)
    assert any("Grad" in node.name for node in gradients.node)
    assert not any("AdamOptimizer" in node.name for node in gradients.node)
    assert any("AdamOptimizer" in node.name for node in step.node)
    assert {one.name for one in gradients.output} >= {"loss", "predictions", "fc1.weight.grad"}
    assert any(node.domain == "com.microsoft" for node in optimized.node)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    trainer.train_step(*batches(1)[0])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


# -- internal ----------------------------------------------------------------------------------------------------------


def test_internal_postprocess_is_our_fusions() -> None:
    for enabled in (True, False):
        trainer = make_trainer(_internal_use={"enable_internal_postprocess": enabled})
        trainer.train_step(*batches(1)[0])
        assert trainer._running is not None
        assert trainer._running.options.passes.fuse == enabled


def test_the_opset_of_files_is_the_one_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, input1: Tensor) -> Tensor:
            return torch.sigmoid(self.fc2(torch.relu(self.fc1(input1)))).sum()

    desc = {"inputs": [("input1", [6, 4])], "outputs": [("loss", [], True)]}
    x, _ = batches(1)[0]
    for version in (14, 13, 12):
        trainer = make_trainer(model=Plain(), desc=desc, loss_fn=None, _internal_use={"onnx_opset_version": version})
        loss = trainer.eval_step(x)
        with caplog.at_level(logging.WARNING, logger="orttraining"):
            caplog.clear()
            trainer.save_as_onnx(tmp_path / "model.onnx")
        model = onnx.load(tmp_path / "model.onnx")
        (opset,) = [one.version for one in model.opset_import if one.domain == ""]
        said = [one for one in caplog.messages if f"onnx cannot convert it to opset {version}" in one]
        assert (opset == version) != bool(said), (opset, said)
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {"input1": x.numpy()})[0], loss.numpy(), rtol=2e-5)


class Gelus(Mlp):
    """With an operator that ONNX Runtime has a kernel of its own for."""

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(input1)))


def test_without_contrib_ops_neither_files_nor_sessions_have_them(tmp_path: Path) -> None:
    found = []
    for allowed in (True, False):
        torch.manual_seed(1)
        path, folder = tmp_path / f"{allowed}.onnx", tmp_path / str(allowed)
        trainer = make_trainer(
            optim.AdamConfig(lr=0.01),
            Gelus(),
            one_session=False,
            _internal_use={"enable_onnx_contrib_ops": allowed},
            debug={"graph_save_paths": {"model_with_training_graph_path": str(path)}},
        )
        trainer.eval_step(*batches(1)[0])
        assert trainer._running is not None
        options = trainer._running.options
        trainer._running.options = dataclasses.replace(options, dump=DumpOptions(save_onnx=str(folder)))
        found.append(losses(trainer, batches(2)))
        compiled = [domains(one) for one in folder.glob("*.onnx")]  # as ONNX Runtime's own optimizers get them
        assert len(compiled) == 2
        assert ("com.microsoft" in set.union(*compiled)) == allowed
        assert domains(path) <= ({"", "com.microsoft"} if allowed else {""})
    assert found[0] == pytest.approx(found[1], rel=2e-5)
