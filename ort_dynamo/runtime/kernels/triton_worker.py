"""Compiles kernels for a process that started this file, which is no module of the package.

It is run by its path, imports Python's library and Triton only, and so costs no import of torch. A request is a line of
JSON on its standard input, an answer one line of JSON on its original standard output. It ends where there are no more
requests, or where none has come for a minute.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import select
import sys
from typing import Any

_IDLE = 60.0
"""Seconds without a request after which the process ends."""


def serve() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Triton prints
    while select.select([0], [], [], _IDLE)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        sys.path[:] = request["path"]
        try:
            answer: dict[str, Any] = {"variants": _variants(request)}
        except Exception as error:  # of Triton, of LLVM, of the system: the reason goes to the one who asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _variants(request: dict[str, Any]) -> list[dict[str, Any]]:
    folder = request["folder"]
    os.environ["TRITON_CACHE_DIR"] = folder
    path = os.path.join(folder, "kernel_source.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(request["text"])
    spec = importlib.util.spec_from_file_location("kernel_source", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, request["name"])
    return [_variant(kernel, request, aligned) for aligned in (True, False)]


def _variant(kernel: Any, request: dict[str, Any], aligned: bool) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types: dict[str, str] = dict(request["signature"])
    pointers = [index for index, one in enumerate(types.values()) if one.startswith("*")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in pointers} if aligned else {}
    source = ASTSource(kernel, types, {}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=request["options"])
    metadata = compiled.metadata
    for field, wanted in _PLAIN_LAUNCH.items():
        if (found := getattr(metadata, field, wanted)) != wanted:
            raise ValueError(f"the kernel wants a launch with {field} = {found}")
    heads = re.findall(r"\.entry\s+(\w+)\s*\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    if [name for name, _ in heads] != [metadata.name]:
        raise ValueError(f"the module has the entries {[name for name, _ in heads]}")
    return {
        "cubin": base64.b64encode(compiled.asm["cubin"]).decode(),
        "entry": metadata.name,
        "num_warps": metadata.num_warps,
        "shared": metadata.shared,
        "parameters": heads[0][1].count(".param"),
    }


_PLAIN_LAUNCH = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "tmem_size": 0,
}
"""Field of Triton's metadata -> its value where a kernel is launched by its grid, its block and its arguments only."""


if __name__ == "__main__":
    serve()
