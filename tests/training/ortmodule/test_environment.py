"""Section 1.4 of ORTModule's reference: every environment variable acts, or is answered."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Dense, compiles
from torch import nn

from ort_dynamo import ORTModule, PropagateCastOpsStrategy
from ort_dynamo.errors import InvalidVariableError
from ort_dynamo.report.record import RECORDS
from ort_dynamo.training import ortmodule
from ort_dynamo.training.ortmodule import environment
from ort_dynamo.training.ortmodule.environment import WITHOUT_EFFECT, Settings, _SkipCheck, read_settings

VARIABLES = [
    "ONNX_OPSET_VERSION",
    "CONV_ALGO_SEARCH",
    "ENABLE_COMPUTE_OPTIMIZER",
    "ENABLE_LABEL_SPARSE_OPTIMIZER",
    "ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
    "PRINT_INPUT_DENSITY",
    "PRINT_MEMORY_STATS",
    "MEMORY_OPT_LEVEL",
    "MEMORY_OPT_CONFIG",
    "ALLOW_AUTOGRAD_CHECKPOINT",
    "ENABLE_CUSTOM_AUTOGRAD",
    "ENABLE_MEM_EFFICIENT_GRAD_MGMT",
    "ENABLE_ZERO_STAGE3",
    "DEEPCOPY_BEFORE_MODEL_EXPORT",
    "FALLBACK_POLICY",
    "FALLBACK_RETRY",
    "SKIPCHECK_POLICY",
    "USE_TRITON",
    "TRITON_CONFIG_FILE",
    "TRITON_DEBUG",
    "USE_FLASH_ATTENTION",
    "USE_EFFICIENT_ATTENTION",
    "ATEN_SDPA_FALLBACK",
    "ENABLE_TUNING",
    "MAX_TUNING_DURATION_MS",
    "TUNING_RESULTS_PATH",
    "CACHE_DIR",
    "LOG_LEVEL",
    "SAVE_ONNX_PATH",
    "JSON_CONFIG_PATH",
    "EXTERNAL_TORCH_CPP_EXTENSION_DIR",
    "EXTERNAL_TORCH_CUDA_EXTENSION_DIR",
]
"""The 32 names of the reference."""

GOOD = {
    "CONV_ALGO_SEARCH": "HEURISTIC",
    "FALLBACK_POLICY": "FALLBACK_DISABLE",
    "LOG_LEVEL": "INFO",
    "SKIPCHECK_POLICY": "SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT",
}
LOGGER = logging.getLogger("orttraining")


def settings(**changed: Any) -> Settings:
    return read_settings(Settings(**changed), LOGGER)


def test_every_variable_is_read_or_answered() -> None:
    assert len(VARIABLES) == 32
    known = environment._READ | set(WITHOUT_EFFECT)
    assert known == {f"ORTMODULE_{name}" for name in VARIABLES}
    assert not environment._READ & set(WITHOUT_EFFECT)


def test_they_are_read_in_one_place() -> None:
    root = Path(ortmodule.__file__).parent.parent
    for file in root.rglob("*.py"):
        reads = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)]
        found = any(n.attr in ("environ", "getenv") for n in reads)
        assert found == (file.name == "environment.py"), file


def test_a_bad_plan_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "nothing.json")
    with pytest.raises(ValueError, match="recompute_plan"):
        ORTModule(Dense())


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_can_be_set(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(f"ORTMODULE_{name}", GOOD.get(name, "1"))
    for _ in range(2):
        settings()
    said = [
        record.getMessage() for record in caplog.records if f"ORTMODULE_{name} has no effect" in record.getMessage()
    ]
    assert len(said) == (1 if f"ORTMODULE_{name}" in WITHOUT_EFFECT else 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "many") for name in ("ONNX_OPSET_VERSION", "MEMORY_OPT_LEVEL", "PRINT_MEMORY_STATS", "ENABLE_TUNING")),
        *((name, "yes") for name in ("ENABLE_COMPUTE_OPTIMIZER", "ENABLE_ZERO_STAGE3", "MAX_TUNING_DURATION_MS")),
        ("MEMORY_OPT_LEVEL", "7"),
        ("FALLBACK_POLICY", "FALLBACK_NOTHING"),
        ("SKIPCHECK_POLICY", "SKIP_EVERYTHING"),
        ("LOG_LEVEL", "LOUD"),
    ],
)
def test_a_bad_value_is_an_error(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ORTMODULE_{name}", value)
    with pytest.raises(ValueError, match=f"^The environment variable ORTMODULE_{name} cannot be '{value}': expected"):
        ORTModule(Dense())
    with pytest.raises(KeyError):  # which ORTModule raised for names
        ORTModule(Dense())


def test_a_misspelt_variable_is_answered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ORTMODULE_FALBACK_POLICY", "FALLBACK_DISABLE")
    settings()
    assert "did you mean 'ORTMODULE_FALLBACK_POLICY'?" in caplog.text


def test_a_bad_algorithm_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", "FASTEST")
    assert settings().conv_algo_search == "HEURISTIC"
    assert "Invalid value of env CONV_ALGO_SEARCH. Must be HEURISTIC or EXHAUSTIVE." in caplog.text


def test_values_become_settings_and_go_before_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("CONV_ALGO_SEARCH", "EXHAUSTIVE"),
        ("ENABLE_TUNING", "1"),
        ("FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_DATA"),
        ("FALLBACK_RETRY", "True"),
        ("MAX_TUNING_DURATION_MS", "50"),
        ("MEMORY_OPT_LEVEL", "1"),
        ("ONNX_OPSET_VERSION", "18"),
        ("SKIPCHECK_POLICY", "SKIP_CHECK_DISABLED"),
    ):
        monkeypatch.setenv(f"ORTMODULE_{name}", value)
    found = settings(fallback_retry=False, onnx_opset_version=19)
    assert (found.fallback_policy, found.fallback_retry, found.onnx_opset_version) == (24, True, 18)
    assert found.skip_check is _SkipCheck.SKIP_CHECK_DISABLED
    assert found.options()["transformer_layer_recompute"] is True
    assert found.provider_options() == {
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "cudnn_conv_use_max_workspace": "1",
        "cudnn_conv1d_pad_to_nc1d": "1",
        "tunable_op_enable": "1",
        "tunable_op_tuning_enable": "1",
        "tunable_op_max_tuning_duration_ms": "50",
    }


def test_the_defaults_are_ortmodules() -> None:
    found = settings()
    assert found.propagate_cast_ops_strategy is PropagateCastOpsStrategy.FLOOD_FILL
    assert found.propagate_cast_ops_level == 1
    assert found.propagate_cast_ops_allow == ()
    assert found.fallback_policy.value == 120
    assert not found.fallback_retry
    assert found.skip_check.value == 14
    assert found.memory_optimization_level == 0


class Layers(nn.Module):
    """Two blocks with layer norms and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def saved_bytes() -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ORTModule(Layers())(torch.randn(2, 6, 16)).sum().backward()
    partition = next(iter(RECORDS)).partition
    assert partition is not None
    return partition.memory.nbytes


def test_compiled_graphs_are_stored_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    ORTModule(nn.Linear(3, 2))(torch.randn(2, 3)).sum().backward()
    assert len(list(tmp_path.iterdir())) == 2


def test_memory_optimization_keeps_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = saved_bytes()
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    assert saved_bytes() < plain
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "0")
    config = tmp_path / "plans.json"
    config.write_text(json.dumps(["Gemm+Relu+:1:-1"]))
    for given in (str(config), "Gemm+Relu+:1:-1"):
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", given)
        assert saved_bytes() < plain


def test_memory_and_time_are_printed_by_phase(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    ort_model = ORTModule(Dense())
    for _ in range(18):
        ort_model(torch.randn(3, 8)).sum().backward()
    lines = [record.getMessage() for record in caplog.records if "memory (MiB)" in record.getMessage()]
    phases = [line.split(" | ")[1] for line in lines[:4]]
    assert phases == [f"phase: {one}" for one in ("pre_forward", "post_forward", "pre_backward", "post_backward")]
    steps = list(dict.fromkeys(int(line.split()[2]) for line in lines))
    assert steps == [*range(10), 16]
    for fact in ("time (ms): ", "resident: ", "param: ", "grad: ", "buffer: "):
        assert fact in lines[0]
    ort_model.eval()(torch.randn(3, 8))


def test_the_opset_is_that_of_saved_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import onnx

    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "18")
    ORTModule(Dense(), ortmodule.DebugOptions(save_onnx=True, onnx_prefix="a", save_path=str(tmp_path)))(
        torch.randn(3, 8)
    )
    model = onnx.load(tmp_path / "a_torch_exported_training.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "2")
    ORTModule(Dense(), ortmodule.DebugOptions(save_onnx=True, onnx_prefix="b", save_path=str(tmp_path)))(
        torch.randn(3, 8)
    )
    assert "as onnx cannot convert it to ORTMODULE_ONNX_OPSET_VERSION=2" in caplog.text
    assert compiles() > 0


def test_the_error_names_the_expected_type() -> None:
    error = InvalidVariableError(name="X", value="y", expected="an integer")
    assert str(error) == "The environment variable X cannot be 'y': expected an integer."
