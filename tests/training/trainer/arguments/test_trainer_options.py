"""Section 2.2 of ORTTrainer's reference: options of batches, devices, sessions and weights have their effect."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from small_trainers import DESC, SGD, Mlp, batches, classify, losses, make_options, make_trainer, weights

from ort_dynamo import ORTTrainer, ORTTrainerOptions, amp, optim
from ort_dynamo.errors import DeviceNotAvailableError, InvalidOptionError
from ort_dynamo.testing import assert_close
from ort_dynamo.training.trainer.settings import backend_options, training_device

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
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps", "meta"])
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


@pytest.mark.parametrize("name", ["dense.weight", "forward", "training", "layer.1.", "v"])
def test_frozen_weights_and_groups_take_the_names_of_an_onnx_file(name: str) -> None:
    tensors = [numpy_helper.from_array(np.ones(size, np.float32), one) for one, size in ((name, (4, 4)), ("v.a", 4))]
    nodes = [
        helper.make_node("MatMul", ["x", name], ["h"]),
        helper.make_node("Mul", ["h", "v.a"], ["y"]),
        helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0),
    ]
    x, loss = (helper.make_tensor_value_info(one, 1, shape) for one, shape in (("x", ["b", 4]), ("loss", [])))
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [loss], tensors), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    desc = {"inputs": [("x", ["b", 4])], "outputs": [("loss", [], True)]}
    options = make_options(utils={"frozen_weights": [name]})
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), None, options)
    trainer.train_step(torch.ones(2, 4))
    moved = [not np.array_equal(one, np.ones_like(one)) for one in weights(trainer).values()]
    assert sorted(moved) == [False, True]
    (weight,) = [key for key, one in weights(trainer).items() if one.ndim == 2]
    assert (weights(trainer)[weight] == 1).all()
    config = optim.AdamConfig([{"params": [name], "alpha": 0.5}], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = ORTTrainer(model, desc, config, None, make_options())
        trainer.train_step(torch.ones(2, 4))
    assert trainer._running is not None
    alphas = {group.weights[0].name: group.rule.alpha for group in trainer._running.state.groups}  # type: ignore[union-attr]
    assert alphas == {weight: 0.5, "v.a": 0.9}


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
