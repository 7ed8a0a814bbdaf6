"""Tests of the installed ONNX Runtime, and of the dtypes that its kernels take."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir
import pytest
import torch

from ort_dynamo.errors import ProviderNotAvailableError, RuntimeNotInstalledError, SeveralRuntimesError
from ort_dynamo.runtime.installed import capabilities, providers
from ort_dynamo.runtime.installed.capabilities import (
    installed_runtime,
    kernel_table,
    nearest_record,
    omitted_optimizers,
)
from ort_dynamo.runtime.installed.cuda_build import CudaBuild, TorchCuda


@pytest.fixture
def uncached() -> Iterator[None]:
    functions = (
        installed_runtime,
        kernel_table,
        capabilities.say_if_untested,
        providers.find_target,
        providers._cuda_misfit,
    )
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


@pytest.mark.usefixtures("uncached")
def test_two_distributions_are_refused_with_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"onnxruntime": "1.31.1", "onnxruntime-training": "1.19.2"}
    monkeypatch.setattr(capabilities, "find_distributions", lambda: found)
    with pytest.raises(SeveralRuntimesError) as caught:
        installed_runtime()
    text = str(caught.value)
    assert "onnxruntime 1.31.1, onnxruntime-training 1.19.2" in text
    installs = "pip install --upgrade 'onnxruntime-training==1.19.2'"
    assert f"Run: pip uninstall -y onnxruntime onnxruntime-training && {installs}\n" in text
    assert "The extras cpu, cuda and training" in text


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(("has_device", "runtime"), [(True, "onnxruntime-gpu[cuda,cudnn]"), (False, "onnxruntime")])
def test_the_fix_for_two_builds_keeps_the_one_for_the_device(
    monkeypatch: pytest.MonkeyPatch, has_device: bool, runtime: str
) -> None:
    found = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(capabilities, "find_distributions", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    with pytest.raises(SeveralRuntimesError, match=re.escape(f"&& pip install --upgrade '{runtime}>=")):
        installed_runtime()


@pytest.mark.usefixtures("uncached")
def test_no_distribution_names_the_three_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "find_distributions", dict)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime.capi", None)
    with pytest.raises(RuntimeNotInstalledError) as caught:
        installed_runtime()
    assert all(extra in str(caught.value) for extra in ("[cpu]", "[cuda]", "[training]"))
    function = torch.compile(lambda x: x + 1, backend="ort_train")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="RuntimeNotInstalledError"):
        function(torch.ones(2))


@pytest.mark.usefixtures("uncached")
def test_the_error_of_a_missing_provider_names_the_available_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ProviderNotAvailableError) as caught:
        providers.find_target("cuda")
    text = str(caught.value)
    assert "CUDAExecutionProvider is needed for tensors on cuda" in text
    assert "Available providers" in text
    installs = "pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"
    assert f"Run pip uninstall -y {installed_runtime().package} && {installs}" in text
    with pytest.raises(ProviderNotAvailableError, match="no provider serves this device"):
        providers.find_target("mps")


@pytest.fixture
def no_cublas(uncached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime with a provider for CUDA 13, beside a torch with CUDA 12."""
    build = CudaBuild("13.0", ("libcublas.so.13", "libcudart.so.13"), ("libcublas.so.13",))
    available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: available)
    monkeypatch.setattr(providers, "installed_cuda_build", lambda: build)
    monkeypatch.setattr(providers, "torch_cuda", lambda: TorchCuda("2.13.0+cu126", "12.6", 91002))


@pytest.mark.usefixtures("no_cublas")
def test_a_provider_without_its_libraries_is_refused_where_it_is_to_load() -> None:
    assert providers.find_target("cuda").provider == "CUDAExecutionProvider"  # its kernels can be asked about
    assert providers.usable_target("cpu") is providers.find_target("cpu")
    with pytest.raises(ProviderNotAvailableError) as caught:
        providers.usable_target("cuda")
    text = str(caught.value)
    assert "CUDAExecutionProvider is needed for tensors on cuda, but it cannot load" in text
    assert "was built for CUDA 13.0, and torch 2.13.0+cu126 brings CUDA 12.6 and cuDNN 9" in text
    assert "libcublas.so.13 is not found" in text
    assert text.endswith("Run pip install --upgrade --force-reinstall torch.")


@pytest.mark.usefixtures("no_cublas")
def test_a_compile_on_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ort_dynamo.backend.session_device", lambda *_: torch.device("cuda"))
    layer = torch.nn.Linear(3, 2)
    compiled = torch.compile(layer, backend="ort_train")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"it cannot load.*libcublas\.so\.13 is not"):
        compiled(torch.ones(4, 3))


def test_the_installed_runtimes_table_knows_float_and_its_limits() -> None:
    target = providers.find_target("cpu")
    for op_type in ("MatMul", "Conv", "Add", "LayerNormalization"):
        assert target.takes(op_type, "", {"T": ir.DataType.FLOAT}), op_type
    assert not target.takes("Conv", "", {"T": ir.DataType.DOUBLE})
    assert not target.has_op("NoSuchOp")
    assert target.has_op("ConvGrad", "com.microsoft") == target.gradient_kernels


def test_the_kernel_table_stays_out_of_the_targets_repr() -> None:
    target = providers.find_target("cpu")
    assert "MatMul" not in repr(target)
    assert target.package in repr(target)
    assert target.version in repr(target)


def test_double_graphs_leave_out_the_fusions_without_a_kernel() -> None:
    target = providers.find_target("cpu")
    assert "MatmulTransposeFusion" not in omitted_optimizers({ir.DataType.FLOAT}, target)
    assert "MatmulTransposeFusion" in omitted_optimizers({ir.DataType.FLOAT, ir.DataType.DOUBLE}, target)


def test_defects_decide_which_optimizers_are_left_out() -> None:
    training, stock = providers.recorded_cpu_targets()
    assert {"NoopElimination", "DivMulFusion", "ConvActivationFusion"} <= {*omitted_optimizers((), training)}
    assert "ConvActivationFusion" not in omitted_optimizers((), stock)
    for cuda in providers.recorded_cuda_targets():
        assert "SkipLayerNormFusion" in omitted_optimizers((), cuda)
    assert "SkipLayerNormFusion" not in omitted_optimizers((), stock)
    assert {"PreShapeNodeElimination", "DivMulFusion"} <= {*omitted_optimizers((), stock)}
    assert {"TransposeOptimizer"} <= {*omitted_optimizers((), training)} & {*omitted_optimizers((), stock)}


@pytest.mark.parametrize(
    ("version", "record"),
    [("1.19.2", "1.19.2"), ("1.24.0", "1.19.2"), ("1.28.0", "1.31.1"), ("1.33.1", "1.31.1"), ("2.0.0", "1.31.1")],
)
def test_the_nearest_record_stands_in(version: str, record: str) -> None:
    assert nearest_record(version) == record


@pytest.mark.usefixtures("uncached")
def test_a_build_that_does_not_tell_its_kernels_has_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    training, stock = providers.recorded_cpu_targets()
    monkeypatch.setattr(capabilities, "kernel_definitions", lambda: None)
    recorded = training if installed_runtime().has_gradient_kernels else stock
    assert providers.find_target("cpu").kernels == recorded.kernels


@pytest.mark.usefixtures("uncached")
def test_a_build_with_tensorrts_provider_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise AssertionError("without TensorRT's libraries, the call ends the process")

    class Runtime:
        @staticmethod
        def get_available_providers() -> list[str]:
            return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]

    monkeypatch.setattr(capabilities, "kernel_definitions", ask)
    monkeypatch.setattr(capabilities, "onnxruntime", Runtime)
    gpu = capabilities.InstalledRuntime("onnxruntime-gpu", "1.31.1")
    _, recorded = providers.recorded_cuda_targets()
    assert kernel_table(gpu, "CUDAExecutionProvider") == recorded.kernels


@pytest.mark.usefixtures("uncached")
def test_newer_versions_are_used_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capabilities, "find_distributions", lambda: {"onnxruntime": "1.99.0"})
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert providers.find_target("cpu").version == "1.99.0"
            providers.find_target.cache_clear()
    said = [record.getMessage() for record in caplog.records if record.name == capabilities.__name__]
    assert said == ["onnxruntime 1.99.0 is newer than 1.32, the newest that ort_dynamo was tested with"]


def test_tested_versions_are_not_spoken_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(
        capabilities, "installed_runtime", lambda: capabilities.InstalledRuntime("onnxruntime", "1.32.4")
    )
    with caplog.at_level("INFO"):
        capabilities.say_if_untested.__wrapped__()
    assert not caplog.records
