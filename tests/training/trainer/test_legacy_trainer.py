"""The first ORTTrainer, that of onnxruntime.capi.ort_trainer: its document, and today's beside it."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTTrainer as NewTrainer
from ort_dynamo import ORTTrainerOptions, amp, optim, training
from ort_dynamo.testing import assert_close
from ort_dynamo.training.ort_trainer import (
    IODescription,
    LossScaler,
    ModelDescription,
    ORTTrainer,
    load_checkpoint,
    save_checkpoint,
)

RATE = IODescription("Learning_Rate", [1], torch.float32)


class Net(nn.Module):
    """Two layers, with dropout if asked for."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


def net(drop: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(drop)


def cross_entropy(prediction: Tensor, label: Tensor) -> Tensor:
    return nn.functional.cross_entropy(prediction, label)


def description() -> ModelDescription:
    x = IODescription("x", ["batch", 4], torch.float32)
    label = IODescription("label", ["batch"], torch.int64, num_classes=3)
    loss = IODescription("loss", [], torch.float32)
    return ModelDescription([x, label], [loss, IODescription("prediction", ["batch", 3], torch.float32)])


def batch(step: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def legacy(
    optimizer: str = "SGDOptimizer", attributes: Any = None, model: nn.Module | None = None, **kwargs: Any
) -> Any:
    return ORTTrainer(model or net(), cross_entropy, description(), optimizer, attributes, RATE, "cpu", **kwargs)


def today(config: Any, **levels: Any) -> NewTrainer:
    options = ORTTrainerOptions({"device": {"id": "cpu"}, **levels})
    return NewTrainer(net(), description().as_model_desc(), config, cross_entropy, options)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: one for name, one in trainer.state_dict().items() if name.startswith("fc")}


def assert_same(legacy_trainer: ORTTrainer, new_trainer: NewTrainer) -> None:
    expected = new_trainer.state_dict(pytorch_format=True)
    found = legacy_trainer.state_dict(include_optimizer_state=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# -- the two trainers --------------------------------------------------------------------------------------------------


def test_both_trainers_have_the_same_losses_and_weights_by_adam_with_attributes_of_each_weight() -> None:
    def attributes(name: str) -> dict[str, float | int]:
        decay = 0.0 if name.endswith("bias") else 0.01
        return {"alpha": 0.8, "beta": 0.99, "lambda": decay, "epsilon": 1e-6, "do_bias_correction": 1}

    own = legacy("AdamOptimizer", attributes)
    shared = {"alpha": 0.8, "beta": 0.99, "epsilon": 1e-6}
    group = {"params": ["fc1.weight", "fc2.weight"], "lambda_coef": 0.01}
    config = optim.AdamConfig([group], lr=0.01, **shared)
    new = today(config)
    for step in range(10):
        x, label = batch(step)
        assert torch.equal(own.train_step(x, label, 0.01)[0], new.train_step(x, label)[0]), step
    assert_same(own, new)


def test_both_trainers_agree_on_lamb_that_gathers_gradients_under_a_schedule() -> None:
    def attributes(name: str) -> dict[str, float | int]:
        return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-6, "do_bias_correction": 0}

    schedule = optim.LinearWarmupLRScheduler(total_steps=4, warmup=0.5)
    rates = [0.0, 0.05, 0.1, 0.05]
    own = legacy("LambOptimizer", attributes, gradient_accumulation_steps=3, get_lr_this_step=rates.__getitem__)
    new = today(optim.LambConfig(lr=0.1), batch={"gradient_accumulation_steps": 3}, lr_scheduler=schedule)
    for step in range(10):
        x, label = batch(step)
        assert torch.equal(own.train_step(x, label)[0], new.train_step(x, label)[0]), step
    assert (own.current_step, own.global_step_) == (10, 3)
    assert_same(own, new)


def test_both_trainers_agree_in_mixed_precision_with_their_loss_scalers() -> None:
    scaler = LossScaler("loss_scale", True, loss_scale=2.0**24, up_scale_window=2, max_loss_scale=2.0**30)
    own = legacy("AdamOptimizer", use_mixed_precision=True, loss_scaler=scaler)
    scaled = amp.DynamicLossScaler(loss_scale=2.0**24, up_scale_window=2, max_loss_scale=2.0**30)
    new = today(optim.AdamConfig(lr=0.01), mixed_precision={"enabled": True, "loss_scaler": scaled})
    scales = []
    for step in range(10):
        x, label = batch(step)
        outputs = own.train_step(x, label, torch.tensor([0.01]))
        assert len(outputs) == 2  # the scaler is told whether gradients were finite, not the program
        assert torch.equal(outputs[0], new.train_step(x, label)[0]), step
        scales.append(scaler.loss_scale_)
        assert scales[-1] == scaled.loss_scale
    assert min(scales) < scales[0] or max(scales) > scales[0]
    assert own.global_step_ == new._train_step_info.optimization_step < 10
    for name, value in new.state_dict(pytorch_format=True).items():  # 0.01 came as float32
        assert_close(own.state_dict()[name], value, name)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_takes_its_learning_rate_in_each_documented_way() -> None:
    ways: list[Any] = [
        lambda trainer, x, label: trainer.train_step(x, label, 0.5),
        lambda trainer, x, label: trainer.train_step(x, label, torch.tensor([0.5])),
        lambda trainer, x, label: trainer.train_step([x, label, torch.tensor([0.5])]),
        lambda trainer, x, label: trainer.train_step(x, label, Learning_Rate=torch.tensor([0.5])),
        lambda trainer, x, label: trainer.train_step(Learning_Rate=0.5, label=label, x=x),
        lambda trainer, x, label: trainer(x, label, torch.tensor(0.5)),
    ]
    trainer = legacy()
    x, label = batch(0)
    start = {name: one.detach() for name, one in net().state_dict().items()}
    expected = net()
    cross_entropy(expected(x), label).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.5 * parameter.grad
    for way in ways:
        trainer.load_state_dict(start)
        loss, prediction = way(trainer, x, label)
        assert (loss.shape, prediction.shape) == ((), (5, 3))
        for name, value in expected.state_dict().items():
            assert_close(trainer.state_dict()[name], value, name)


def test_the_functor_of_the_learning_rate_counts_updates_from_global_step_on() -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.1

    trainer = legacy(global_step=7, gradient_accumulation_steps=2, get_lr_this_step=rate)
    for step in range(5):
        trainer.train_step(*batch(step))
    assert asked == [7, 7, 8, 8, 9]
    assert trainer.global_step_ == 9


def test_fetches_choose_the_results_of_a_step_and_the_label_is_optional_without_the_loss() -> None:
    trainer = legacy(model=net(drop=0.5))
    x, label = batch(0)
    trainer.eval()
    before = net()(x).detach()
    assert_close(trainer.eval_step(x, fetches=["prediction"]), before, "prediction")  # the first step of all
    with pytest.warns(UserWarning, match="at least once"):
        trainer.save_as_onnx("nowhere.onnx")
    loss, prediction = trainer(x, label)
    assert_close(loss, cross_entropy(before, label), "loss")
    assert_close(prediction, before, "prediction")
    assert_close(trainer.eval_step(x, label, fetches=["prediction", "loss"])[0], before, "fetched")
    trainer.train()
    loss = trainer(x, label, 0.1, fetches=["loss"])
    assert isinstance(loss, Tensor)
    assert loss.shape == ()
    assert trainer.train_step(x, label, 0.1, fetches=["prediction"]).shape == (5, 3)
    assert len(trainer.train_step(x, label, 0.1)) == 2  # fetches are of one step
    assert trainer.global_step_ == 3
    with pytest.raises(RuntimeError, match="invalid output names"):
        trainer.train_step(x, label, 0.1, fetches=["logits"])
    with pytest.raises(AssertionError, match="'fetches' must be a list of names"):
        trainer.train_step(x, label, 0.1, fetches="loss")
    with pytest.raises(AssertionError, match="model_desc has 2 inputs, and 1 are given"):
        trainer.eval_step(x)


def test_a_program_that_scales_the_loss_itself_is_told_whether_gradients_were_finite() -> None:
    trainer = legacy("AdamOptimizer", use_mixed_precision=True, gradient_accumulation_steps=2)
    assert trainer.loss_scale_input_name == "loss_scale"
    x, label = batch(0)
    loss, prediction = trainer.train_step(x, label, 0.01, 128.0)
    assert (loss.dtype, prediction.dtype) == (torch.float32, torch.float16)
    outputs = trainer.train_step(x, label, 0.01, loss_scale=torch.tensor([128.0]))
    assert (outputs[2].dtype, outputs[2].tolist()) == (torch.bool, [True])
    kept = weights(trainer)
    trainer.train_step(x, label, 0.01, default_loss_scale_input_name=1e38)
    _, _, all_finite = trainer.train_step(x, label, 0.01, 1e38)
    assert not all_finite
    assert all(torch.equal(one, kept[name]) for name, one in weights(trainer).items())
    assert trainer.global_step_ == 1
    assert len(trainer.train_step(x, label, 0.01, 128.0, fetches=["loss", "prediction"])) == 2
    assert len(trainer.train_step(x, label, 0.01, 128.0, fetches=["loss", "prediction"])) == 2
    with pytest.raises(AssertionError, match=r"'Learning_Rate', 'loss_scale'.*and 3 are given"):
        trainer.train_step(x, label, 0.01)


# -- states and files --------------------------------------------------------------------------------------------------


def test_states_are_flat_and_go_on_in_another_trainer(tmp_path: Path) -> None:
    first = legacy("LambOptimizer")
    with pytest.warns(UserWarning, match="at least once"):
        assert first.state_dict() == {}
    for step in range(3):
        first.train_step(*batch(step), 0.1)
    state = first.state_dict()
    names = set(net().state_dict())
    assert state.keys() == {"Step", *names, *(f"Moment_{k}_{name}" for k in (1, 2) for name in names)}
    assert first.state_dict(include_optimizer_state=False).keys() == names
    assert all(np.array_equal(first.session.get_state()[name], state[name].numpy()) for name in names)
    save_checkpoint(first, tmp_path, "run", {"epoch": 3})
    assert (tmp_path / "run.ort.pt").exists()
    save_checkpoint(first, tmp_path, "bare", include_optimizer_state=False)
    second = legacy("LambOptimizer")
    assert load_checkpoint(second, tmp_path, "run", strict=True) == {"epoch": 3}
    x, label = batch(3)
    assert torch.equal(second.train_step(x, label, 0.1)[0], first.train_step(x, label, 0.1)[0])
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    assert load_checkpoint(second, tmp_path, "bare") == {}
    assert all(torch.equal(one, state[name]) for name, one in weights(second).items())
    with pytest.warns(UserWarning, match="Missing key: optimizer"):
        load_checkpoint(second, tmp_path, "bare", strict=True)
    with pytest.warns(UserWarning, match="already exists, overwriting"):
        save_checkpoint(first, tmp_path, "run")
    with pytest.raises(AssertionError, match="directory doesn't exist"):
        save_checkpoint(first, tmp_path / "none")


def test_strict_loading_of_an_sgd_trainer_requires_exactly_its_weights() -> None:
    trainer = legacy()
    trainer.train_step(*batch(0), 0.1)
    trainer.load_state_dict(trainer.state_dict(), strict=True)
    trainer.load_state_dict({"fc3.weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing keys"):
        trainer.load_state_dict({"fc1.bias": torch.zeros(8)}, strict=True)


def test_the_model_is_written_with_its_trained_weights(tmp_path: Path) -> None:
    optimized = tmp_path / "optimized.onnx"
    trainer = legacy(frozen_weights=["fc1.bias"], optimized_model_filepath=str(optimized))
    x, label = batch(0)
    trainer.train_step(x, label, 0.1)
    assert torch.equal(trainer.state_dict()["fc1.bias"], net().fc1.bias)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    found = session.run(["loss", "prediction"], {"x": x.numpy(), "label": label.numpy()})
    for own, expected in zip(found, trainer.eval_step(x, label), strict=True):
        assert_close(torch.from_numpy(np.asarray(own)), expected, "output")
    assert {one.name for one in trainer.onnx_model_.graph.initializer} >= set(net().state_dict())
    assert onnx.load(optimized).graph.node


# -- scalers -----------------------------------------------------------------------------------------------------------


def test_the_loss_scaler_goes_up_and_down_between_its_bounds() -> None:
    scaler = LossScaler("loss_scale", True)
    for power in range(17, 26):
        for _ in range(1999):
            scaler.update_loss_scale(True)
        assert scaler.loss_scale_ == 2.0 ** (power - 1 if power < 25 else 24)
        scaler.update_loss_scale(torch.tensor([True]))
        assert scaler.loss_scale_ == 2.0 ** min(power, 24)
    for power in range(23, -3, -1):
        scaler.update_loss_scale(False)
        assert scaler.loss_scale_ == 2.0 ** max(power, 0)
    scaler.reset()
    assert (scaler.loss_scale_, scaler.stable_steps_) == (2.0**16, 0)
    fixed = LossScaler("loss_scale", False, loss_scale=8.0)
    fixed.update_loss_scale(False)
    assert fixed.loss_scale_ == 8.0


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_options_reach_todays_trainer() -> None:
    trainer = legacy(
        world_rank=1,
        world_size=2,
        allreduce_post_accumulation=True,
        deepspeed_zero_stage=1,
        enable_adasum=True,
        enable_grad_norm_clip=False,
        use_memory_efficient_gradient=True,
        run_symbolic_shape_infer=True,
        _use_deterministic_compute=True,
        _opset_version=13,
        _enable_internal_postprocess=False,
    )
    options = trainer._trainer.options
    distributed = options.distributed
    assert (distributed.world_rank, distributed.world_size, distributed.enable_adasum) == (1, 2, True)
    assert (distributed.allreduce_post_accumulation, distributed.deepspeed_zero_optimization.stage) == (True, 1)
    assert (options.utils.grad_norm_clip, options.utils.memory_efficient_gradient) == (False, True)
    assert (options.utils.run_symbolic_shape_infer, options.debug.deterministic_compute) == (True, True)
    assert options._internal_use.onnx_opset_version == 13
    assert options._internal_use.enable_internal_postprocess is False


def test_an_attribute_that_is_left_out_is_the_operators_own() -> None:
    config = legacy("LambOptimizer", lambda name: {"lambda": 0.1} if name == "fc1.weight" else {})._trainer.optim_config
    assert [group["params"] for group in config.params] == [["fc1.weight"]]
    assert (config.defaults["do_bias_correction"], config.params[0]["do_bias_correction"]) == (True, True)
    assert (config.params[0]["lambda"], config.defaults["lambda"]) == (0.1, 0.0)
    mode = {"weight_decay_mode": 1, "do_bias_correction": 0}
    (group,) = legacy("AdamOptimizer", lambda _: mode, frozen_weights=["fc2.bias"])._trainer.optim_config.params
    assert group["params"] == ["fc1.weight", "fc1.bias", "fc2.weight"]
    assert group["weight_decay_mode"] is optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    assert group["do_bias_correction"] is False
    (group,) = legacy("LambOptimizer", lambda _: {"ratio_min": 0, "ratio_max": math.inf})._trainer.optim_config.params
    assert (group["ratio_min"], group["ratio_max"]) == (0.0, math.inf)
    assert legacy("SGDOptimizer", lambda _: {"alpha": 0.5})._trainer.optim_config.params == []


def test_wrong_arguments_are_named() -> None:
    desc = description()

    def make(**kwargs: Any) -> ORTTrainer:
        given = {
            "model": net(),
            "loss_fn": cross_entropy,
            "model_desc": desc,
            "training_optimizer_name": "SGDOptimizer",
            "map_optimizer_attributes": None,
            "learning_rate_description": RATE,
            "device": "cpu",
        }
        return ORTTrainer(**{**given, **kwargs})

    with pytest.raises(RuntimeError, match="loss function should take two arguments - predict and label"):
        make(loss_fn=lambda prediction: prediction.sum())
    with pytest.raises(AssertionError, match="'model' is required"):
        make(model=None)
    with pytest.raises(AssertionError, match="must be a ModelDescription"):
        make(model_desc=desc.as_model_desc())
    with pytest.raises(AssertionError, match="must be an IODescription"):
        make(learning_rate_description=0.1)
    with pytest.raises(AssertionError, match="must be one of 'SGDOptimizer', 'AdamOptimizer', 'LambOptimizer'"):
        make(training_optimizer_name="Adam")
    with pytest.raises(ValueError, match="Optimizer attributes must be either float or int"):
        make(map_optimizer_attributes=lambda _: {"alpha": "0.9"})
    with pytest.raises(AssertionError, match="gamma hyper parameter not present"):
        make(training_optimizer_name="AdamOptimizer", map_optimizer_attributes=lambda _: {"gamma": 0.9})
    with pytest.raises(ValueError, match=r"Invalid options: .*gradient_accumulation_steps.*min value is 1"):
        make(gradient_accumulation_steps=0)
    with pytest.raises(AssertionError, match="global_step"):
        make(global_step=-1)
    trainer = make()
    x, label = batch(0)
    with pytest.raises(AssertionError, match="inputs \\['x', 'label', 'Learning_Rate'\\], and 2 are given"):
        trainer.train_step(x, label)
    with pytest.raises(AssertionError, match="no inputs \\['rate'\\]"):
        trainer.train_step(x, label, rate=0.1)
    with pytest.raises(AssertionError, match="the learning rate must be a number, or a tensor of one"):
        trainer.train_step(x, label, torch.zeros(2))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"device\.id = 'cuda', and torch .* finds no such device"):
            make(device=torch.device("cuda")).train_step(x, label, 0.1)
    frozen = make(frozen_weights=["fc3.bias"])
    with pytest.raises(RuntimeError, match=r"fc3.bias"):
        frozen.train_step(x, label, 0.1)


def test_the_signatures_are_those_of_the_document() -> None:
    documented = """(model, loss_fn, model_desc, training_optimizer_name, map_optimizer_attributes,
        learning_rate_description, device, gradient_accumulation_steps=1, world_rank=0, world_size=1,
        use_mixed_precision=False, allreduce_post_accumulation=False, global_step=0, get_lr_this_step=None,
        loss_scaler=None, deepspeed_zero_stage=0, enable_grad_norm_clip=True, frozen_weights=[], _opset_version=14,
        _enable_internal_postprocess=True, _extra_postprocess=None, _use_deterministic_compute=False,
        use_memory_efficient_gradient=False, run_symbolic_shape_infer=False, enable_adasum=False,
        optimized_model_filepath='')"""
    for kind, expected in {
        ORTTrainer: documented,
        IODescription: "(name, shape, dtype=None, num_classes=None)",
        ModelDescription: "(inputs, outputs)",
    }.items():
        parameters = [one.replace(annotation=one.empty) for one in inspect.signature(kind).parameters.values()]
        assert str(inspect.Signature(parameters)) == " ".join(expected.split())


def test_an_onnx_model_has_its_loss_so_that_a_loss_fn_is_left_out() -> None:
    graph = onnx.helper.make_graph([], "empty", [], [])
    with pytest.warns(UserWarning, match="loss_fn is not used"):
        trainer = ORTTrainer(
            onnx.helper.make_model(graph), cross_entropy, description(), "AdamOptimizer", lambda _: {}, RATE, "cpu"
        )
    assert trainer._trainer.loss_fn is None


def test_the_descriptions_are_public_and_todays_trainer_is_the_one_that_is_exported() -> None:
    assert ort_dynamo.IODescription is training.IODescription is IODescription
    assert ort_dynamo.ModelDescription is training.ModelDescription is ModelDescription
    assert ort_dynamo.ORTTrainer is training.ORTTrainer is not ORTTrainer


def test_a_loss_that_a_loss_fn_computes_is_the_first_output() -> None:
    desc = description().as_model_desc()
    desc["outputs"].reverse()
    with pytest.raises(AssertionError, match="must be the first of the outputs"):
        NewTrainer(net(), desc, optim.SGDConfig(), cross_entropy)
