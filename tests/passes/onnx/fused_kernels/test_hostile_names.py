"""No text of a model gets into the source of a kernel."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from generated_graphs import GraphMaker

from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels, fused_ops
from ort_dynamo.runtime.kernels.kernel_source import checked_source

HOSTILE = [
    "__import__('os')",
    '"""',
    "tl.store(in0, 0)",
    "*/",
    "\n    pass",
    "\0",
    "\uff49n0",
    "in0",
    "#",
    "</script>",
    "a" * 999,
]


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, in which every name and remark is another one."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    names: dict[str, str] = {"": ""}

    def fresh(name: str) -> str:
        return names.setdefault(name, f"{HOSTILE[len(names) % len(HOSTILE)]} {len(names)}")

    for node in graph.node:
        node.input[:] = map(fresh, node.input)
        node.output[:] = map(fresh, node.output)
        node.name = node.doc_string = fresh(f"node {node.output[0]}")
        node.metadata_props.add(key=HOSTILE[0], value=HOSTILE[1])
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = fresh(value.name)
        value.doc_string = HOSTILE[0]
    graph.name = graph.doc_string = changed.producer_name = HOSTILE[0]
    return changed


@pytest.mark.parametrize("seed", range(6))
def test_kernels_are_the_same_by_any_names(seed: int) -> None:
    plain = GraphMaker(seed, symbolic=bool(seed % 2)).model()
    sources = []
    for proto in (plain, renamed(plain)):
        model = ir.from_proto(proto)
        FuseKernels()(model)
        ops = fused_ops(model)
        for op in ops:
            assert op.name.isascii()
            assert op.name.isidentifier()
            checked_source(op.source, op.name)
        sources.append([*ops])
    assert sources[0]
    assert sources[0] == sources[1]


@pytest.mark.parametrize("size", [*HOSTILE, "²*rows", "9" * 5000, "rows*rows*", "-1*rows", "rows*__import__('os')"])
def test_a_hostile_size_is_only_another_symbol(size: str) -> None:
    def sources(size: str) -> list[str]:
        model = ir.from_onnx_text(
            '<ir_version: 10, opset_import: ["" : 20]> g (float[rows, 2] x) => (float[rows, 2] y)'
            "{ a = Exp (x) b = Sin (a) y = Mul (b, x) }"
        )
        proto = onnx.shape_inference.infer_shapes(ir.to_proto(model))
        for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
            value.type.tensor_type.shape.dim[0].dim_param = size
        model = ir.from_proto(proto)
        FuseKernels()(model)
        return [op.source for op in fused_ops(model)]

    assert sources(size) == sources("rows") != []
