"""Tests of section 1.5 of ORTModule's reference: logs and saved files."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import Dense, Normed
from torch import Tensor

from ort_dynamo import DebugOptions, LogLevel, ORTModule
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.training.ortmodule.saved_models import FILES

NAMES = ("torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model")


def test_the_levels_are_ortmodules() -> None:
    assert [(level.name, level.value) for level in LogLevel] == [
        ("VERBOSE", 0),
        ("DEVINFO", 1),
        ("INFO", 2),
        ("WARNING", 3),
        ("ERROR", 4),
        ("FATAL", 5),
    ]


def test_the_defaults() -> None:
    options = DebugOptions()
    assert options.logging.log_level is LogLevel.WARNING
    assert (options.save_onnx, options.onnx_prefix, options.config) == (False, "", None)
    assert not options.save_onnx_models.save
    assert options.save_onnx_models.path == str(Path.cwd())


def test_errors_have_ortmodules_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^onnx_prefix must be provided when save_onnx is set\.$"):
        DebugOptions(save_onnx=True)
    with pytest.raises(TypeError, match=r"^Expected name prefix of type str, got <class 'int'>\.$"):
        DebugOptions(save_onnx=True, onnx_prefix=23)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Expected log_level of type LogLevel, got <class 'str'>\.$"):
        DebugOptions(log_level="INFO")  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"^Directory /non/existent is not writable\."):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path="/non/existent")
    with pytest.raises(OSError, match="is not writable"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=__file__)
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", "/non/existent/directory")
    with pytest.raises(OSError, match=r"^Directory /non/existent/directory is not writable\."):
        DebugOptions(save_onnx=True, onnx_prefix="a")
    DebugOptions(onnx_prefix=5)  # type: ignore[arg-type]  # nothing is checked where nothing is saved


def test_the_error_of_a_folder_names_its_cause_and_the_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ORTMODULE_SAVE_ONNX_PATH", raising=False)
    with pytest.raises(OSError, match=r"It is not an existing folder\. Please set save_path, or the ORTMODULE_SAVE"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path="/non/existent")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", "/non/existent")
    with pytest.raises(OSError, match="ORTMODULE_SAVE_ONNX_PATH environment variable, which overrides save_path, to"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=str(tmp_path))


def test_variables_go_before_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    options = DebugOptions(log_level=LogLevel.ERROR, save_path="elsewhere")
    assert options.logging.log_level is LogLevel.INFO
    assert options.save_onnx_models.path == str(tmp_path)


@pytest.mark.parametrize(
    ("level", "expected"),
    [(LogLevel.VERBOSE, logging.DEBUG), (LogLevel.INFO, logging.INFO), (LogLevel.FATAL, logging.FATAL)],
)
def test_the_logger_has_the_level(level: LogLevel, expected: int) -> None:
    ORTModule(Dense(), DebugOptions(log_level=level))
    assert logging.getLogger("orttraining").level == expected


def test_dynamos_log_names_the_backend(capfd: pytest.CaptureFixture[str]) -> None:
    torch._logging.set_logs(dynamo=logging.INFO)
    try:
        ORTModule(Dense())(torch.ones(2, 8))
    finally:
        torch._logging.set_logs()
    assert "calling compiler function ort_train" in capfd.readouterr().err


def test_a_first_run_logs_the_features(caplog: pytest.LogCaptureFixture) -> None:
    ort_model = ORTModule(Dense(), DebugOptions(log_level=LogLevel.INFO))
    for _ in range(2):
        ort_model(torch.randn(3, 8))
    (text,) = [record.getMessage() for record in caplog.records if "accelerating your model" in record.getMessage()]
    for line in (
        "ORTModule is enabled with following features ON/OFF for [training] mode:",
        "Cast Propagation : ON  : Level 1 enabled",
        "Memory Optimizer : OFF : Enable with env ORTMODULE_MEMORY_OPT_LEVEL=1/2",
        "Auto Fallback    : ON",
        "Total ORT initialization overhead is ",
        "graph building takes ",
        "session creation takes ",
        f"Versions: {installed_runtime().package} - {installed_runtime().version}, ONNX - ",
    ):
        assert line in text
    ort_model.eval()(torch.randn(3, 8))
    assert "for [inference] mode" in caplog.text


def save(tmp_path: Path, model: torch.nn.Module, *args: Tensor, train: bool = True) -> dict[str, onnx.ModelProto]:
    mode = "training" if train else "inference"
    ort_model = ORTModule(model, DebugOptions(save_onnx=True, onnx_prefix="my", save_path=str(tmp_path)))
    ort_model.train(train)(*args)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"my_{name}_{mode}.onnx" for name in NAMES)
    return {name: onnx.load(tmp_path / f"my_{name}_{mode}.onnx") for name in NAMES}


def names(values: object) -> list[str]:
    return [value.name for value in values]  # type: ignore[attr-defined]


def test_the_files_have_ortmodules_names() -> None:
    assert tuple(FILES) == NAMES


@pytest.mark.parametrize("train", [True, False])
def test_the_files_are_valid_and_readable(train: bool, tmp_path: Path) -> None:
    models = save(tmp_path, Normed(), torch.randn(3, 8), train=train)
    for name, model in models.items():
        onnx.checker.check_model(model)
        inputs, outputs = names(model.graph.input), names(model.graph.output)
        assert {"x", "fc1.weight", "fc2.bias"} <= set(inputs)
        assert "output_0" in outputs
        for value in (*model.graph.input, *model.graph.output):
            assert value.type.tensor_type.HasField("shape"), value.name
        assert any(node.name.startswith("fc1/") for node in model.graph.node)
        both = train and name in ("optimized", "execution_model")
        assert ("output_0.grad" in inputs) == both
        assert ("fc1.weight.grad" in outputs) == both
    assert len(models["execution_model"].graph.node) <= len(models["optimized"].graph.node)


def test_the_joined_model_computes_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dense()
    x = torch.randn(3, 8)
    for name in ("optimized", "execution_model"):
        saved = save(tmp_path, model, x)[name]
        for path in tmp_path.iterdir():
            path.unlink()
        session = onnxruntime.InferenceSession(saved.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {key: value.detach().numpy() for key, value in model.state_dict().items()}
        feeds |= {"input1": x.numpy(), "output_0.grad": np.ones((3, 4), np.float32)}
        found = dict(zip(names(saved.graph.output), session.run(None, feeds), strict=True))
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        np.testing.assert_allclose(found["output_0"], out.detach().numpy(), rtol=1e-5, atol=1e-6)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            np.testing.assert_allclose(found[f"{key}.grad"], parameter.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_an_operator_in_torch_is_an_aten_node(tmp_path: Path) -> None:
    model = save(tmp_path, Normed(), torch.randn(3, 8))["torch_exported"]
    (drawn,) = [node for node in model.graph.node if node.domain == "org.pytorch.aten"]
    attributes = {attribute.name: attribute.s.decode() for attribute in drawn.attribute}
    assert drawn.op_type == "ATen"
    assert attributes["operator"] == "ort_dynamo.bernoulli"


def test_a_graph_after_a_break_has_its_number_and_other_sizes_replace(tmp_path: Path) -> None:
    class Broken(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            hidden = self.fc1(input1)
            torch._dynamo.graph_break()
            return self.fc2(hidden)

    ort_model = ORTModule(Broken(), DebugOptions(save_onnx=True, onnx_prefix="b", save_path=str(tmp_path)))
    ort_model(torch.randn(3, 8))
    first = {path.name for path in tmp_path.iterdir()}
    assert {"b_optimized_training.onnx", "b_optimized_1_training.onnx"} <= first
    before = (tmp_path / "b_optimized_training.onnx").read_bytes()
    ort_model(torch.randn(5, 8))
    assert {path.name for path in tmp_path.iterdir()} == first
    assert (tmp_path / "b_optimized_training.onnx").read_bytes() != before
