"""Opens and runs a session of one node, in a process that it may crash.

The command is `python -m ort_dynamo.runtime.installed.probe_device`.
"""

from __future__ import annotations

import sys

import onnx_ir as ir
import torch

from ort_dynamo.graph.build import built_of
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.installed.cuda_build import installed_cuda_build
from ort_dynamo.runtime.installed.providers import find_target

__all__ = ["main", "run_one_node"]

_MODEL = '<ir_version: 10, opset_import: ["" : 20]> one_node (float[n] x) => (float[n] y) { y = Neg (x) }'


def run_one_node(device_type: str) -> str:
    """Run a model of one node on a device, as graphs run there; gives the fault, "" if there is none.

    So on CUDA it takes torch's stream and memory. Errors of ONNX Runtime and torch pass through.
    """
    target, device = find_target(device_type), torch.device(device_type)
    installed_cuda_build()  # loads its libraries, as a compile does
    x = torch.arange(3, dtype=torch.float32, device=device)
    one_node = built_of("one_node", ir.from_onnx_text(_MODEL), SessionOptions().resolved())
    (y,) = open_graph(one_node, target, device)(x)
    return "" if torch.equal(y, -x) else f"the negative of {x.tolist()} came out as {y.tolist()}"


def main() -> int:
    """Try the device that the command line names; a fault goes to stdout, and is status 1."""
    try:
        said = run_one_node(sys.argv[1])
    except Exception as error:  # any error is the answer
        said = f"{type(error).__name__}: {error}"
    print(said)
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
