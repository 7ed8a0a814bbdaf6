"""Opens and runs a session of one node: python -m ort_dynamo.runtime.trial DEVICE, in a process that it may crash."""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.cuda_build import installed_cuda_build
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.runtime.providers import find_target, provider_options

__all__ = ["main", "run_one_node"]

_MODEL = '<ir_version: 10, opset_import: ["" : 20]> one_node (float[n] x) => (float[n] y) { y = Neg (x) }'


def run_one_node(device_type: str) -> str:
    """Run a model of one node on a device's provider; gives what went wrong, "" if nothing did.

    What ONNX Runtime raises goes on.
    """
    target = find_target(device_type)
    installed_cuda_build()  # loads its libraries, as a compile does
    settings = onnxruntime().SessionOptions()
    settings.log_severity_level = 3  # errors, which go to stderr
    session = onnxruntime().InferenceSession(
        ir.to_proto(ir.from_onnx_text(_MODEL)).SerializeToString(),
        settings,
        providers=[(target.provider, provider_options(torch.device(device_type), SessionOptions().resolved()))],
        enable_fallback=0,
    )
    wanted, used = target.provider, session.get_providers()
    if wanted not in used:
        return f"ONNX Runtime leaves {wanted} out, and falls back to {', '.join(used)}"
    x = np.arange(3, dtype=np.float32)
    (y,) = session.run(None, {"x": x})
    return "" if np.array_equal(y, -x) else f"the negative of {x.tolist()} came out as {y.tolist()}"


def main() -> int:
    """Try the device that the command line names; what went wrong goes to stdout, and is status 1."""
    try:
        said = run_one_node(sys.argv[1])
    except Exception as error:  # whatever it is, it is the answer
        said = f"{type(error).__name__}: {error}"
    print(said)
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
