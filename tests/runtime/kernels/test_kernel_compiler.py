"""Kernels are compiled to cubins without a device and stored; a failure is reported with its reason."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fused_examples import BFLOAT16, BOOL, EXAMPLES, FLOAT, add_bias, gelu, layer_norm, transpose
from kernel_resources import disassembled, resources

from ort_dynamo.cache.folder import CacheFolder
from ort_dynamo.cache.kernel_files import KernelFiles
from ort_dynamo.graph.fused_op import FusedOp, FusedOutput, Size
from ort_dynamo.runtime.kernels import kernel_compiler, triton_workers
from ort_dynamo.runtime.kernels.fused_kernel import TRAILING_NULLS, CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels, triton_version

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ARCHITECTURES = [(8, 0), (9, 0), (10, 0)]


def compiled(op: FusedOp, capability: tuple[int, int] = (9, 0), store: KernelFiles | None = None) -> CompiledKernel:
    found = compile_kernels([op], capability, store)[op.name]
    assert isinstance(found, CompiledKernel), found
    return found


def files(tmp_path: Path) -> tuple[CacheFolder, KernelFiles]:
    folder = CacheFolder(tmp_path / "cache", 2**31).kernels()
    return folder, KernelFiles(folder)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton is asked for."""
    names: list[str] = []

    def compile_all(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names.extend(request["name"] for request in requests)
        return triton_workers.compile_all(requests)

    monkeypatch.setattr(kernel_compiler, "compile_all", compile_all)
    return names


@pytest.fixture(scope="module")
def catalogue() -> dict[tuple[str, int, tuple[int, int]], CompiledKernel]:
    made = {}
    for capability in ARCHITECTURES:
        for dtype in (FLOAT, BFLOAT16):
            for name, kernel in compile_kernels([make(dtype) for make in EXAMPLES], capability).items():
                assert isinstance(kernel, CompiledKernel), kernel
                made[name, dtype, capability] = kernel
    return made


def widths(text: str, instruction: str) -> set[int]:
    """Find the widths in bits of the loads or stores of a listing."""
    found = re.findall(rf"\b{instruction}\.E((?:\.\w+)*)", text)
    return {int(next((part for part in one.split(".") if part.isdecimal()), 32)) for one in found}


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("make", EXAMPLES, ids=lambda make: make.__name__)
def test_the_catalogue_is_compiled_as_a_gpu_wants_it(
    catalogue: Mapping[Any, CompiledKernel], make: Any, dtype: int, capability: tuple[int, int]
) -> None:
    op = make(dtype)
    kernel = catalogue[op.name, dtype, capability]
    arguments = len(op.inputs) + len(op.outputs) + len(op.symbols)
    for variant in (kernel.aligned, kernel.unaligned):
        registers, stack, local = resources(variant.cubin)
        assert (variant.entry, variant.num_warps, stack, local) == (op.name, 4, 0, 0)
        assert variant.cubin.startswith(b"\x7fELF")
        assert 0 < registers <= 128
        assert arguments < variant.parameters <= arguments + TRAILING_NULLS
    aligned = disassembled(kernel.aligned.cubin)
    assert re.search(rf"(sm_|EF_CUDA_SM){10 * capability[0] + capability[1]}(?!\d)", aligned)
    assert not re.search(r"\b(LDL|STL)\b", aligned)
    assert max(widths(aligned, "LDG")) >= 128
    assert max(widths(aligned, "STG")) >= 128
    if make is not layer_norm:  # whose second output is one number
        assert min(widths(aligned, "LDG")) >= 128
        assert min(widths(aligned, "STG")) >= 128
    assert max(widths(disassembled(kernel.unaligned.cubin), "LDG")) <= 32


@needs_triton
def test_a_transposed_tile_and_a_sum_take_shared_memory(catalogue: Mapping[Any, CompiledKernel]) -> None:
    shared = {name: catalogue[name, FLOAT, (9, 0)].aligned.shared for name in ("gelu", "layer_norm", "transpose")}
    assert shared["gelu"] == 0
    assert 16 <= shared["layer_norm"] <= 64  # a number a warp
    assert shared["transpose"] >= 64 * 64 * 4


@needs_triton
def test_the_number_of_warps_is_the_operator_s() -> None:
    assert compiled(dataclasses.replace(gelu(FLOAT), num_warps=8)).aligned.num_warps == 8


ELEMENTS = {1: 4, 2: 1, 3: 1, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}


@needs_triton
def test_every_element_type_is_loaded_by_its_size() -> None:
    source = """
import triton
import triton.language as tl


@triton.jit
def copy_TYPE(in0, out0, s0):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out0 + i, tl.load(in0 + i, i < s0), i < s0)
"""
    ops = [
        FusedOp(
            f"copy_{dtype}",
            (dtype,),
            (FusedOutput(dtype, (Size(1, (0,)),)),),
            ((0, 0),),
            Size(1, (0,)),
            128,
            source.replace("TYPE", str(dtype)),
        )
        for dtype in ELEMENTS
    ]
    for (dtype, size), kernel in zip(ELEMENTS.items(), compile_kernels(ops, (9, 0)).values(), strict=True):
        assert isinstance(kernel, CompiledKernel), kernel
        text = disassembled(kernel.unaligned.cubin)
        kind = {1: r"(U8|S8)", 2: "U16", 4: "", 8: "64"}[size]
        assert re.search(rf"\bLDG\.E{rf'[.]{kind}' if kind else ''} ", text), (dtype, text)


@needs_triton
def test_compiled_kernels_are_read_from_disk(asked: list[str], tmp_path: Path) -> None:
    folder, store = files(tmp_path)
    first = compile_kernels([gelu(FLOAT), transpose(FLOAT)], (9, 0), store)
    assert asked == ["gelu", "transpose"]
    assert len(folder.entries()) == 2
    asked.clear()
    assert compile_kernels([transpose(FLOAT), gelu(FLOAT)], (9, 0), store) == first
    assert asked == []


@needs_triton
def test_a_kernels_key_changes_with_everything_it_is_compiled_for(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files(tmp_path)[1]
    op = gelu(FLOAT)
    compiled(op, (9, 0), store)
    others: list[tuple[FusedOp, tuple[int, int]]] = [
        (op, (8, 0)),
        (gelu(FLOAT, columns=2048), (9, 0)),
        (dataclasses.replace(op, num_warps=8), (9, 0)),
        (dataclasses.replace(op, inputs=(BFLOAT16,)), (9, 0)),
    ]
    for other, capability in others:
        compiled(other, capability, store)
    assert asked == ["gelu"] * 5
    monkeypatch.setattr(kernel_compiler, "triton_version", lambda: "0.0")
    compiled(op, (9, 0), store)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "none"))
    compiled(op, (9, 0), store)
    assert asked == ["gelu"] * 7


@needs_triton
@pytest.mark.parametrize("damage", ["cut", "bit", "head", "another's"])
def test_a_damaged_file_is_compiled_anew(damage: str, asked: list[str], tmp_path: Path) -> None:
    folder, store = files(tmp_path)
    first = compiled(gelu(FLOAT), store=store)
    [entry] = folder.entries()
    data = bytearray(entry.path.read_bytes())
    match damage:
        case "cut":
            del data[-1:]
        case "bit":
            data[-100] ^= 1
        case "head":
            data[0] ^= 1
        case "another's":
            compiled(transpose(FLOAT), store=store)
            [other] = [one for one in folder.entries() if one.key != entry.key]
            data = bytearray(other.path.read_bytes())
    entry.path.write_bytes(data)
    asked.clear()
    assert compiled(gelu(FLOAT), store=store) == first
    assert asked == ["gelu"]
    assert compiled(gelu(FLOAT), store=store) == first
    assert asked == ["gelu"]


@needs_triton
def test_a_folder_that_others_write_is_not_read(
    asked: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, store = files(tmp_path)
    compiled(gelu(FLOAT), store=store)
    folder.path.chmod(0o777)
    compiled(gelu(FLOAT), store=store)
    assert asked == ["gelu"] * 2
    assert "can be written by other users" in caplog.text


@needs_triton
def test_a_failing_kernel_gives_its_reason_alone() -> None:
    wrong = dataclasses.replace(add_bias(FLOAT), source=add_bias(FLOAT).source.replace("x + b", "x + tl.arange(0, 7)"))
    unchecked = dataclasses.replace(transpose(FLOAT), source="import os")
    odd = dataclasses.replace(layer_norm(FLOAT), inputs=(8,))
    few = dataclasses.replace(gelu(BFLOAT16), name="few", inputs=(1, 1), source=gelu(1).source.replace("gelu", "few"))
    found = compile_kernels([wrong, gelu(FLOAT), unchecked, odd, few], (9, 0))
    assert isinstance(found["gelu"], CompiledKernel)
    assert re.match(r"Triton does not compile it: CompilationError: .*power of 2", str(found["add_bias"]), re.DOTALL)
    assert found["transpose"] == "its source is not compiled: the module is not the three imports and one function"
    assert found["layer_norm"] == "its source is not compiled: Triton has no tensors of ONNX's element type 8"
    assert found["few"] == "its source is not compiled: the function has 3 parameters, the operator 4"


@needs_triton
def test_an_architecture_that_triton_does_not_know_is_a_reason() -> None:
    assert str(compile_kernels([gelu(FLOAT)], (99, 9))["gelu"]).startswith("Triton does not compile it: ")


@needs_triton
def test_the_users_triton_variables_change_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled(gelu(FLOAT))
    triton_workers._close_all()
    for name in ("TRITON_INTERPRET", "TRITON_DISABLE_FP_FUSION", "DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert compiled(gelu(FLOAT)) == plain
    assert not (tmp_path / "triton").exists()


BOOLEANS = """
import triton
import triton.language as tl


@triton.jit
def masked(in0, in1, out0, s0):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    m = i < s0 * 16
    kept = tl.load(in1 + i, m, other=0) != 0
    tl.store(out0 + i, tl.where(kept, tl.load(in0 + i, m, other=0.0), float("-inf")), m)
"""


@needs_triton
def test_masks_are_read_byte_by_byte() -> None:
    rows = Size(1, (0,))
    op = FusedOp("masked", (1, BOOL), (FusedOutput(1, (rows, Size(16))),), ((0, 0),), rows * Size(16), 1024, BOOLEANS)
    kernel = compiled(op)
    assert widths(disassembled(kernel.aligned.cubin), "LDG") == {64, 128}


DIFFERENCE = """
import triton
import triton.language as tl


@triton.jit
def difference(in0, in1, out0):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(in0 + i)
    y = tl.load(in1 + i)
    tl.store(out0 + i, x * x - y * y)
"""


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
def test_a_product_is_rounded_before_it_is_subtracted(capability: tuple[int, int]) -> None:
    # One fused operation gives the difference of equal squares as an error of rounding, whose square root may be NaN.
    output = FusedOutput(FLOAT, (Size(1024),))
    op = FusedOp("difference", (FLOAT, FLOAT), (output,), (), Size(1024), 1024, DIFFERENCE)
    listing = disassembled(compiled(op, capability).aligned.cubin)
    assert re.search(r"\bFMUL", listing)
    assert not re.search(r"\bFFMA", listing)


@needs_triton
@pytest.mark.parametrize("function", ["sin", "tanh", "erf", "log1p"])
def test_functions_keep_subnormal_numbers(function: str) -> None:
    source = f"""
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def each(in0, out0):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out0 + i, libdevice.{function}(tl.load(in0 + i)))
"""
    op = FusedOp("each", (FLOAT,), (FusedOutput(FLOAT, (Size(1024),)),), (), Size(1024), 1024, source)
    listing = disassembled(compiled(op).aligned.cubin)
    assert re.search(r"\bFFMA", listing)
    assert not re.search(r"\bF(FMA|MUL|ADD|SETP)\S*\.FTZ", listing)


def test_without_triton_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compile_kernels([gelu(FLOAT)], (9, 0)) == {"gelu": "Triton is not installed"}


def test_a_triton_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '7.1'\nraise ImportError('no libtriton')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert triton_version() == "7.1"
    triton_workers._close_all()
    assert compile_kernels([gelu(FLOAT)], (9, 0)) == {"gelu": "Triton does not compile it: ImportError: no libtriton"}
    triton_workers._close_all()


def test_no_operators_are_no_work() -> None:
    assert compile_kernels([], (9, 0)) == {}
