"""Counts the launches of a training step on CUDA and the bytes that its kernels move, beside a floor. No device.

    python -m bench.cuda_floor ["gpt, 24 layers" …] [--scale full] [--unfused]

Each model is compiled for a recorded CUDA target, in bfloat16 autocast, and nothing runs. A node of a session, which
may be a fused kernel, counts as one launch that reads its inputs and writes its outputs once. Nodes that only change a
shape are free. Operators that torch runs by choice are counted in the same way, but not the optimizer.

The floor of a graph is its traffic if all nodes between two matmuls were one kernel: such a group reads each outside
tensor once, and writes each tensor that others read once. A sum over many rows ends a kernel, too: it is known
when all rows have been read. Times are bytes by the rate of a copy on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
from torch.fx import GraphModule, Node

from bench.cuda_graphs import arguments_of, compiled_graphs, models_of
from bench.cuda_models import COUNTED, LARGE, SMALL
from ort_dynamo.passes.fx.analysis.storage import fakes_in, storages_of
from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.targets.target import Target

__all__ = ["RATE", "Half", "Moved", "bytes_of_nodes", "halves", "main", "moved"]

RATE = 4.3e12
"""Bytes in a second that a copy moves on an H200."""

FREE = frozenset({"Constant", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze", "Flatten"})
PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Einsum", "Conv", "ConvTranspose"})

_KINDS: Mapping[str, frozenset[str]] = {
    "products": PRODUCTS,
    "casts": frozenset({"Cast"}),
    "rows": frozenset({"LayerNormalization", "LogSoftmax", "Softmax"})
    | frozenset(f"Reduce{name}" for name in ("Sum", "Mean", "Max", "Min", "SumSquare", "LogSumExp")),
    "layout": frozenset({"Concat", "Expand", "Pad", "Slice", "Split", "Tile", "Transpose"}),
    "indices": frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot"}),
}
_PARTIAL = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
"""Operators that read as much of their first input as they write."""


FEW = 16
"""Ratio of an operand's bytes to a result's from which an operator is a sum over rows or along them."""


@dataclass(frozen=True)
class Moved:
    """Launches and the bytes that they read and write."""

    launches: int = 0
    nbytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.launches + other.launches, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Half:
    """The forward or the backward graph of a step.

    Attributes:
        role: forward or backward.
        kinds: kind of node -> the bytes and launches of its nodes.
        floor: the bytes and launches of all but the matmuls, as one kernel between two of them.
        unknown: nodes without a known size, which are not counted.
    """

    role: str
    kinds: Mapping[str, Moved]
    floor: Moved
    unknown: int


def halves(name: str, scale: Any, target: Target) -> list[Half]:
    """Compile a model's training step for a CUDA target, and count its kernels; arguments as of `compiled_graphs`."""
    return [_half(role, gm) for role, gm in compiled_graphs(name, scale, target)]


def _half(role: str, gm: GraphModule) -> Half:
    kinds: dict[str, Moved] = defaultdict(Moved)
    floor, unknown = Moved(), 0
    counted: dict[bytes, tuple[dict[str, Moved], Moved, int]] = {}
    for built in models_of(gm):
        if built.model not in counted:  # equal layers share one
            counted[built.model] = moved(onnx.ModelProto.FromString(built.model))
        ours, least, lost = counted[built.model]
        for kind, one in ours.items():
            kinds[kind] += one
        floor += least
        unknown += lost
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and (nbytes := _fx_bytes(node)):
            kinds["torch's"] += Moved(1, nbytes)
    return Half(role, dict(kinds), floor, unknown)


def _fx_bytes(node: Node) -> int:
    """Bytes of a torch operator's tensors; 0 of a view, of a function that moves no data, and where there is none."""
    if getattr(node.target, "keeps_value", False) or is_remakable_view(node):
        return 0
    if storages_of(node) <= set().union(*map(storages_of, node.all_input_nodes)):
        return 0
    tensors = fakes_in([one.meta.get("val") for one in (node, *node.all_input_nodes)])
    return sum(one.numel() * one.element_size() for one in tensors)


def moved(model: onnx.ModelProto) -> tuple[dict[str, Moved], Moved, int]:
    """Count a model's launches and bytes.

    Returns:
        kind of node -> the traffic of its nodes; the floor of all but the matmuls; how many nodes have unknown sizes.
    """
    kinds: dict[str, Moved] = defaultdict(Moved)
    unknown = 0
    for node, nbytes in bytes_of_nodes(model):
        if nbytes is None:
            unknown += 1
            continue
        kind = next((kind for kind, operators in _KINDS.items() if node.op_type in operators), "arithmetic")
        kinds[kind] += Moved(1, nbytes)
    return dict(kinds), _floor(model.graph, _sizes(model)), unknown


def bytes_of_nodes(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, int | None]]:
    """Yield each node that moves data, with the bytes that it reads and writes; None if a size is unknown."""
    sizes, shapes = _sizes(model), _shapes(model)
    functions = {(one.domain, one.name): _slices(one) for one in model.functions}
    for node in model.graph.node:
        if node.op_type in FREE:
            continue
        read, written = ([name for name in names if name] for names in (node.input, node.output))
        if any(name not in sizes for name in (*read, *written)):
            yield node, None
            continue
        results = sum(sizes[name] for name in written)
        if node.op_type in _PARTIAL:
            read = read[1:]
            results *= 2
        slices = functions.get((node.domain, node.op_type), {})
        yield (
            node,
            results + sum(_read_bytes(sizes[name], shapes.get(name), slices.get(n)) for n, name in enumerate(read)),
        )


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Value -> its dimensions, as the model states them; a symbolic one is 0."""
    graph = model.graph
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


def _slices(function: onnx.FunctionProto) -> dict[int, tuple[int, int, int]]:
    """Index of an input of a fused kernel that reads one slice of it alone -> axis, start and end."""
    numbers = {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t).reshape(-1)
        for node in function.node
        if node.op_type == "Constant" and node.attribute[0].HasField("t")
    }
    found = {}
    for index, name in enumerate(function.input):
        readers = [node for node in function.node if name in node.input]
        if len(readers) == 1 and readers[0].op_type == "Slice" and len(readers[0].input) > 3:
            start, end, axis = (int(numbers[one][0]) for one in readers[0].input[1:4])
            found[index] = axis, start, end
    return found


def _read_bytes(nbytes: int, shape: Sequence[int] | None, part: tuple[int, int, int] | None) -> int:
    """The bytes that are read of a tensor, of which a slice may be all that is read."""
    if not shape or part is None or not shape[part[0]]:
        return nbytes
    axis, start, end = part
    return nbytes * (min(end, shape[axis]) - start) // shape[axis]


def _floor(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> Moved:
    """Join all nodes between two matmuls that share a tensor, and count the reads and writes of such groups."""
    source = {name: node for node in graph.node for name in node.output if name}
    plain = _without_reshapes(graph)
    level: dict[str, int] = {}
    for node in graph.node:
        before = [level[name] for name in map(plain, node.input) if name in level]
        own = max(before, default=0) + (node.op_type in PRODUCTS)
        largest = max((sizes.get(name, 0) for name in node.input), default=0)
        is_sum = node.op_type not in FREE | _PARTIAL | PRODUCTS
        level |= {name: own + (is_sum and sizes.get(name, 0) * FEW < largest) for name in node.output}
    group: dict[int, int] = {}
    members = [node for node in graph.node if node.op_type not in PRODUCTS | FREE]

    def found(one: int) -> int:
        while group.setdefault(one, one) != one:
            one = group[one]
        return one

    for node in members:
        of_node = min(level[name] for name in node.output)
        for name in map(plain, node.input):
            maker = source.get(name)
            if maker is not None and maker.op_type not in PRODUCTS | FREE and level[name] == of_node:
                group[found(id(node))] = found(id(maker))
    read: dict[int, set[str]] = defaultdict(set)
    written: dict[int, set[str]] = defaultdict(set)
    leaving = {plain(value.name) for value in graph.output}
    for node in graph.node:
        own = found(id(node)) if node.op_type not in PRODUCTS | FREE else 0
        for name in map(plain, node.input):
            maker = source.get(name)
            made_in = found(id(maker)) if maker is not None and maker.op_type not in PRODUCTS | FREE else 0
            if made_in == own or node.op_type in FREE:
                continue
            if own and name in sizes:
                read[own].add(name)
            if made_in:
                written[made_in].add(name)
    for node in members:
        written[found(id(node))] |= leaving & set(node.output)
    groups = {found(id(node)) for node in members}
    nbytes = sum(sizes.get(name, 0) for names in (*read.values(), *written.values()) for name in names)
    return Moved(len(groups), nbytes)


def _without_reshapes(graph: onnx.GraphProto) -> Callable[[str], str]:
    """Give the function from a value to the one whose memory it shows."""
    shown = {node.output[0]: node.input[0] for node in graph.node if node.op_type in FREE and node.input}

    def plain(name: str) -> str:
        while name in shown:
            name = shown[name]
        return name

    return plain


def _sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Value -> its bytes, of those with a known type and fixed sizes."""
    inferred = onnx.ModelProto()
    inferred.CopyFrom(model)
    while True:
        inferred = onnx.shape_inference.infer_shapes(inferred)
        known = {
            value.name: value.type.tensor_type
            for value in (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info)
        }
        more = {value.name: value for value in _of_contrib(inferred.graph, known)}
        if not more:
            break
        stated = [value for value in inferred.graph.value_info if value.name not in more]
        del inferred.graph.value_info[:]
        inferred.graph.value_info.extend([*stated, *more.values()])
    found = {
        tensor.name: math.prod(tensor.dims) * ir.DataType(tensor.data_type).itemsize
        for tensor in inferred.graph.initializer
    }
    for name, kind in known.items():
        dims = [one.dim_value if one.HasField("dim_value") else None for one in kind.shape.dim]
        if kind.HasField("shape") and None not in dims and kind.elem_type:
            found[name] = math.prod(one or 0 for one in dims) * ir.DataType(kind.elem_type).itemsize
    return found


def _of_contrib(graph: onnx.GraphProto, known: Mapping[str, Any]) -> Iterable[onnx.ValueInfoProto]:
    """Infer the results of com.microsoft's operators, which ONNX's inference does not know."""
    for node in graph.node:
        if node.domain != "com.microsoft" or (node.output[0] in known and known[node.output[0]].HasField("shape")):
            continue
        operands = [known.get(name) for name in node.input]
        if any(one is None or not one.HasField("shape") for one in operands):
            continue
        shapes = [[dim.dim_value for dim in one.shape.dim] for one in operands if one is not None]
        shape = _product(node, *shapes[:2]) if node.op_type == "FusedMatMul" else shapes[0]
        yield onnx.helper.make_tensor_value_info(node.output[0], known[node.input[0]].elem_type, shape)


def _product(node: onnx.NodeProto, a: list[int], b: list[int]) -> list[int]:
    given = {attribute.name: attribute.i for attribute in node.attribute}
    rows, columns = (a[-1] if given.get("transA") else a[-2]), (b[-2] if given.get("transB") else b[-1])
    batch = max(a[:-2], b[:-2], key=len)
    return [*batch, rows, columns]


def rows(name: str, found: Sequence[Half]) -> Iterator[str]:
    """Give the lines of a table: launches, GB and milliseconds of each kind, and of the floor."""
    for half in found:
        for kind, one in sorted(half.kinds.items(), key=lambda item: -item[1].nbytes):
            yield _row(name, half.role, kind, one)
        others = sum((one for kind, one in half.kinds.items() if kind not in ("products", "torch's")), Moved())
        yield _row(name, half.role, "all but products and torch's", others)
        yield _row(name, half.role, "**floor of these**", half.floor)
        if half.unknown:
            yield f"| {name} | {half.role} | nodes of unknown size | {half.unknown} | | |"


def _row(name: str, role: str, kind: str, one: Moved) -> str:
    return f"| {name} | {role} | {kind} | {one.launches} | {one.nbytes / 1e9:.2f} | {one.nbytes / RATE * 1e3:.2f} |"


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="full", choices=["tiny", "full"])
    parser.add_argument("--unfused", action="store_true", help="without kernels of ours")
    arguments, recorded = arguments_of(parser, [*LARGE, *COUNTED, *SMALL], given)
    target = dataclasses.replace(recorded, fuses_kernels=not arguments.unfused)
    print("| model | graph | kernels | launches | GB | ms |\n|---|---|---|---|---|---|")
    for name in arguments.names:
        print(*rows(name, halves(name, arguments.scale, target)), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
