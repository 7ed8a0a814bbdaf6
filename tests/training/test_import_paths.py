"""Module paths of older programs, which documents promise."""

from __future__ import annotations

from importlib import import_module

import pytest

PATHS = {
    "amp.loss_scaler": "DynamicLossScaler",
    "checkpoint": "aggregate_checkpoints",
    "experimental": "export_gradient_graph",
    "model_desc_validation": "_ORTTrainerModelDesc",
    "onnx_module": "OnnxModule",
    "optim.config": "AdamConfig",
    "optim.lr_scheduler": "LinearWarmupLRScheduler",
    "ort_trainer": "ORTTrainer",
    "ortmodule._custom_gradient_registry": "register_gradient",
    "ortmodule._fallback": "ORTModuleFallbackException",
    "ortmodule.experimental.hierarchical_ortmodule": "HierarchicalORTModule",
    "ortmodule.experimental.json_config": "load_from_json",
    "orttrainer": "ORTTrainer",
    "orttrainer_options": "ORTTrainerOptions",
    "utils.data": "LoadBalancingDistributedSampler",
    "utils.hooks": "StatisticsSubscriber",
    "utils.hooks.merge_activation_summary": "main",
}


@pytest.mark.parametrize(("path", "name"), PATHS.items())
def test_a_documented_path_can_be_imported(path: str, name: str) -> None:
    assert hasattr(import_module(f"ort_dynamo.training.{path}"), name)
