"""The modules that a part of a graph covers, named in a few words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx import Graph, Node

import ort_dynamo
from ort_dynamo.graph.source_line import covered_modules, user_line


def nodes(*paths: str | None) -> list[Node]:
    """One node of each module, None for outside of all modules; the path "" is the model's."""
    graph = Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(torch.ops.aten.neg.default, (x,)) for _ in paths]
    for node, path in zip(made, paths, strict=True):
        if path is not None:
            here = f"L['self'].{path}".removesuffix(".") if not path.startswith("G[") else path
            node.meta["nn_module_stack"] = {"self": ("L['self']", "app.Net"), "inner": (here, "torch.nn.Linear")}
    return list(graph.nodes)


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (["layers.0.up", "layers.0.down", "layers.1.up", "layers.2.up"], "layers.0 to layers.2"),
        (["layers.2.up", "layers.1.up", "layers.0.up"], "layers.2 to layers.0"),
        (["layers.0.up", "layers.1.up"], "layers.0, layers.1"),
        (["layers.0.up", "layers.0", "layers.0.down"], "layers.0.up, layers.0.down"),
        (["layers.0.up", "layers.0.up"], "layers.0.up"),
        (["embedding", "h.0.attn", "h.1.attn", None, "head"], "embedding to head"),
        (["", "norm", None], "norm"),
        (["", None], "Linear"),
        (["G['net'].layers.0", "G['net'].layers.1"], "net.layers.0, net.layers.1"),
        (["__dict__['_modules']['base'].h.0", "__dict__['_modules']['base'].h.1"], "base.h.0, base.h.1"),
        ([None, None], "neg"),
        ([], ""),
    ],
)
def test_covered_modules(paths: list[str | None], named: str) -> None:
    assert covered_modules(nodes(*paths)) == named


@pytest.mark.parametrize(
    ("path", "named"),
    [(None, "(no source line: "), ("layers.0", "(no line of the program: an operator that torch's module layers.0 ")],
)
def test_a_line_of_a_front_end_of_ours_is_no_line_of_the_program(path: str | None, named: str) -> None:
    _, node = nodes(path)
    package = Path(ort_dynamo.__file__).parent
    own = f'  File "{package / "training/trainer/model_with_loss.py"}", line 106, in called\n    return self.model(x)\n'
    program = '  File "app.py", line 3, in forward\n    return -x\n'
    node.meta["stack_trace"] = program + own
    assert user_line(node) == 'File "app.py", line 3, in forward return -x'
    node.meta["stack_trace"] = own
    assert user_line(node).startswith(named)
