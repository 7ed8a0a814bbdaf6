"""python -m ort_dynamo doctor: findings of made-up machines, and a look at this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from forked import COMMANDS, run_program

import ort_dynamo
from ort_dynamo.commands.doctor import gather
from ort_dynamo.commands.doctor.facts import CacheFacts, Facts, MachineFacts, Probe, RuntimeFacts
from ort_dynamo.commands.doctor.findings import findings
from ort_dynamo.commands.doctor.text import as_json, as_text
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.cuda_build import CudaBuild, TorchCuda

STOCK = RuntimeFacts(
    distributions=(("onnxruntime", "1.31.1"),),
    says=("onnxruntime", "1.31.1"),
    path="/site-packages/onnxruntime",
    providers=("CPUExecutionProvider",),
    cuda=None,
    error="",
)
LIBRARIES = ("libcublas.so.13", "libcudnn.so.9", "libcudart.so.13")
GPU = replace(
    STOCK,
    distributions=(("onnxruntime-gpu", "1.31.1"),),
    says=("onnxruntime-gpu", "1.31.1"),
    providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    cuda=CudaBuild("13.0", LIBRARIES, ()),
)
TRAINING = replace(
    GPU,
    distributions=(("onnxruntime-training", "1.19.2"),),
    says=("onnxruntime-training", "1.19.2"),
    cuda=CudaBuild("11.8", ("libcublas.so.11", "libcudnn.so.8"), ("libcublas.so.11", "libcudnn.so.8")),
)
CPU = Facts(
    python="3.12.1",
    packages=(("torch", "2.13.0+cpu"), ("numpy", "2.4.6"), ("onnx", "1.23.2")),
    torch=TorchCuda("2.13.0+cpu", None, None),
    devices=(),
    runtime=STOCK,
    probes=(Probe("cpu", ""),),
    cache=CacheFacts("/home/me/.cache/ort_dynamo", True, True, 3, 3 * 2**20, 2**31, ""),
    machine=MachineFacts("0.1", "/src/ort_dynamo", "Linux-6.8", "A CPU, 8 logical cores", "/usr/bin/c++", ()),
)
CUDA = replace(
    CPU,
    torch=TorchCuda("2.13.0+cu130", "13.0", 91200),
    devices=("NVIDIA H100",),
    runtime=GPU,
    probes=(Probe("cpu", ""), Probe("cuda", "")),
)


def only(facts: Facts) -> tuple[str, str, bool]:
    (found,) = findings(facts)
    return found.what, found.fix, found.is_fault


@pytest.mark.parametrize(
    "facts", [CPU, CUDA, replace(CPU, runtime=TRAINING)], ids=["cpu", "cuda", "training without a device"]
)
def test_nothing_is_wrong_where_all_fits(facts: Facts) -> None:
    assert findings(facts) == ()
    assert "Nothing is wrong." in as_text(facts, ())


def test_several_distributions_are_one_fault() -> None:
    both = (("onnxruntime", "1.31.1"), ("onnxruntime-gpu", "1.31.1"))
    what, fix, is_fault = only(replace(CUDA, runtime=replace(STOCK, distributions=both)))
    assert is_fault
    assert "(onnxruntime 1.31.1, onnxruntime-gpu 1.31.1), which overwrite one another's files" in what
    assert "`import onnxruntime` loads onnxruntime 1.31.1" in what
    assert (
        fix
        == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"
    )
    broken = replace(STOCK, distributions=both, says=None, error="ImportError: undefined symbol")
    assert only(replace(CPU, runtime=broken))[1].endswith("'onnxruntime>=1.28'")


def test_no_runtime_is_a_fault_with_the_extra_for_the_machine() -> None:
    none = replace(STOCK, distributions=(), says=None, error="ModuleNotFoundError: onnxruntime")
    expected = "ONNX Runtime is not installed.", "pip install --upgrade 'onnxruntime>=1.28'", True
    assert only(replace(CPU, runtime=none, probes=())) == expected
    assert (
        only(replace(CUDA, runtime=none, probes=()))[1] == "pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"
    )


def test_a_runtime_that_does_not_import_is_installed_anew() -> None:
    broken = replace(STOCK, says=None, error="ImportError: libz.so")
    what, fix, is_fault = only(replace(CPU, runtime=broken, probes=()))
    assert (what, is_fault) == (
        "onnxruntime 1.31.1 is installed, but does not import: ImportError: libz.so.",
        True,
    )
    assert fix == "pip install --force-reinstall --no-deps onnxruntime==1.31.1"


def test_files_of_another_distribution_are_a_fault() -> None:
    what, fix, _ = only(replace(CPU, runtime=replace(STOCK, says=("onnxruntime-training", "1.19.2"))))
    assert "onnxruntime 1.31.1 is installed, but its files are those of onnxruntime-training 1.19.2" in what
    assert fix == "pip uninstall -y onnxruntime && pip install --upgrade 'onnxruntime>=1.28'"
    same = replace(GPU, says=("onnxruntime_gpu", "1.31.1+local"))
    assert findings(replace(CUDA, runtime=same)) == ()
    unpacked = replace(STOCK, distributions=())  # a build on the path, which pip knows nothing of
    assert findings(replace(CPU, runtime=unpacked)) == ()


def test_a_session_that_does_not_run_on_the_cpu_is_a_fault() -> None:
    what, fix, is_fault = only(replace(CPU, probes=(Probe("cpu", "its process ended with status -4"),)))
    assert (what, is_fault) == ("A session on the CPU does not run: its process ended with status -4.", True)
    assert fix == "pip install --force-reinstall --no-deps onnxruntime==1.31.1"


def test_a_device_without_a_provider_is_a_fault() -> None:
    what, fix, is_fault = only(replace(CUDA, runtime=STOCK))
    assert is_fault
    assert what.startswith("torch sees NVIDIA H100, but onnxruntime 1.31.1 has no CUDAExecutionProvider")
    assert fix == "pip uninstall -y onnxruntime && pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"


def test_a_provider_for_other_libraries_is_one_fault_even_if_its_probe_fails() -> None:
    facts = replace(CUDA, runtime=TRAINING, probes=(Probe("cpu", ""), Probe("cuda", "it falls back")))
    what, fix, is_fault = only(facts)
    assert is_fault
    assert "onnxruntime-training was built for CUDA 11.8 and cuDNN 8, and torch 2.13.0+cu130 brings CUDA 13.0" in what
    assert "libcublas.so.11, libcudnn.so.8 are not found" in what
    assert fix == "pip uninstall -y onnxruntime-training && pip install --upgrade 'onnxruntime-gpu[cuda,cudnn]>=1.28'"


def test_a_provider_that_fails_with_all_its_libraries_is_a_fault() -> None:
    what, fix, is_fault = only(replace(CUDA, probes=(Probe("cpu", ""), Probe("cuda", "CUDA failure 35"))))
    assert is_fault
    assert "onnxruntime-gpu 1.31.1, which is built for CUDA 13.0 and cuDNN 9, are there: CUDA failure 35." in what
    assert "update the driver" in fix


def test_torch_without_cuda_is_explained_and_no_fault() -> None:
    what, _, is_fault = only(replace(CUDA, devices=(), probes=(Probe("cpu", ""),)))
    assert (what, is_fault) == ("torch 2.13.0+cu130 is built for CUDA 13.0, but sees no CUDA device.", False)
    what, fix, is_fault = only(replace(CPU, runtime=GPU))
    assert "has CUDAExecutionProvider, but torch 2.13.0+cpu is a build without CUDA" in what
    assert "--force-reinstall torch" in fix
    assert not is_fault


def test_missing_packages_are_one_fault() -> None:
    packages = (("torch", "2.13.0"), ("onnx", None), ("onnxscript", None))
    expected = "onnx, onnxscript are not installed.", "pip install onnx onnxscript", True
    assert only(replace(CPU, packages=packages)) == expected


def test_a_package_that_is_older_than_it_must_be_is_a_fault() -> None:
    oldest = (("torch", "2.11"), ("numpy", "1.26.0"), ("onnx", "1.24"), ("onnxruntime", "1.31.1"))
    expected = "onnx 1.23.2 is installed, but ort_dynamo needs 1.24 or newer.", "pip install --upgrade 'onnx>=1.24'"
    assert only(replace(CPU, oldest=oldest)) == (*expected, True)
    same = (("torch", "2.13.0.0"), ("numpy", "2.4"), ("onnx", "1.9"))
    assert findings(replace(CPU, oldest=same)) == ()
    what, fix, _ = only(replace(CPU, oldest=(("onnxruntime", "1.32"),)))
    assert what == "onnxruntime 1.31.1 is installed, but ort_dynamo needs 1.32 or newer."
    assert fix == "pip install --upgrade 'onnxruntime>=1.32'"


def test_a_cudnn_that_torch_cannot_use_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def incompatible() -> TorchCuda:
        raise RuntimeError("cuDNN version incompatibility: found runtime version (9, 19, 0).")

    monkeypatch.setattr(gather, "torch_cuda", incompatible)
    facts = gather.gather()
    assert facts.torch.torch == str(torch.__version__)
    what, fix, is_fault = only(replace(CUDA, torch_error=facts.torch_error))
    assert is_fault
    assert what == (
        "torch 2.13.0+cu130 cannot use its cuDNN: cuDNN version incompatibility: found runtime version (9, 19, 0)."
    )
    assert fix == "pip install --force-reinstall torch==2.13.0"


def test_all_declared_packages_are_looked_at() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    runtimes = [project["optional-dependencies"][extra][0] for extra in ("training", "cpu", "cuda")]
    facts = gather.gather()
    assert [name for name, _ in facts.packages] == [one.partition(">")[0] for one in project["dependencies"]]
    declared = [re.split(r"(?:\[.*])?[>=]=", one) for one in (*project["dependencies"], *runtimes)]
    assert facts.oldest[: len(declared)] == tuple(map(tuple, declared))


def test_a_cache_that_cannot_be_used_is_a_fault_unless_it_is_off() -> None:
    refused = replace(CPU.cache, error="/cache belongs to another user")
    assert only(replace(CPU, cache=refused))[0].endswith("is not used: /cache belongs to another user.")
    read_only = replace(CPU.cache, writable=False)
    what, fix, _ = only(replace(CPU, cache=read_only))
    assert what.endswith("cannot be written: /home/me/.cache/ort_dynamo.")
    assert "ORT_DYNAMO_CACHE_DIR" in fix
    for cache in (refused, read_only):
        assert findings(replace(CPU, cache=replace(cache, in_use=False))) == ()


def test_the_text_has_faults_with_their_fixes_and_notes_apart() -> None:
    facts = replace(CUDA, runtime=TRAINING, probes=(Probe("cpu", ""), Probe("cuda", "it falls back")))
    text = as_text(facts, findings(facts)).splitlines()
    assert "  CUDA          no: it falls back" in text
    assert "  torch          2.13.0+cpu, CUDA 13.0 and cuDNN 9" in text
    assert text[text.index("Wrong") + 2] == f"    {only(facts)[1]}"
    note = replace(CPU, runtime=GPU)
    expected = ["Nothing is wrong.", "", "Also", f"  {only(note)[0]}", f"    {only(note)[1]}"]
    assert as_text(note, findings(note)).splitlines()[-5:] == expected


def test_the_text_has_the_machine_and_the_package() -> None:
    variables = (("OMP_NUM_THREADS", "1"), ("ORT_DYNAMO_CACHE", "0"))
    machine = replace(CPU.machine, compiler="", variables=variables)
    text = as_text(replace(CPU, machine=machine), ()).splitlines()
    assert text[1:6] == [
        "  ort_dynamo     0.1, in /src/ort_dynamo",
        "  system         Linux-6.8",
        "  processor      A CPU, 8 logical cores",
        "  C++ compiler   not found: only torch's inductor and fused kernels need one",
        "  environment    OMP_NUM_THREADS=1, ORT_DYNAMO_CACHE=0",
    ]
    assert "  C++ compiler   /usr/bin/c++" in as_text(CPU, ()).splitlines()
    assert "  fused kernels  no: ONNX Runtime's own kernels run on CUDA" in as_text(replace(CUDA, fuses=False), ())


def test_json_says_the_same() -> None:
    facts = replace(CUDA, runtime=STOCK)
    said = json.loads(as_json(facts, findings(facts)))
    assert said["ok"] is False
    assert said["findings"][0]["fix"] == only(facts)[1]
    assert said["facts"]["devices"] == ["NVIDIA H100"]
    assert json.loads(as_json(CPU, ()))["ok"] is True


@pytest.mark.parametrize(
    ("status", "out", "err", "said"),
    [
        (0, "\n", "[W: a warning]", ""),
        (1, "it falls back\n", "Failed to load x with error: liby.so: no file\n", "it falls back (liby.so: no file)"),
        (-11, "", "", "its process ended with status -11, silently"),
        (-6, "", "first\nterminate called\n", "its process ended with status -6, terminate called"),
    ],
)
def test_a_probes_exit_status_and_output_are_explained(status: int, out: str, err: str, said: str) -> None:
    assert gather.explain(status, out, err) == said


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_SECONDS", 0.01)
    assert gather.try_device("cpu") == Probe("cpu", "it does not end within 0.01 seconds")


def test_a_probe_of_a_missing_device_gives_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("it may be there")
    assert gather.try_device("cuda").said


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path / "not" / "there"))
    command = [sys.executable, "-m", "ort_dynamo", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == int(not said["ok"]) == int(any(one["is_fault"] for one in said["findings"]))
    runtime = installed_runtime()
    assert said["facts"]["runtime"]["distributions"] == [[runtime.package, runtime.version]]
    assert {"on": "cpu", "said": ""} in said["facts"]["probes"]
    machine = said["facts"]["machine"]
    assert (machine["version"], machine["path"]) == (version("ort-dynamo"), str(Path(ort_dynamo.__file__).parent))
    assert ["ORT_DYNAMO_CACHE", "1"] in machine["variables"]
    cache = said["facts"]["cache"]
    assert (cache["path"], cache["writable"], cache["entries"]) == (str(tmp_path / "not" / "there"), True, 0)
    assert not (tmp_path / "not").exists()


def test_of_several_distributions_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(gather, "find_distributions", lambda: both)
    facts = gather.gather()
    assert facts.probes == ()
    assert [one.fix.partition(" && ")[0] for one in findings(facts) if one.is_fault] == [
        "pip uninstall -y onnxruntime onnxruntime-gpu"
    ]


def test_a_folder_of_others_and_a_wrong_variable_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    assert "can be written by other users" in gather._cache().error
    monkeypatch.setenv("ORT_DYNAMO_CACHE_SIZE", "much")
    assert "ORT_DYNAMO_CACHE_SIZE cannot be 'much'" in gather._cache().error


@pytest.mark.parametrize("package", ["torch", "onnx", "onnx-ir", "platformdirs"])
def test_the_doctor_names_a_package_without_which_it_cannot_look(package: str) -> None:
    without = f"import sys\nsys.modules[{package.replace('-', '_')!r}] = None\n"
    done = run_program(without + COMMANDS, "doctor")
    assert done.returncode == 2
    expected = f"The doctor needs {package}, which is not installed. Install it: pip install {package}."
    assert done.stderr == f"python -m ort_dynamo doctor: error: {expected}\n"
