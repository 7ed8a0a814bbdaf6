"""Tests of the match between the CUDA provider and torch's libraries: made-up builds, and the installed one."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.cuda_build import (
    REQUIREMENTS,
    CudaBuild,
    TorchCuda,
    installed_cuda_build,
    load_libraries,
    misfit,
    replacing,
    torch_cuda,
)
from ort_dynamo.runtime.installed.importing import onnxruntime

OF_13 = (
    "libcublasLt.so.13",
    "libcublas.so.13",
    "libcurand.so.10",
    "libcufft.so.12",
    "libcudart.so.13",
    "libcudnn.so.9",
)
OF_11 = ("libcublasLt.so.11", "libcudnn.so.8", "libcurand.so.10", "libcufft.so.10", "libcudart.so.11.0")
TORCH_13 = TorchCuda("2.15.0+cu132", "13.2", 92600)
TORCH_12 = TorchCuda("2.13.0+cu126", "12.6", 91002)


def test_commands_install_the_extras_requirements() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert {extra: [one] for extra, one in REQUIREMENTS.items()} == {
        extra: project["optional-dependencies"][extra] for extra in REQUIREMENTS
    }


def test_versions_are_read_off_the_libraries() -> None:
    build = CudaBuild("13.0", OF_13, ())
    assert (build.cuda, build.cudnn, str(build)) == (13, 9, "CUDA 13.0 and cuDNN 9")
    assert (CudaBuild("", OF_11, ()).cuda, str(CudaBuild("", OF_11, ()))) == (11, "CUDA 11 and cuDNN 8")


def test_a_build_whose_libraries_are_not_known_goes_by_its_own_word() -> None:
    assert (CudaBuild("12.8", (), ()).cuda, CudaBuild("12.8", (), ()).cudnn) == (12, None)
    assert (CudaBuild("", (), ()).cuda, str(CudaBuild("", (), ()))) == (None, "")


@pytest.mark.parametrize(
    ("number", "major"), [(92600, 9), (90100, 9), (8902, 8), (None, None)], ids=["9.26", "9.1", "8.9", "none"]
)
def test_torchs_cudnn_is_read_off_its_number(number: int | None, major: int | None) -> None:
    assert TorchCuda("2.13.0", "13.0", number).cudnn == major


def test_a_build_that_finds_its_libraries_fits_any_torch() -> None:
    assert misfit(CudaBuild("13.0", OF_13, ()), TORCH_13, "onnxruntime-gpu") is None
    assert misfit(CudaBuild("13.0", OF_13, ()), TORCH_12, "onnxruntime-gpu") is None


def test_a_build_for_older_cuda_is_to_be_replaced() -> None:
    found = misfit(CudaBuild("11.8", OF_11, OF_11), TORCH_13, "onnxruntime-training")
    assert found is not None
    assert found.reason == (
        "onnxruntime-training was built for CUDA 11.8 and cuDNN 8, and torch 2.15.0+cu132 brings CUDA 13.2 and "
        "cuDNN 9: libcublasLt.so.11, libcudnn.so.8, libcurand.so.10, libcufft.so.10, libcudart.so.11.0 are not found"
    )
    assert (
        found.fix
        == "pip uninstall -y onnxruntime-training && pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"
    )


def test_beside_an_older_torch_it_is_torch_that_is_to_be_replaced() -> None:
    found = misfit(CudaBuild("13.0", OF_13, OF_13[:1]), TORCH_12, "onnxruntime-gpu")
    assert found is not None
    assert found.reason.endswith("torch 2.13.0+cu126 brings CUDA 12.6 and cuDNN 9: libcublasLt.so.13 is not found")
    assert found.fix == "pip install --upgrade --force-reinstall torch"


def test_another_cudnn_is_a_misfit_of_its_own() -> None:
    needs = ("libcublas.so.12", "libcudnn.so.9")
    found = misfit(CudaBuild("12.4", needs, needs[1:]), TorchCuda("2.3.0", "12.1", 8902), "onnxruntime-gpu")
    assert found is not None
    assert "cuDNN 9, and torch 2.3.0 brings CUDA 12.1 and cuDNN 8: libcudnn.so.9 is not found" in found.reason


def test_a_library_that_torch_does_without_comes_with_the_extra() -> None:
    found = misfit(CudaBuild("13.0", OF_13, ("libcurand.so.10",)), TORCH_13, "onnxruntime-gpu")
    assert found is not None
    assert found.reason == "libcurand.so.10 is not found, which it needs"
    assert found.fix == "pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"


def test_all_go_before_one_comes() -> None:
    assert replacing(["onnxruntime", "onnxruntime-gpu"], "cuda") == (
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"
    )
    assert replacing([], "cpu") == "pip install --upgrade 'onnxruntime>=1.28'"


@pytest.mark.skipif(sys.platform != "linux", reason="the names are Linux's")
def test_libraries_are_loaded_from_folders_where_the_loader_does_not_look(tmp_path: Path) -> None:
    own = Path(onnxruntime().__file__).parent / "capi" / "libonnxruntime_providers_shared.so"
    shutil.copy(own, tmp_path / "libmade_up.so.7")
    (tmp_path / "libdamaged.so.1").write_bytes(b"no library")
    names = ["libmade_up.so.7", "libdamaged.so.1", "libnowhere.so.3", "libm.so.6"]
    assert load_libraries(names, []) == ("libmade_up.so.7", "libdamaged.so.1", "libnowhere.so.3")
    assert load_libraries(names, [str(tmp_path)]) == ("libdamaged.so.1", "libnowhere.so.3")
    assert load_libraries(["libmade_up.so.7"], [str(tmp_path)]) == ()
    assert load_libraries([], []) == ()


def test_the_installed_build_is_read() -> None:
    build = installed_cuda_build()
    assert (build is not None) == ("CUDAExecutionProvider" in onnxruntime().get_available_providers())
    if build is not None and installed_runtime().has_gradient_kernels:
        assert (build.cuda, build.cudnn) == (11, 8)
        assert set(build.missing) <= set(build.libraries) == {*OF_11, "libcublas.so.11"}


def test_torchs_libraries_are_asked() -> None:
    found = torch_cuda()
    assert (found.cuda is None) == (found.version is None)
    assert str(found) == "no CUDA" if found.version is None else found.version in str(found)
