"""The table of operators as Markdown."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ort_dynamo.capture.decompositions.table import decompositions
from ort_dynamo.commands.operators.probe_dtypes import gradient_overloads, taken_dtypes
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.lowering import torchlib
from ort_dynamo.lowering.registry import eager_only, find_lowering, registered
from ort_dynamo.passes.fx.hoist_random import is_random_op
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets
from ort_dynamo.torch_internals.kernels.operators import OpOverload, all_overloads, can_decompose, schema_of

__all__ = ["Row", "names", "page", "rows"]

_HEAD = """\
# Operators

This table has every ATen operator that can be in a captured graph, and says what runs it. Find one by name:

```
python -m ort_dynamo operators softmax
```

| who runs it | meaning | overloads |
|---|---|---|
| ours | ONNX Runtime, by a lowering of this project | {ours} |
| torch_lib | ONNX Runtime, by a lowering of onnxscript, which is checked | {torch_lib} |
| decomposed | AOTAutograd replaces it by other operators of this table | {decomposed} |
| random | torch, with the random numbers of eager mode; the session gets them as an input | {random} |
| eager | torch, as a fallback for this operator alone | {eager} |

On a CPU, torch also runs some operators by choice, mainly convolutions ([placement](../internals/placement.md)).

- **family**: the module of `ort_dynamo/lowering` that has the lowering.
- **dtypes**: dtypes of the tensor arguments that both tested CPU runtimes accept. A version marks dtypes that only
  that runtime accepts. `?` means that no test arguments could be generated from the schema. float16 and bfloat16 may
  be computed in float32 internally.
- **gradient**: the operators with `backward` in their name that compute the gradient. "composed": the gradient
  consists of ordinary operators. "none": there is no gradient. `?`: as above.

These operators are not listed, because a captured graph never contains them:

- in-place and `out=` variants, since a captured graph is functional;
- operators that torch decomposes by itself, and prims, which become ATen operators;
- operators for one backend or memory format, such as sparse or quantized tensors.

`python -m ort_dynamo operators --write` wrote this page with torch {torch}; do not edit it.

## Operators that ONNX Runtime cannot run

Each of these runs in eager mode as a [fallback](glossary.md); the rest of your model does not. To run one in ONNX
Runtime, [add a lowering](../internals/add_an_operator.md).

| reason | operators |
|---|---|
{in_eager}

## All operators

"""

_COLUMNS = ("overload", "family", "who runs it", "dtypes", "gradient", "notes")

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}

# Operators for one backend, layout or internal purpose, which a graph of dense tensors on CPU or CUDA does not hold.
_OTHER_PURPOSE = (
    *("cudnn", "miopen", "mkldnn", "mps", "quantize", "fake_quantize", "sparse", "segment_reduce", "q_", "int_repr"),
    *(
        "ccol_",
        "col_",
        "crow_",
        "row_",
        "indices",
        "values",
        "is_",
        "set",
        "resize",
        "hspmm",
        "copy_sparse",
        "lstm_mps",
    ),
    *("dense_dim", "dequantize", "empty_quantized", "from_file", "to_mkldnn", "to_padded", "qscheme", "slow_conv"),
    *("batch_norm_stats", "batch_norm_elemt", "batch_norm_gather", "batch_norm_backward_", "batch_norm_update"),
    *("convolution_overrideable", "convolution_backward_overrideable", "conv_depthwise3d", "hash_tensor", "sym_"),
    *(
        "lstm_mps",
        "matmul_backward",
        "linear_backward",
        "max_pool2d_backward",
        "slice_inverse",
        "native_norm",
        "special_spherical",
    ),
)


class Row(NamedTuple):
    """One overload, with a field for each of the table's columns."""

    overload: str
    family: str
    how: str
    dtypes: str
    gradient: str
    notes: str


def page() -> str:
    """docs/reference/operators.md."""
    table = list(rows())
    counts = Counter(row.how for row in table)
    kinds = {kind: counts[kind] for kind in ("ours", "torch_lib", "decomposed", "random", "eager")}
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *(f"| `{row.overload}` | {' | '.join(field.replace('|', '&#124;') for field in row[1:])} |" for row in table),
    ]
    head = _HEAD.format(torch=torch.__version__.split("+")[0], in_eager="\n".join(_in_eager(table)), **kinds)
    return head + "\n".join(lines) + "\n"


def _in_eager(table: Iterable[Row]) -> Iterator[str]:
    """Yield the rows of the fallbacks, by their reasons; the longest comes first."""
    by_reason: dict[str, list[str]] = {}
    for row in table:
        if row.how == "eager":
            by_reason.setdefault(row.notes or "no lowering", []).append(f"`{row.overload}`")
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield f"| {reason} | {', '.join(names)} |"


def names() -> list[str]:
    """Return the names of all overloads in the table, sorted."""
    return sorted(map(str, _overloads()))


def rows(parts: Sequence[str] = (), *, fallback: bool = False) -> Iterator[Row]:
    """Yield the rows, sorted by overload.

    Args:
        parts: texts; an overload's name must contain one of them. Without any, all overloads are listed.
        fallback: list only overloads that run in eager.
    """
    for overload in sorted(_overloads(), key=str):
        if parts and not any(part in str(overload) for part in parts):
            continue
        how, notes = _how(overload)
        if fallback and how != "eager":
            continue
        native = how in ("ours", "torch_lib")
        dtypes = _dtypes(overload) if native else ""
        yield Row(str(overload), _family(overload), how, dtypes, _gradient(overload), notes)


def _overloads() -> set[OpOverload]:
    arriving = {overload for packet, overload in all_overloads("aten") if _arrives(overload, packet)}
    return arriving | registered()


def _arrives(overload: OpOverload, packet: str) -> bool:
    schema = schema_of(overload)
    if schema.is_mutable or can_decompose(overload):
        return False
    if any("generator" in part for part in (schema.overload_name,)) or packet.endswith("_copy"):
        return False
    if overload in decompositions() or torchlib.has_function(overload) or overload in torchlib.WRONG:
        return True
    return not packet.startswith(("_", *_OTHER_PURPOSE)) and bool(schema.returns)


def _how(overload: OpOverload) -> tuple[str, str]:
    if (reason := eager_only().get(overload)) is not None:
        return "eager", reason
    if is_random_op(overload):
        return "random", ""
    if (function := find_lowering(overload)) is not None:
        return "ours", _first_sentence(function)
    if overload in decompositions():
        return "decomposed", ""
    if overload in torchlib.WRONG:
        return "eager", f"torch_lib's is wrong: {torchlib.WRONG[overload]}"
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return "random", "it depends on tensor values"
    return ("torch_lib", "") if torchlib.has_function(overload) else ("eager", "")


def _family(overload: OpOverload) -> str:
    function = find_lowering(overload)
    if function is None or overload in eager_only():
        return ""
    return _inner(function).__module__.rpartition(".")[2]


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def _first_sentence(function: Callable[..., Any]) -> str:
    """Return the first sentence of the docstring after the signature that opens it."""
    _, _, rest = (inspect.getdoc(_inner(function)) or "").partition("\n\n")
    paragraph = " ".join(rest.partition("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return sentence + dot.strip()


def _dtypes(overload: OpOverload) -> str:
    targets = recorded_cpu_targets()
    taken = taken_dtypes(overload, targets)
    if taken is None:
        return "?"
    both = frozenset.intersection(*taken)
    parts = [" ".join(_SHORT[d] for d in TORCH_TO_ONNX if d in both)]
    for target, dtypes in zip(targets, taken, strict=True):
        if only := [_SHORT[d] for d in TORCH_TO_ONNX if d in dtypes - both]:
            parts.append(f"{target.version}: {' '.join(only)}")
    return "; ".join(part for part in parts if part) or "?"


def _gradient(overload: OpOverload) -> str:
    called = gradient_overloads(overload)
    if called is None:
        return "?"
    carriers = [name.removeprefix("aten.") for name in called if "backward" in name]
    return ", ".join(carriers) or ("composed" if called else "none")
