"""Section 2.2 of ORTTrainer's reference: every option has its documented effect."""

from __future__ import annotations

import dataclasses
import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from small_trainers import DESC, Mlp, batches, classify, losses, make_options, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, ORTTrainerOptions, PropagateCastOpsStrategy, amp, optim
from ort_dynamo.errors import DeviceNotAvailableError, InvalidOptionError
from ort_dynamo.options.groups import DumpOptions
from ort_dynamo.report.record import RECORDS, CompileRecord
from ort_dynamo.testing import assert_close
from ort_dynamo.training.trainer.settings import backend_options, training_device

SGD = optim.SGDConfig(lr=0.1)


def passes_of(record: CompileRecord) -> list[str]:
    """List the passes that ran on the models of a compile, with parameters."""
    islands = [island for graph in record.graphs for island in graph.islands]
    return [one.name for island in islands for one in island.build.passes]


def domains(path: Path) -> set[str]:
    return {node.domain for node in onnx.load(path).graph.node}


# -- batch, device, scheduler, mixed precision -------------------------------------------------------------------------


def test_gradient_accumulation_steps_delays_the_update() -> None:
    trainer = make_trainer(batch={"gradient_accumulation_steps": 2})
    batch = batches(1)[0]
    seen = [(trainer.train_step(*batch), weights(trainer)["fc1.bias"])[1] for _ in range(3)]
    assert np.array_equal(seen[0], trainer._torch_model.fc1.bias.detach().numpy())  # type: ignore[union-attr, arg-type]
    assert not np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[1], seen[2])


def test_the_device_is_where_weights_and_results_are() -> None:
    trainer = make_trainer()
    loss, _ = trainer.train_step(*batches(1)[0])
    assert loss.device.type == "cpu"
    assert trainer._running is not None
    assert trainer._running.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_said_at_the_first_step(device: str) -> None:
    trainer = ORTTrainer(Mlp(), DESC, SGD, classify, ORTTrainerOptions({"device": {"id": device}}))
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(DeviceNotAvailableError, match=f"device.id = '{device}', and torch .* finds no such device"):
            step(*batches(1)[0])
    assert trainer._train_step_info.step == 0


def test_a_device_that_has_no_name_is_refused() -> None:
    with pytest.raises(DeviceNotAvailableError, match=r"device.id = 'gpu', .* Give 'cpu', or .* as 'cuda:0'"):
        ORTTrainer(Mlp(), DESC, SGD, classify, ORTTrainerOptions({"device": {"id": "gpu"}}))


def test_options_of_a_provider_go_to_the_devices_own() -> None:
    options = ORTTrainerOptions(
        {
            "device": {"id": "cuda", "mem_limit": 1000},
            "provider_options": {
                "CUDAExecutionProvider": {"arena_extend_strategy": 1},
                "CPUExecutionProvider": {"a": 1},
            },
        }
    )
    found = backend_options(options, training_device(options)).session.provider_options
    assert found == (("arena_extend_strategy", "1"), ("gpu_mem_limit", "1000"))
    assert backend_options(options, torch.device("cpu")).session.provider_options == (("a", "1"),)
    options.provider_options = {"CUDAExecutionProvider": {"gpu_mem_limit": 7}}
    assert backend_options(options, torch.device("cuda")).session.provider_options == (("gpu_mem_limit", "7"),)
    options.device.mem_limit = 0
    options.provider_options = {}
    assert backend_options(options, torch.device("cuda")).session.provider_options == ()


def test_an_option_that_the_provider_does_not_know_is_refused() -> None:
    trainer = make_trainer(provider_options={"CPUExecutionProvider": {"use_nothing": "1"}})
    with pytest.raises(InvalidOptionError, match="use_nothing"):
        trainer.train_step(*batches(1)[0])


def test_the_scheduler_gives_the_rate() -> None:
    found = []
    for scheduler in (None, optim.LinearWarmupLRScheduler(10, 0.5)):
        trainer = make_trainer(lr_scheduler=scheduler)
        trainer.train_step(*batches(1)[0])
        before = trainer._torch_model.fc1.bias.detach().numpy()  # type: ignore[union-attr, operator]
        found.append(np.array_equal(weights(trainer)["fc1.bias"], before))
    assert found == [False, True]


def test_mixed_precision_multiplies_in_float16_and_scales_the_loss() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=2.0**30, max_loss_scale=2.0**40)
    trainer = make_trainer(mixed_precision={"enabled": True, "loss_scaler": scaler})
    _, prediction = trainer.train_step(*batches(1)[0])
    assert prediction.dtype is torch.float16
    assert scaler.loss_scale == 2.0**29  # float16 cannot hold gradients that are so great
    assert trainer._train_step_info.optimization_step == 0


# -- graph transformer -------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer layer with dropout on attention's weights."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.2, self.training) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


TRANSFORMER: dict[str, Any] = {"inputs": [("x", [2, 5, 8])], "outputs": [("loss", [], True)]}


def transformer(**levels: Any) -> tuple[list[float], CompileRecord]:
    """Losses of three steps with separate forward and backward graphs, and the record of the compile."""
    torch.manual_seed(3)
    trainer = make_trainer(SGD, Transformer(), desc=TRANSFORMER, loss_fn=None, one_session=False, **levels)
    x = torch.randn(2, 5, 8)
    torch.manual_seed(4)
    found = [float(trainer.train_step(x)) for _ in range(3)]
    assert trainer._running is not None
    assert trainer._running._split is not None
    (record,) = trainer._running._split.records
    assert record.partition is not None
    return found, record


@pytest.fixture(scope="module")
def kept() -> tuple[list[float], int]:
    found, record = transformer()
    assert record.partition is not None
    return found, record.partition.memory.nbytes


@pytest.mark.parametrize(
    ("levels", "by", "most"),
    [
        ({"graph_transformer": {"attn_dropout_recompute": True}}, "RecomputeAttentionDropout", 0.99),
        ({"graph_transformer": {"gelu_recompute": True}}, "RecomputeGelu", 0.97),
        pytest.param(
            {"graph_transformer": {"transformer_layer_recompute": True}}, "RecomputeLayers", 0.5, marks=pytest.mark.slow
        ),
        (
            {"graph_transformer": {"transformer_layer_recompute": True, "number_recompute_layers": 1}},
            "RecomputeLayers(number_recompute_layers=1",
            0.75,
        ),
        ({"utils": {"memory_efficient_gradient": True}}, "RecomputeFromInputs", 0.97),
    ],
    ids=["attention dropout", "gelu", "layers", "one layer", "from inputs"],
)
def test_recompute_options_save_fewer_bytes_and_keep_the_loss(
    kept: tuple[list[float], int], levels: dict[str, Any], by: str, most: float
) -> None:
    found, record = transformer(**levels)
    assert found == pytest.approx(kept[0], rel=1e-6)
    assert record.partition is not None
    (ran,) = [one for one in record.partition.passes if one.name.startswith(by.partition("(")[0])]
    assert ran.modified
    assert record.partition.memory.nbytes < most * kept[1]
    if "number_recompute_layers" in str(levels):
        assert record.partition.memory.nbytes > 0.5 * kept[1]


@pytest.mark.filterwarnings("ignore:transformer_layer_recompute changes nothing")
@pytest.mark.parametrize("flag", ["attn_dropout_recompute", "gelu_recompute", "transformer_layer_recompute"])
def test_a_step_that_recomputes_has_a_backward_of_its_own(flag: str) -> None:
    trainer = make_trainer(graph_transformer={flag: True})
    trainer.train_step(*batches(1)[0])
    assert trainer._running is not None
    assert not trainer._running.in_one_session


CASTS = {
    "strategy": PropagateCastOpsStrategy.INSERT_AND_REDUCE,
    "level": 2,
    "allow": ["Sin"],
}


def test_cast_options_are_those_of_the_pass() -> None:
    trainer = make_trainer(
        mixed_precision={"enabled": True},
        graph_transformer={"propagate_cast_ops_config": CASTS, "allow_layer_norm_mod_precision": True},
    )
    trainer.train_step(*batches(1)[0])
    (name,) = [one for one in passes_of(list(RECORDS)[-1]) if one.startswith("PropagateCasts")]
    assert "INSERT_AND_REDUCE" in name
    assert "level=2" in name
    assert "allow=('Sin',)" in name
    assert "allow_layer_norm_mod_precision=True" in name
    trainer = make_trainer(mixed_precision={"enabled": True})
    trainer.train_step(*batches(1)[0])
    (name,) = [one for one in passes_of(list(RECORDS)[-1]) if one.startswith("PropagateCasts")]
    assert "FLOOD_FILL" in name
    assert "level=1" in name
    assert "allow=()" in name
    assert "allow_layer_norm_mod_precision=False" in name


# -- utils -------------------------------------------------------------------------------------------------------------


def test_frozen_weights_stay_and_have_no_state() -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.1), utils={"frozen_weights": ["fc1.weight"]})
    losses(trainer, batches(2))
    model = trainer._torch_model
    assert isinstance(model, Mlp)
    assert np.array_equal(weights(trainer)["fc1.weight"], model.fc1.weight.detach().numpy())
    assert not np.array_equal(weights(trainer)["fc1.bias"], model.fc1.bias.detach().numpy())
    assert trainer.state_dict()["optimizer"].keys() == {"fc1.bias", "fc2.weight", "fc2.bias"}
    assert model.fc1.weight.requires_grad


def test_a_frozen_weight_that_is_not_there_is_refused() -> None:
    trainer = make_trainer(utils={"frozen_weights": ["fc1.weight", "fc3.weight"]})
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(RuntimeError) as raised:
            step(*batches(1)[0])
        assert str(raised.value) == "['fc3.weight'] params from 'frozen_weights' not found in the ONNX model."


def test_grad_norm_clip_clips() -> None:
    found = []
    for clips in (True, False):
        trainer = make_trainer(
            optim.AdamConfig(lr=1.0, epsilon=1.0, max_norm_clip=0.01), utils={"grad_norm_clip": clips}
        )
        trainer.train_step(*batches(1)[0])
        before = trainer._torch_model.fc2.bias.detach().numpy()  # type: ignore[union-attr, operator]
        found.append(np.abs(weights(trainer)["fc2.bias"] - before).max())
    assert found[0] < 0.01 < found[1]


@pytest.mark.parametrize("infers", [True, False])
def test_run_symbolic_shape_infer_gives_files_the_shape_of_values(infers: bool, tmp_path: Path) -> None:
    trainer = make_trainer(utils={"run_symbolic_shape_infer": infers})
    trainer.eval_step(*batches(1)[0])
    trainer.save_as_onnx(tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    shaped = {one.name for one in graph.value_info if one.type.tensor_type.HasField("shape")}
    inner = {name for node in graph.node for name in node.output} - {one.name for one in graph.output}
    assert inner & shaped == (inner if infers else set())
    named = [d.dim_param for one in graph.value_info for d in one.type.tensor_type.shape.dim]
    assert ("batch" in named) == infers


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


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_session_options_reach_the_sessions(tmp_path: Path) -> None:
    given = onnxruntime.SessionOptions()
    given.enable_profiling = True
    given.profile_file_prefix = str(tmp_path / "profile")
    trainer = make_trainer(session_options=given)
    trainer.train_step(*batches(1)[0])
    del trainer
    torch._dynamo.reset()
    gc.collect()
    assert list(tmp_path.glob("profile*.json"))


def test_options_may_be_changed_until_the_first_step() -> None:
    options = make_options()
    trainer = ORTTrainer(Mlp(), DESC, optim.SGDConfig(lr=0.0), classify, options)
    options.utils.frozen_weights = ["fc1.weight"]
    loss, _ = trainer.train_step(*batches(1)[0])
    assert_close(loss, trainer.eval_step(*batches(1)[0])[0], "loss")
    assert trainer._running is not None
    assert "fc1.weight" not in trainer._running.state.by_name
