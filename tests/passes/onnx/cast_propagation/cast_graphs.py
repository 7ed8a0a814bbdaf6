"""Graphs with casts, before and after the pass."""

from __future__ import annotations

from typing import Any

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.passes.onnx import PropagateCasts
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'
NONE, INSERT, FLOOD = PropagateCastOpsStrategy
FORWARD = "g (float16[2, 3] x) => (float[3, 2] y{}) {{ {} }}"


def spelled(text: str) -> str:
    """Casts are short in the texts of graphs: `=> f16(x)` and `=> f32(x)`."""
    return text.replace("=> f16", "Cast <to = 10> ").replace("=> f32", "Cast <to = 1> ")


def check(before: str, after: str | None = None, **parameters: Any) -> None:
    """The pass turns one graph into the other; without `after`, it leaves it alone."""
    assert_rewrites(PropagateCasts(**parameters), HEADER + spelled(before), HEADER + spelled(after or before))
