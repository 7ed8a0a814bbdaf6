"""Writes the stages of a small model into docs/internals/pipeline.md: `python docs/stages.py`.

A comment `<!-- stage: NAME -->` on that page stands before each block. `python docs/stages.py --check` writes nothing
and fails if a block is out of date.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch.fx import GraphModule
from torch.nn import functional as F

os.environ["ORT_DYNAMO_CACHE"] = "0"

from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.fx_testing import graph_text
from ort_dynamo.options.groups import parse_options
from ort_dynamo.runtime import boxed, session_code

PAGE = Path(__file__).resolve().parent / "internals/pipeline.md"


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the model of the page."""
    return F.dropout(F.relu(F.linear(x, weight, bias)), 0.5)


class Watch(Listener):
    """Keeps the graphs and models of a compile.

    Attributes:
        graphs: "forward" and "backward" -> the graph after the cut.
        outer: role -> the text of the outer graph.
        islands: role -> the texts of its islands.
        models: (role, stage) -> the ONNX model of the last island at that stage.
    """

    def __init__(self) -> None:
        self.graphs: dict[str, GraphModule] = {}
        self.outer: dict[str, str] = {}
        self.islands: dict[str, list[str]] = {}
        self.models: dict[tuple[str, str], onnx.ModelProto] = {}

    def cut(self, graphs: Mapping[str, GraphModule], partition: object) -> None:
        """Keep the graphs."""
        self.graphs |= graphs

    def segmented(self, graph: GraphCompilation) -> None:
        """Keep the texts of the outer graph and of its islands."""
        self.outer[graph.role] = text(graph.segmented.gm)
        self.islands[graph.role] = [text(island) for island in graph.segmented.islands.values()]

    def built(self, stage: Any) -> None:
        """Keep the models."""
        self.models[stage.name.split("-")[0], stage.stage] = onnx.load_from_string(stage.serialised())


def watch(
    model: Any,
    args: Sequence[torch.Tensor],
    options: Mapping[str, Any] | None = None,
    traced: dict[str, str] | None = None,
) -> Watch:
    """Compile a model with one thread, run forward and backward, and return what was seen."""
    seen = Watch()

    class Traced(Compilation):
        def partition(self, joint: GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
            if traced is not None:
                traced["joint"] = text(joint)
            return super().partition(joint, inputs, **given)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        if traced is not None:
            traced["dynamo"] = re.sub(r";  .* = None$", "", gm.code.strip(), flags=re.MULTILINE)
        return Traced(parse_options(None, options), torch.device("cpu"), 1, seen).run(gm, inputs)

    torch.manual_seed(0)
    torch.compile(model, backend=backend)(*args).sum().backward()
    torch.compiler.reset()
    return seen


def text(gm: GraphModule) -> str:
    """Return a graph as text, without the marks of segmenting."""
    return re.sub(r"( \| |\s+# )size_facts=\(\)", "", graph_text(gm))


def onnx_text(model: onnx.ModelProto) -> str:
    """Return the inputs, constants, nodes and outputs of a model."""
    lines = onnx.printer.to_text(model.graph).splitlines()
    given, results = re.sub(r"^\S+ ", "", lines[0]).split(" => ")
    constants = [f"{one.name} = {numpy_helper.to_array(one).tolist()}" for one in model.graph.initializer]
    nodes = [re.sub(r"^\s*\[[^\]]*\] ", "", line) for line in lines if re.match(r"^\s*\[", line)]
    nodes = [re.sub(r": (ints|int|float) =", " =", node) for node in nodes]
    return "\n".join([f"inputs {given}", *constants, *nodes, f"outputs {results.strip()}"])


def stages() -> dict[str, str]:
    """Name -> text of each stage."""
    traced: dict[str, str] = {}
    codes: dict[str, list[str]] = {}
    generate = session_code.generate_function

    def note(name: str, lines: list[str], values: Any) -> Any:
        codes.setdefault(name, []).append("\n".join(lines))
        return generate(name, lines, values)

    session_code.generate_function = boxed.generate_function = note
    try:
        weights = torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        seen = watch(layer, (torch.randn(4, 8), *weights), traced=traced)
    finally:
        session_code.generate_function = boxed.generate_function = generate
    return traced | {
        "forward": text(seen.graphs["forward"]),
        "backward": text(seen.graphs["backward"]),
        "outer": seen.outer["forward"],
        "island": seen.islands["forward"][0],
        "lowered": onnx_text(seen.models["forward", "lowered"]),
        "rewritten": onnx_text(seen.models["forward", "rewritten"]),
        "run": codes["run"][0],
        "called": codes["outer"][0],
    }


def written(page: str, found: Mapping[str, str]) -> str:
    """Return the page with the texts of all stages."""
    for name, block in found.items():
        page, count = re.subn(
            rf"(<!-- stage: {name} -->\n\n```\w*\n).*?^```$",
            lambda match, block=block: f"{match[1]}{block}\n```",
            page,
            flags=re.MULTILINE | re.DOTALL,
        )
        assert count == 1, f"the page has no block, or several, of the stage {name}"
    return page


if __name__ == "__main__":
    before = PAGE.read_text()
    after = written(before, stages())
    if "--check" not in sys.argv:
        PAGE.write_text(after)
    elif before != after:
        sys.exit(f"{PAGE.name} is out of date. Run python docs/stages.py.")
