"""Sections 2.1 and 2.2 of ORTTrainer's reference: ORTTrainerOptions."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
from options_table import DOCUMENTED, OPTIONS, PIPELINE, SCALER, defaults, nested, put, read, refused

from ort_dynamo import ORTTrainerOptions, TrainStepInfo, amp, optim
from ort_dynamo.training import ORTTrainerOptions as SameOptions

LEVELS: dict[str, Any] = {
    "batch": {},
    "device": {},
    "distributed": {},
    "mixed_precision": {},
    "utils": {},
    "_internal_use": {},
}


@pytest.mark.parametrize("given_options", [{}, LEVELS, {"distributed": {"pipeline_parallel": {}}, "debug": None}])
def test_defaults_are_those_of_the_documents(given_options: dict[str, Any]) -> None:
    assert ORTTrainerOptions(given_options)._validated_opts == defaults()
    assert ORTTrainerOptions()._validated_opts == defaults()
    assert SameOptions is ORTTrainerOptions


def test_a_refusal_has_its_old_text() -> None:
    with pytest.raises(ValueError) as caught:
        ORTTrainerOptions({"mixed_precision": {"enabled": 1}})
    assert str(caught.value) == "Invalid options: {'mixed_precision': [{'enabled': ['must be of boolean type']}]}"


@pytest.mark.parametrize("path", OPTIONS)
def test_an_option_has_its_default_its_values_and_its_errors(path: str) -> None:
    default, good, bad = OPTIONS[path]
    assert read(ORTTrainerOptions(), path) == default
    for value in good:
        options = ORTTrainerOptions(nested(path, value))
        assert read(options, path) == value
        expected = defaults()
        put(expected, path, value)
        expected["distributed"]["data_parallel_size"] = expected["distributed"]["world_size"]
        assert options._validated_opts == expected
    for value, error in bad:
        errors: dict[str, Any] = {}
        put(errors, path, [error] if isinstance(error, str) else error, around=lambda level: [level])
        assert refused(nested(path, value)) == errors


@pytest.mark.parametrize("path", DOCUMENTED)
def test_an_option_is_taken_as_the_documents_spell_it(path: str) -> None:
    _, good, bad = OPTIONS[path]
    for value in good:
        options = ORTTrainerOptions(nested(DOCUMENTED[path], value))
        assert options._validated_opts == ORTTrainerOptions(nested(path, value))._validated_opts
        assert read(options, path) == read(options, DOCUMENTED[path]) == value
    assert refused(nested(DOCUMENTED[path], bad[0][0])) == refused(nested(path, bad[0][0]))
    both = nested(path, good[0])
    put(both, DOCUMENTED[path], good[0])
    errors: dict[str, Any] = {}
    put(errors, DOCUMENTED[path], [f"is another name of {path!r}, which is given, too"], around=lambda level: [level])
    assert refused(both) == errors
    options = ORTTrainerOptions()
    config = options.graph_transformer.propagate_cast_ops_config
    setattr(config, DOCUMENTED[path].split(".")[-1], good[-1])
    assert read(options, path) == good[-1]


def test_an_unknown_key_is_refused_at_every_level() -> None:
    unknown = ["unknown field"]
    assert refused({"bach": {}, 1: 2}) == {"bach": unknown, 1: unknown}
    levels = {path.rpartition(".")[0] for path in OPTIONS if "." in path}
    assert len(levels) == 11
    assert refused({"utils": {None: 1, "x": 2}}) == {"utils": [{None: unknown}]}
    assert refused({f"{PIPELINE}": {}, (): 1}) == {(): unknown}
    for level in levels:
        errors: dict[str, Any] = {}
        put(errors, f"{level}.x", unknown, around=lambda level: [level])
        assert refused(nested(f"{level}.x", 1)) == errors
    assert refused({"utils": {"invertible_layer_norm_gradient": True}})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devise": {}}, "{'devise': ['unknown field']}\n'devise' is not known (did you mean 'device'?)"),
        (
            {"utils": {"frozen_weight": []}, "xyz": 1},
            "{'utils': [{'frozen_weight': ['unknown field']}], 'xyz': ['unknown field']}"
            "\n'frozen_weight' is not known (did you mean 'frozen_weights'?)",
        ),
    ],
)
def test_the_nearest_name_follows_the_old_text(options: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        ORTTrainerOptions(options)
    assert str(caught.value) == f"Invalid options: {text}"


@pytest.mark.parametrize("options", [None, 5, "a", ["batch"], [("batch", {})]])
def test_options_are_a_dict(options: Any) -> None:
    with pytest.raises(ValueError) as caught:
        ORTTrainerOptions(options)
    assert str(caught.value) == f"Invalid options: expected a dict, got {options!r}"


def test_mixed_precision_has_a_loss_scaler_and_nothing_else_has() -> None:
    own = ORTTrainerOptions({"mixed_precision": {"enabled": True, "loss_scaler": SCALER}})
    assert own.mixed_precision.loss_scaler is SCALER
    filled = ORTTrainerOptions({"mixed_precision": {"enabled": True}})
    assert isinstance(filled.mixed_precision.loss_scaler, amp.DynamicLossScaler)
    assert filled.mixed_precision.loss_scaler.loss_scale == 2.0**16
    with pytest.raises(ValueError) as caught:
        ORTTrainerOptions({"mixed_precision": {"loss_scaler": SCALER}})
    assert str(caught.value) == "Loss Scaler cannot be specified when Mixed Precision is not enabled"
    assert refused({"mixed_precision": {"enabled": True, "loss_scaler": 1.0}}) == {
        "mixed_precision": [{"loss_scaler": ["must be of loss_scaler type"]}]
    }


def test_a_loss_scaler_and_mixed_precision_may_be_assigned_in_any_order() -> None:
    options = ORTTrainerOptions()
    options.mixed_precision.loss_scaler = SCALER
    with pytest.raises(ValueError, match="Loss Scaler cannot be specified"):
        options._settle()
    options.mixed_precision.enabled = True
    options._settle()
    assert options.mixed_precision.loss_scaler is SCALER
    filled = ORTTrainerOptions({"mixed_precision": {"enabled": True}})
    filled.mixed_precision.enabled = False
    filled._settle()
    assert filled._validated_opts == defaults()


def test_the_size_of_data_parallelism_is_computed() -> None:
    options = ORTTrainerOptions(
        {"distributed": {"world_size": 9, "horizontal_parallel_size": 2, "data_parallel_size": 3}}
    )
    assert options.distributed.data_parallel_size == 4
    options.distributed.world_size = 2
    options._settle()
    assert options.distributed.data_parallel_size == 1
    assert refused({"distributed": {"horizontal_parallel_size": 2}}) == {
        "distributed": [{"horizontal_parallel_size": ["must not exceed world_size"]}]
    }
    stages = {"pipeline_parallel_size": 2}
    of_stages = ORTTrainerOptions({"distributed": {"world_size": 8, "pipeline_parallel": stages}})
    assert of_stages.distributed.data_parallel_size == 4
    sizes = {"world_size": 2, "horizontal_parallel_size": 2, "pipeline_parallel": stages}
    assert refused({"distributed": sizes}) == {
        "distributed": [
            {
                "pipeline_parallel": [
                    {"pipeline_parallel_size": ["must not exceed world_size // horizontal_parallel_size"]}
                ]
            }
        ]
    }
    assert refused({"distributed": {"data_parallel_size": 0}}) == {
        "distributed": [{"data_parallel_size": ["min value is 1"]}]
    }


@pytest.mark.parametrize("path", OPTIONS)
def test_assigned_values_are_checked(path: str) -> None:
    _, good, bad = OPTIONS[path]
    options = ORTTrainerOptions()
    level = options
    for name in path.split(".")[:-1]:
        level = getattr(level, name)
    last = path.split(".")[-1]
    for value in good:
        setattr(level, last, value)
        assert read(options, path) == value
    for value, _ in bad:
        with pytest.raises(ValueError) as caught:
            setattr(level, last, value)
        assert str(caught.value).startswith(f"Invalid options: {refused(nested(path, value))}")
        assert read(options, path) == good[-1]


def test_an_attribute_that_is_no_option_is_refused_with_the_nearest() -> None:
    options = ORTTrainerOptions()
    options.utils.run_symbolic_shape_infer = True
    message = (
        r"ORTTrainerOptions has no option 'utils.run_symbolic_infer' \(did you mean 'run_symbolic_shape_infer'\?\)$"
    )
    with pytest.raises(AttributeError, match=message):
        options.utils.run_symbolic_infer = True
    with pytest.raises(AttributeError, match=r"no option 'utls' \(did you mean 'utils'\?\)$"):
        options.utls = {}
    with pytest.raises(AttributeError, match=r"no option 'batch.steps'$"):
        _ = options.batch.steps
    assert not hasattr(options, "zero")
    with pytest.raises(AttributeError):
        del options.batch
    assert "batch" in dir(options)
    assert "mem_limit" in dir(options.device)


def test_a_level_may_be_assigned_as_a_dict() -> None:
    options = ORTTrainerOptions({"utils": {"frozen_weights": ["a"]}})
    utils = options.utils
    options.utils = {"grad_norm_clip": False}
    assert utils.frozen_weights == []
    assert options.utils.grad_norm_clip is utils.grad_norm_clip is False
    documented = {"propagate_cast_ops_level": 0, "allow_layer_norm_mod_precision": True}
    options.graph_transformer.propagate_cast_ops_config = documented
    assert options.graph_transformer.allow_layer_norm_mod_precision is True
    assert options.graph_transformer.propagate_cast_ops_config.level == 0
    assert len(documented) == 2


def test_options_of_providers_are_free() -> None:
    options = ORTTrainerOptions({"provider_options": {"CUDAExecutionProvider": {"device_id": "0"}}})
    assert options.provider_options.CUDAExecutionProvider.device_id == "0"
    options.provider_options.CUDAExecutionProvider.gpu_mem_limit = 5
    options.provider_options.Other = {"a": {"b": 1}}
    assert options.provider_options._validated_opts == {
        "CUDAExecutionProvider": {"device_id": "0", "gpu_mem_limit": 5},
        "Other": {"a": {"b": 1}},
    }
    options.distributed.pipeline_parallel.sliced_axes.x = 1
    with pytest.raises(ValueError, match="must be of integer type"):
        options.distributed.pipeline_parallel.sliced_axes.y = "1"
    assert options.distributed.pipeline_parallel.sliced_axes._validated_opts == {"x": 1}


def test_options_share_no_container_with_one_another_or_the_program() -> None:
    mine: dict[str, Any] = {"utils": {"frozen_weights": ["a"]}, "provider_options": {"EP": {"x": [1]}}}
    before = copy.deepcopy(mine)
    first, second = ORTTrainerOptions(mine), ORTTrainerOptions(mine)
    first.utils.frozen_weights.append("b")
    first.provider_options.EP.x.append(2)
    first.graph_transformer.propagate_cast_ops_config.allow.append("Add")
    assert mine == before
    assert second.utils.frozen_weights == ["a"]
    assert ORTTrainerOptions()._validated_opts == defaults()
    kept = first.utils.frozen_weights
    first.batch.gradient_accumulation_steps = 3
    assert first.utils.frozen_weights is kept


def test_options_are_copied_and_pickled() -> None:
    options = ORTTrainerOptions({"mixed_precision": {"enabled": True}, "batch": {"gradient_accumulation_steps": 4}})
    for other in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert other.batch.gradient_accumulation_steps == 4
        other.mixed_precision.enabled = False
        other._settle()
        assert other.mixed_precision.loss_scaler is None
    assert options.mixed_precision.enabled is True
    assert copy.copy(options.batch).gradient_accumulation_steps == 4
    assert eval(repr(ORTTrainerOptions().device)) == {"id": "cuda", "mem_limit": 0}
    assert repr(ORTTrainerOptions().device) in repr(ORTTrainerOptions())


def test_without_validation_options_are_taken_as_they_are() -> None:
    options = ORTTrainerOptions({"a": {"b": 1}}, _validate=False)
    assert options.a.b == 1
    assert options._validated_opts == {"a": {"b": 1}}


def test_the_documents_example_runs() -> None:
    opts = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 128},
            "device": {"id": "cuda:0", "mem_limit": 2 * 1024 * 1024 * 1024},
            "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=100),
            "mixed_precision": {"enabled": True, "loss_scaler": amp.LossScaler(loss_scale=float(1 << 16))},
        }
    )
    assert opts.mixed_precision.enabled is True
    assert opts.lr_scheduler.get_lr(TrainStepInfo(optim.AdamConfig())) == [0.0]


def test_options_need_no_onnxruntime_until_they_hold_its_objects() -> None:
    program = (
        "import sys; from ort_dynamo import ORTTrainerOptions as O; O({}); assert 'onnxruntime' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
