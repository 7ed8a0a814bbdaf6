"""Compile fused kernels to cubins, which needs Triton and no device, and store them for the caller.

A kernel is compiled twice: for pointers that are multiples of 16 bytes, and for any pointers. The key of a stored
kernel is a hash of all that it depends on. A second hash, of its content, detects damage. It does not protect against
somebody who writes to the folder on purpose. So the caller's store reads only files of the user, like the cache of
compiled graphs. The store holds device code: it is loaded into a CUDA context, and never runs on the host. All sources
are checked before Triton reads them (`kernel_source.py`).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ort_dynamo.graph.fused_op import POINTERS, FusedOp
from ort_dynamo.runtime.kernels.fused_kernel import TRAILING_NULLS, CompiledKernel, KernelVariant
from ort_dynamo.runtime.kernels.kernel_source import KernelSourceError, checked_source
from ort_dynamo.runtime.kernels.triton_workers import TOOL_PATHS, compile_all

__all__ = ["KernelStore", "compile_kernels", "triton_version"]

_FORMAT = 2
"""The format version of stored kernels; it is part of their keys."""


class KernelStore(Protocol):
    """Stores bytes by key, whole and of this user alone; no function raises."""

    @property
    def folder(self) -> Path:
        """The folder of the kernels; it may hold the C library, too."""

    def load(self, key: str) -> bytes | None:
        """Return the bytes of a key, if there are any."""

    def store(self, key: str, data: bytes) -> None:
        """Store bytes, if there is room."""


def compile_kernels(
    ops: Sequence[FusedOp], capability: tuple[int, int], store: KernelStore | None = None
) -> Mapping[str, CompiledKernel | str]:
    """Compile each operator's kernel, or read it from the store.

    Args:
        ops: the operators, with different names.
        capability: the device's, as from `torch.cuda.get_device_capability`.
        store: the store of compiled kernels; None stores nothing.

    Returns:
        Name of an operator -> its kernel, or the reason why it has none.
    """
    version = triton_version()
    if version is None:
        return {op.name: "Triton is not installed" for op in ops}
    found: dict[str, CompiledKernel | str] = {}
    requests: dict[str, dict[str, Any]] = {}
    keys = {op.name: _key(op, capability, version) for op in ops}
    for op in ops:
        stored = None if store is None else _unpack(keys[op.name], store.load(keys[op.name]))
        if stored is not None:
            found[op.name] = stored
            continue
        try:
            requests[op.name] = _request(op, capability)
        except KernelSourceError as error:
            found[op.name] = f"its source is not compiled: {error}"
    for (name, request), response in zip(requests.items(), compile_all([*requests.values()]), strict=True):
        found[name] = made = _kernel(request, response)
        if store is not None and isinstance(made, CompiledKernel):
            store.store(keys[name], _pack(keys[name], made))
    return {op.name: found[op.name] for op in ops}


def triton_version() -> str | None:
    """Return the version of the Triton that would be imported, which this does not do; None where there is none."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    said = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return said[1] if said else hashlib.sha256(text.encode()).hexdigest()


def _dtypes(op: FusedOp) -> list[int]:
    return [*op.inputs, *(output.dtype for output in op.outputs)]


def _options(op: FusedOp) -> dict[str, Any]:
    # Each result is rounded, as in eager mode (a*a - b*b is 0 where a is b), and no subnormal number is taken for 0.
    plain = {"num_warps": op.num_warps, "num_stages": 3, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    # Without "debug" Triton drops assertions, and with it adds its own, of overflows.
    return {**plain, "debug": True, "sanitize_overflow": False} if "tl.device_assert(" in op.source else plain


def _key(op: FusedOp, capability: tuple[int, int], version: str) -> str:
    tools = [os.environ.get(name) for name in TOOL_PATHS]
    kernel = [op.name, op.source, _dtypes(op), len(op.symbols), _options(op)]
    return hashlib.sha256(json.dumps([_FORMAT, version, tools, kernel, capability]).encode()).hexdigest()


def _request(op: FusedOp, capability: tuple[int, int]) -> dict[str, Any]:
    """Make the request of `triton_worker.py`; raise KernelSourceError if the source is not to be compiled."""
    source = checked_source(op.source, op.name)
    dtypes = _dtypes(op)
    for dtype in dtypes:
        if dtype not in POINTERS:
            raise KernelSourceError(f"Triton has no tensors of ONNX's element type {dtype}")
    types = [POINTERS[dtype] for dtype in dtypes] + ["i64"] * len(op.symbols)
    if len(types) != len(source.parameters):
        raise KernelSourceError(f"the function has {len(source.parameters)} parameters, the operator {len(types)}")
    major, minor = capability
    return {
        "text": source.text,
        "name": op.name,
        "signature": [*zip(source.parameters, types, strict=True)],
        "arch": 10 * major + minor,
        "options": _options(op),
    }


def _kernel(request: dict[str, Any], response: dict[str, Any]) -> CompiledKernel | str:
    if "error" in response:
        return f"Triton does not compile it: {response['error']}"
    variants = [KernelVariant(**{**one, "cubin": base64.b64decode(one["cubin"])}) for one in response["variants"]]
    arguments = len(request["signature"])
    for variant in variants:
        if not arguments <= variant.parameters <= arguments + TRAILING_NULLS:
            return f"Triton made {variant.parameters} parameters of {arguments}"
    return CompiledKernel(*variants)


def _pack(key: str, kernel: CompiledKernel) -> bytes:
    """Return a line with the hash of the rest, a line of JSON, and two cubins."""
    variants = (kernel.aligned, kernel.unaligned)
    heads = [{**dataclasses.asdict(one), "cubin": len(one.cubin)} for one in variants]
    rest = json.dumps({"key": key, "variants": heads}).encode() + b"\n" + b"".join(one.cubin for one in variants)
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def _unpack(key: str, data: bytes | None) -> CompiledKernel | None:
    """Undo `_pack`; None where these are not its bytes, whole and of this key."""
    digest, _, rest = (data or b"").partition(b"\n")
    if digest != hashlib.sha256(rest).hexdigest().encode():
        return None
    line, _, cubins = rest.partition(b"\n")
    try:
        head = json.loads(line)
        first, second = head["variants"]
        if head["key"] != key or len(cubins) != first["cubin"] + second["cubin"]:
            return None
        aligned = KernelVariant(**{**first, "cubin": cubins[: first["cubin"]]})
        return CompiledKernel(aligned, KernelVariant(**{**second, "cubin": cubins[first["cubin"] :]}))
    except (ValueError, TypeError, KeyError):  # written by something else, with a right hash
        return None
