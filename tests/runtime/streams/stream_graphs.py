"""Small graphs on streams that only record calls."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
import torch

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildRecord, BuiltGraph
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.streams import SessionStream

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
NEG = "g (float[n, 4] x) => (float[n, 4] y) { y = Neg (x) }"
F = ValueSpec(torch.float32)


def built(text: str, inputs: int = 1, outputs: tuple[ValueSpec, ...] = (F,)) -> BuiltGraph:
    return BuiltGraph(
        name="test",
        model=ir.to_proto(ir.from_onnx_text(HEADER + text)).SerializeToString(),
        inputs=(F,) * inputs,
        outputs=outputs,
        session=SessionOptions().resolved(),
        dtypes=frozenset(),
        in_order=False,
        keyable=True,
        origins={},
        record=BuildRecord(0, (), {}),
    )


def on_stream(graph: BuiltGraph, stream: SessionStream) -> CompiledGraph:
    return CompiledGraph(graph, partial(open_session, graph, find_target("cpu"), CPU), CPU, stream)
