"""The first ORTTrainer, that of onnxruntime.capi.ort_trainer: its arguments, its loss scaler and its names."""

from __future__ import annotations

import inspect
import math
from typing import Any

import onnx
import pytest
import torch
from legacy_trainers import RATE, batch, cross_entropy, description, legacy, net

import ort_dynamo
from ort_dynamo import ORTTrainer as NewTrainer
from ort_dynamo import optim, training
from ort_dynamo.training.ort_trainer import IODescription, LossScaler, ModelDescription, ORTTrainer

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
