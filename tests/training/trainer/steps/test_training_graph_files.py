"""The files of a trainer: the whole step as a model that any session runs, and the forward with its loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_trainers import DESC, Mlp, batches, losses, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, amp, optim

AFTER = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
CONFIGS: dict[str, Any] = {
    "sgd": lambda: optim.SGDConfig(lr=0.3),
    "adam": lambda: optim.AdamConfig(
        [{"params": ["fc1.weight"], "alpha": 0.7}], lr=0.01, lambda_coef=0.1, max_norm_clip=0.05, epsilon=1e-2
    ),
    "adam that decays after": lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1, weight_decay_mode=AFTER),
    "lamb": lambda: optim.LambConfig(lr=0.01, lambda_coef=0.1, max_norm_clip=0.05, ratio_max=0.5),
}
STANDARD = {"_internal_use": {"enable_onnx_contrib_ops": False}}


def session_of(model: Any) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> dict[str, Any]:
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def inputs_of(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"input1": batch[0].numpy(), "label": batch[1].numpy()}


def step_file(trainer: ORTTrainer, path: Path, batch: tuple[Tensor, ...]) -> onnx.ModelProto:
    """The training graph that a trainer writes before its first step."""
    trainer.options.debug.graph_save_paths.model_with_training_graph_path = str(path)
    trainer.train_step(*batch)
    return onnx.load(path)


def assert_standard(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
    assert {one.domain for one in model.opset_import} == {""}
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions


@pytest.mark.parametrize(
    "config", ["sgd", "adam", "lamb", pytest.param("adam that decays after", marks=pytest.mark.slow)]
)
def test_a_session_of_the_training_graph_computes_a_trainers_step(config: str, tmp_path: Path) -> None:
    trainer = make_trainer(CONFIGS[config](), **STANDARD)
    data = batches(3)
    model = step_file(trainer, tmp_path / "step.onnx", data[0])
    assert_standard(model)
    session = session_of(model)
    feeds: dict[str, Any] = {}
    for index, batch in enumerate(data):  # the file's own values at the first step, then the results of the step before
        outputs = run(session, {**inputs_of(batch), **feeds})
        loss, prediction = trainer.train_step(*batch) if index else (None, None)
        if loss is not None:
            np.testing.assert_allclose(outputs["loss"], loss.numpy(), rtol=2e-5)
            np.testing.assert_allclose(outputs["predictions"], prediction.numpy(), rtol=2e-5, atol=1e-6)
        assert outputs["all_finite"]
        feeds = {name.removesuffix(".updated"): one for name, one in outputs.items() if name.endswith(".updated")}
        assert_state(trainer, feeds)
    known = {one.name for one in model.graph.input}
    assert feeds.keys() <= known
    assert {"input1", "label", "learning_rate"} <= known


def assert_state(trainer: ORTTrainer, found: dict[str, Any]) -> None:
    """Compare a session's results for the next step with the state of a trainer that ran the same steps."""
    state = trainer.state_dict()
    for name, value in state["model"]["full_precision"].items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    updates = state["train_step_info"]["optimization_step"]
    counts = [value for name, value in found.items() if name.startswith(("Update_Count", "step"))]
    assert counts
    assert all(int(one) == updates for one in counts)
    for name, own in state["optimizer"].items():
        for key in own.keys() & {"Moment_1", "Moment_2"}:
            np.testing.assert_allclose(found[f"{name}.{key}"], own[key], rtol=2e-5, atol=1e-6, err_msg=f"{name} {key}")


def test_a_learning_rate_may_be_fed(tmp_path: Path) -> None:
    trainer = make_trainer(optim.SGDConfig(lr=0.5), **STANDARD)
    batch = batches(1)[0]
    trainer.eval_step(*batch)
    before = weights(trainer)
    session = session_of(step_file(trainer, tmp_path / "step.onnx", batch))
    still = run(session, {**inputs_of(batch), "learning_rate": np.array(0.0)})
    moved = run(session, inputs_of(batch))
    for name, one in before.items():
        np.testing.assert_array_equal(still[f"{name}.updated"], one)
        np.testing.assert_allclose(moved[f"{name}.updated"], weights(trainer)[name], rtol=2e-5, atol=1e-6)


def test_the_batch_is_dynamic_in_the_files(tmp_path: Path) -> None:
    trainer = make_trainer(optim.SGDConfig(lr=0.1), **STANDARD)
    model = step_file(trainer, tmp_path / "step.onnx", batches(1)[0])
    shapes = {
        one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim] for one in model.graph.input
    }
    assert shapes["input1"] == ["batch", 4]
    assert shapes["label"] == ["batch"]
    assert shapes["fc1.weight"] == [8, 4]
    session = session_of(model)
    state = {f"{name}": one for name, one in weights(trainer).items()}
    for size in (1, 3, 11):
        batch = batches(1, size)[0]
        outputs = run(session, {**inputs_of(batch), **state})
        trainer.train_step(*batch)
        state = weights(trainer)
        assert outputs["predictions"].shape == (size, 3)
        for name, one in state.items():
            np.testing.assert_allclose(outputs[f"{name}.updated"], one, rtol=2e-5, atol=1e-6)


def test_gathered_gradients_go_in(tmp_path: Path) -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.01), batch={"gradient_accumulation_steps": 2}, **STANDARD)
    first, second = batches(2)
    session = session_of(step_file(trainer, tmp_path / "step.onnx", first))
    gathered = trainer.state_dict()["gathered_gradients"]
    feeds = {f"{name}.gathered_gradient": one for name, one in gathered.items()}
    assert feeds.keys() <= {one.name for one in session.get_inputs()} | {
        one.name for one in session.get_overridable_initializers()
    }
    outputs = run(session, {**inputs_of(second), **feeds})
    trainer.train_step(*second)
    for name, one in weights(trainer).items():
        np.testing.assert_allclose(outputs[f"{name}.updated"], one, rtol=2e-5, atol=1e-6)


def test_an_overflow_keeps_the_weights_in_the_file_too(tmp_path: Path) -> None:
    trainer = make_trainer(
        optim.AdamConfig(lr=0.01),
        mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=256.0)},
        **STANDARD,
    )
    batch = batches(1)[0]
    trainer.eval_step(*batch)
    before = weights(trainer)
    session = session_of(step_file(trainer, tmp_path / "step.onnx", batch))
    fine = run(session, {**inputs_of(batch), "loss_scale": np.array(256.0)})
    over = run(session, {**inputs_of(batch), "loss_scale": np.array(1e30)})
    assert fine["all_finite"]
    assert not over["all_finite"]
    for name, one in before.items():
        np.testing.assert_array_equal(over[f"{name}.updated"], one)
        assert not over[f"{name}.Moment_1.updated"].any()
        np.testing.assert_allclose(fine[f"{name}.updated"], weights(trainer)[name], rtol=4e-3, atol=1e-3)
        assert not np.array_equal(fine[f"{name}.updated"], one)


def test_the_optimized_file_and_that_of_the_gradients_run(tmp_path: Path) -> None:
    paths = {
        "model_with_gradient_graph_path": str(tmp_path / "gradients.onnx"),
        "model_with_training_graph_after_optimization_path": str(tmp_path / "optimized.onnx"),
        "model_after_graph_transforms_path": str(tmp_path / "forward.onnx"),
    }
    trainer = make_trainer(optim.SGDConfig(lr=0.5), debug={"graph_save_paths": paths})
    batch = batches(1)[0]
    trainer.eval_step(*batch)
    before = weights(trainer)
    loss, prediction = trainer.train_step(*batch)
    optimized, gradients, forward = (
        run(session_of(tmp_path / f"{name}.onnx"), inputs_of(batch)) for name in ("optimized", "gradients", "forward")
    )
    for outputs in (optimized, gradients, forward):
        np.testing.assert_allclose(outputs["loss"], loss.numpy(), rtol=2e-5)
        np.testing.assert_allclose(outputs["predictions"], prediction.numpy(), rtol=2e-5, atol=1e-6)
    for name, one in weights(trainer).items():
        np.testing.assert_allclose(optimized[f"{name}.updated"], one, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(before[name] - 0.5 * gradients[f"{name}.grad"], one, rtol=2e-5, atol=1e-6)


# -- save_as_onnx ------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """With a batch normalization, dropout and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.fc2.weight = self.fc1.weight
        self.bn = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 3)

    def forward(self, input1: Tensor) -> Tensor:
        return self.last(self.drop(self.bn(self.fc2(torch.tanh(self.fc1(input1))))))


def test_a_saved_model_evaluates_as_the_trainer_does(tmp_path: Path) -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.05), Normed())
    losses(trainer, batches(3))
    path = tmp_path / "model.onnx"
    for _ in range(2):  # the second replaces the first
        trainer.save_as_onnx(path)
        session = session_of(path)
        assert [one.name for one in session.get_inputs()] == ["input1", "label"]
        assert [one.name for one in session.get_outputs()] == ["loss", "predictions"]
        for size in (6, 1, 4):
            batch = batches(1, size, seed=8)[0]
            outputs = run(session, inputs_of(batch))
            for found, expected in zip(outputs.values(), trainer.eval_step(*batch), strict=True):
                np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=1e-6)
        losses(trainer, batches(1))
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    shapes = {
        one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim] for one in model.graph.input
    }
    assert shapes == {"input1": ["batch", 4], "label": ["batch"]}
    (prediction,) = [one for one in model.graph.output if one.name == "predictions"]
    assert [d.dim_param or d.dim_value for d in prediction.type.tensor_type.shape.dim] == ["batch", 3]
    names = {one.name for one in model.graph.initializer}
    assert {"fc1.weight", "fc1.bias", "bn.running_mean", "last.weight"} <= names


def test_a_saved_model_of_mixed_precision_gives_the_same(tmp_path: Path) -> None:
    trainer = make_trainer(mixed_precision={"enabled": True})
    batch = batches(1)[0]
    losses(trainer, [batch])
    trainer.save_as_onnx(str(tmp_path / "model.onnx"))
    outputs = run(session_of(tmp_path / "model.onnx"), inputs_of(batch))
    loss, prediction = trainer.eval_step(*batch)
    assert outputs["predictions"].dtype == np.float16
    np.testing.assert_allclose(outputs["predictions"], prediction.numpy(), rtol=4e-3, atol=1e-3)
    np.testing.assert_allclose(outputs["loss"], loss.numpy(), rtol=4e-3)


def test_saving_before_the_first_step_warns_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for kind in (UserWarning, RuntimeWarning):
        with pytest.warns(kind, match="must be executed at least once before calling 'save_as_onnx\\(\\)'"):
            make_trainer().save_as_onnx(path)
    assert not path.exists()


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.eval_step(*batches(1)[0])
    for path in ("", None, 3):
        with pytest.raises(ValueError, match="'path' must be a valid path string"):
            trainer.save_as_onnx(path)  # type: ignore[arg-type]
    for path in (tmp_path, tmp_path / "missing" / "model.onnx"):
        with pytest.raises(ValueError, match="'path' is not valid or does not exist: "):
            trainer.save_as_onnx(path)
    assert list(tmp_path.iterdir()) == []


def test_saving_leaves_modes_and_numbers_of_the_trainer(tmp_path: Path) -> None:
    found = []
    for saves in (True, False):
        torch.manual_seed(4)
        trainer = make_trainer(optim.SGDConfig(lr=0.1), copy.deepcopy(MODEL))
        torch.manual_seed(5)
        data = batches(3)
        losses(trainer, data[:1])
        if saves:
            trainer.save_as_onnx(tmp_path / "model.onnx")
        found.append((losses(trainer, data[1:]), weights(trainer)["bn.num_batches_tracked"]))
    assert found[0] == found[1]


MODEL = Normed()


def test_an_output_that_is_an_input_or_another_output_is_saved(tmp_path: Path) -> None:
    class Same(Mlp):
        def forward(self, input1: Tensor) -> Any:
            prediction = super().forward(input1)
            return prediction, input1, prediction

    outputs = [*DESC["outputs"], ("same", ["batch", 4]), ("again", ["batch", 3])]
    trainer = make_trainer(
        model=Same(),
        desc={"inputs": DESC["inputs"], "outputs": outputs},
        loss_fn=lambda found, y: nn.functional.cross_entropy(found[0], y),
    )
    batch = batches(1)[0]
    expected = trainer.train_step(*batch) and trainer.eval_step(*batch)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    found = run(session_of(tmp_path / "model.onnx"), inputs_of(batch))
    assert list(found) == ["loss", "predictions", "same", "again"]
    for own, value in zip(expected, found.values(), strict=True):
        np.testing.assert_allclose(value, own.numpy(), rtol=2e-5, atol=1e-6)
