"""Records which dtypes the kernels of a release of ONNX Runtime take: ort_dynamo/runtime/kernels_VERSION_DEVICE.json.

    python .ci/record_kernels.py                     all records that it makes
    python .ci/record_kernels.py 1.31.1 cuda         one of them
    python .ci/record_kernels.py --environments DIR  keep the environments there (2.5 GB for a CUDA record)

Each release answers itself (`get_all_opkernel_def`), in an environment of its own that pip makes. No GPU is needed: the
CUDA build makes its providers before it answers, and for that a stand-in (no_device.c, built with gcc) answers in place
of a device and of TensorRT. Nothing is computed. The training build has no such call; its kernels are those of
the stock build of the same version, and gradient operators that `runtime/installed/capabilities.py` adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RUNTIME = Path(__file__).resolve().parent.parent / "ort_dynamo" / "runtime"
STAND_IN = Path(__file__).with_name("no_device.c")

_CUDA_12 = [
    f"nvidia-{name}-cu12" for name in ("cublas", "cudnn", "cufft", "curand", "cuda-runtime", "cuda-nvrtc", "nvjitlink")
]
PACKAGES = {
    ("1.19.2", "cpu"): ["onnxruntime==1.19.2"],
    ("1.31.1", "cpu"): ["onnxruntime==1.31.1"],
    ("1.19.2", "cuda"): ["onnxruntime-gpu==1.19.2", *_CUDA_12],  # a build for CUDA 12 that names no libraries
    ("1.31.1", "cuda"): ["onnxruntime-gpu[cuda,cudnn]==1.31.1"],
}
"""(version, device) -> the requirement for pip."""

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def record(definitions: Iterable[Any], provider: str, opset: int) -> str:
    """Return the text of a record: the kernels of `provider` at an ai.onnx opset and in com.microsoft, sorted."""
    kernels: dict[str, list[dict[str, list[str]]]] = {}
    for kernel in definitions:
        first, last = kernel.version_range
        domain = kernel.domain.removeprefix("ai.onnx")
        if kernel.provider == provider and (domain == "com.microsoft" or (domain == "" and first <= opset <= last)):
            types = {name: sorted(taken) for name, taken in sorted(kernel.type_constraints.items())}
            entries = kernels.setdefault(f"{domain}::{kernel.op_name}", [])
            if types not in entries:
                entries.append(types)
    lines = (
        f"{json.dumps(name)}: {json.dumps(sorted(entries, key=json.dumps), separators=(',', ':'))}"
        for name, entries in sorted(kernels.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def make_environment(folder: Path, version: str, device: str) -> list[str]:
    """Make a virtual environment with one release; the beginning of a command line that runs Python in it."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[version, device]], check=True)
    return [str(python)] if device == "cpu" else _without_device(folder, python)


def _without_device(folder: Path, python: Path) -> list[str]:
    stand_ins = folder / "no_device"
    stand_ins.mkdir(exist_ok=True)
    built = {"libcuda.so.1": "-DDRIVER", "libnvinfer.so.10": "-DTENSORRT", "libnvonnxparser.so.10": "-DTENSORRT"}
    built["libnvinfer_plugin.so.10"] = "-DTENSORRT"
    for name, defined in built.items():
        shared = ["gcc", "-shared", "-fPIC", defined, f"-Wl,-soname,{name}", "-o", str(stand_ins / name)]
        subprocess.run([*shared, STAND_IN], check=True)
    first = stand_ins / "first.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", first, STAND_IN], check=True)
    libraries = sorted({str(file.parent) for file in folder.glob("lib/python3*/site-packages/nvidia/**/*.so*")})
    return ["env", f"LD_LIBRARY_PATH={':'.join([*libraries, str(stand_ins)])}", f"LD_PRELOAD={first}", str(python)]


def asked(version: str, device: str, environment: Path) -> str:
    """Return a new record of one release."""
    from ort_dynamo.targets.target import OPSET

    python = make_environment(environment, version, device)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [*python, __file__, "--ask", PROVIDERS[device], str(OPSET)], stdout=subprocess.PIPE, check=True, env=clean
    )
    return answer.stdout.decode()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", choices=sorted({version for version, _ in PACKAGES}))
    parser.add_argument("device", nargs="?", choices=PROVIDERS)
    parser.add_argument("--environments", type=Path, help="where the environments are, or are made (default: nowhere)")
    parser.add_argument(
        "--ask", nargs=2, metavar=("PROVIDER", "OPSET"), help="only print the kernels of this Python's build"
    )
    arguments = parser.parse_args()
    if arguments.ask:
        from onnxruntime.capi import _pybind_state as binding

        provider, opset = arguments.ask
        sys.stdout.write(record(binding.get_all_opkernel_def(), provider, int(opset)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for version, device in PACKAGES:
            if arguments.version in (None, version) and arguments.device in (None, device):
                folder = (arguments.environments or Path(temporary)) / f"{version}-{device}"
                (RUNTIME / f"kernels_{version}_{device}.json").write_text(asked(version, device, folder))


if __name__ == "__main__":
    main()
