"""FX graphs as short texts, and the check that a pass turns one text into another.

    x: f32[2, 3]
    mm = aten.mm.default(x, x)  # f32[2, 2]
    relu = aten.relu.default(mm)  # f32[2, 2] | MUST_RECOMPUTE
    return relu

A line is a call, its dtype and sizes, the strides of a tensor that is not contiguous, and the marks that passes have
written on the node; the rest of a long line is the next line, indented. Names are the operators', numbered in the order
of the lines.
"""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.graph.marks import DECIDED_BY, HALF, READABLE, RECOMPUTE, SCOPE, WHOLE_NODE
from ort_dynamo.passes.fx.analysis.fake_values import add_call
from ort_dynamo.passes.running import run_passes
from ort_dynamo.testing import Tolerance, assert_close
from ort_dynamo.torch_internals.fakes import FakeTensorMode
from ort_dynamo.torch_internals.kernels.operators import OpOverload, namespace
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = ["EXACT", "assert_fx_rewrites", "assert_fx_untouched", "graph_of", "graph_text", "unwrapped"]

EXACT = Tolerance(0.0, 0.0)

_DTYPES = {
    **{f"f{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"c{bits}": getattr(torch, f"complex{bits}") for bits in (64, 128)},
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PREFIX = "ort_dynamo."
_USUAL = (("device", torch.device("cpu")), ("pin_memory", False), ("layout", torch.strided))
"""Keywords that a text leaves out."""

_WIDTH = 100

_HIDDEN = {DECIDED_BY, READABLE, SCOPE, WHOLE_NODE}
"""Marks that repeat the pass's name, or say nothing of the computation."""


def assert_fx_rewrites(
    pass_: PassBase,
    before: str,
    after: str,
    gm: GraphModule | None = None,
    *,
    tolerance: Tolerance = EXACT,
    inputs: Sequence[torch.Tensor] | None = None,
    run: bool = True,
) -> GraphModule:
    """Check that a pass turns the graph of text `before` into the graph of text `after`.

    Args:
        pass_: the pass.
        before: the graph before.
        after: the graph after.
        gm: the graph of `before`, if a text cannot make it: a traced graph, or one with submodules.
        tolerance: the tolerance of the results, for passes that reorder arithmetic.
        inputs: example inputs; None for random ones, which a graph of symbolic sizes cannot have.
        run: compute both graphs and compare the results and the inputs after the call.

    Returns:
        The graph after the pass.

    The pass must report `modified` exactly if the texts differ. A second run must change nothing. The graph must be
    valid, with the fake values, outputs and aliases that `run_passes` checks.

    Raises:
        AssertionError: with both texts.
    """
    before, after = map(unwrapped, (before, after))
    gm = graph_of(before) if gm is None else gm
    _assert_text(gm, before, "the graph is")
    given = (_inputs(gm) if inputs is None else inputs) if run else ()
    expected = _observed(gm, given) if run else []
    (record,) = run_passes([pass_], gm, check=True)
    _assert_text(gm, after, "the pass made")
    assert record.modified == (before != after), f"`modified` is wrong: {record.modified}"
    (again,) = run_passes([pass_], gm, check=True)
    assert not again.modified, "a second run says it changed something"
    _assert_text(gm, after, "a second run made")
    actual = _observed(gm, given) if run else []
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_close(mine, theirs, f"result {index}", tolerance)
    return gm


def assert_fx_untouched(pass_: PassBase, gm: GraphModule | str) -> GraphModule:
    """Check that a pass does not change a graph, or the graph of a text, and reports that."""
    gm = graph_of(gm) if isinstance(gm, str) else gm
    text = graph_text(gm)
    return assert_fx_rewrites(pass_, text, text, gm, run=False)


def _assert_text(gm: GraphModule, wanted: str, what: str) -> None:
    found = unwrapped(graph_text(gm))
    assert found == wanted, f"{what}\n{found}\nnot\n{wanted}"


def unwrapped(text: str) -> str:
    """Remove the common indentation, and join lines with more indentation to the line before."""
    text = re.sub(r"\n +(?=# )", "  ", textwrap.dedent(text).strip())
    return re.sub(r"\n +", " ", re.sub(r"\(\n +", "(", text))


def _inputs(gm: GraphModule) -> list[torch.Tensor]:
    """Random tensors of the sizes, strides and dtypes that the graph's inputs have; indices are 0."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        shape, strides = [[int(one) for one in of] for of in (fake.shape, fake.stride())]
        value = torch.empty_strided(shape, strides, dtype=fake.dtype).zero_()
        if fake.is_floating_point():
            value.copy_(torch.randn(shape, generator=generator))
        made.append(value)
    return made


def _observed(gm: GraphModule, inputs: Iterable[torch.Tensor]) -> list[Any]:
    """Return the results of a graph, from the same random numbers, and its inputs after the call."""
    given = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).copy_(one) for one in inputs]
    torch.manual_seed(0)
    results = Interpreter(gm).run(*given, enable_io_processing=False)  # a joint graph is called with two lists
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in tree_leaves([results, given])]


# -- from a graph to its text ------------------------------------------------------------------------------------


def graph_text(gm: GraphModule, nodes: Collection[Node] | None = None) -> str:
    """Print a graph, or some of its nodes.

    Args:
        gm: the graph.
        nodes: the nodes to print; None for all.
    """
    names: dict[Node, str] = {}
    lines = []
    counts: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        elif node.op != "output":
            base = _base(node)
            names[node] = f"{base}_{counts[base]}" if counts[base] else base
            counts[base] += 1
        if nodes is None or node in nodes:
            lines.append(_line(node, names))
    return _numbered("\n".join(lines))


def _line(node: Node, names: dict[Node, str]) -> str:
    said = list(_said(node))
    comment = f"  # {' | '.join(said)}" if said else ""
    if node.op == "placeholder":
        return f"{names[node]}: {' | '.join(said)}"
    if node.op == "output":
        return f"return {_argument(node.args[0], names)}"
    if node.op == "get_attr":
        return f"{names[node]} = self.{node.target}{comment}"
    if node.target is operator.getitem:
        container, index = (_argument(one, names) for one in node.args)
        return f"{names[node]} = {container}[{index}]{comment}"
    arguments = [_argument(one, names) for one in node.args]
    keywords = ((key, value) for key, value in node.kwargs.items() if (key, value) not in _USUAL)
    arguments += [f"{key}={_argument(value, names)}" for key, value in keywords]
    target = str(node.target) if isinstance(node.target, (OpOverload, str)) else node.target.__name__
    call = f"{names[node]} = {target}({', '.join(arguments)})"
    return call + (comment if not comment or len(call + comment) <= _WIDTH else f"\n    {comment.lstrip()}")


def _base(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target).split(".")[1]
    return node.target.strip("_") if isinstance(node.target, str) else node.target.__name__


def _argument(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_argument(one, names) for one in value)
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"({inside}{comma})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, torch.dtype):
        return _NAMES[value]
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)


def _said(node: Node) -> Iterator[str]:
    """Yield the rest of a node's line after the call: its value, and its marks in the order of their names."""
    value = node.meta.get("val")
    if value is not None and not isinstance(value, (list, tuple)):  # the lines that take out its parts say theirs
        yield _value(value)
    if RECOMPUTE in node.meta:
        yield node.meta[RECOMPUTE].name
    if node.meta.get(HALF) == "is_backward":
        yield "backward"
    for key in sorted(map(str, node.meta)):
        if key.startswith(_PREFIX) and key not in _HIDDEN:
            value = node.meta[key]
            yield key.removeprefix(_PREFIX) + ("" if value is True else f"={_mark_value(value)}")


def _mark_value(value: Any) -> str:
    """Print the value of a mark, with sets and mappings in order."""
    if isinstance(value, frozenset):
        return repr(sorted(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_argument(value[key], {})}' for key in sorted(value))}}}"
    return repr(value)


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    kind = f"{_NAMES[value.dtype]}[{', '.join(map(str, value.shape))}]"
    if value.is_contiguous():
        return kind
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return f"{kind} channels_last"
    return f"{kind} strides ({', '.join(map(str, value.stride()))})"


def _numbered(text: str) -> str:
    """Renumber symbols in the order in which a text names them; torch's numbers differ between releases."""
    seen: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda found: seen.setdefault(found[0], f"s{len(seen)}"), text)


# -- from a text to its graph ------------------------------------------------------------------------------------


def graph_of(text: str) -> GraphModule:
    """Make the graph of a text, with fake values, on the CPU; sizes are numbers, and calls are of operators."""
    graph = Graph()
    nodes: dict[str, Node] = {}
    mode = FakeTensorMode()
    for line in unwrapped(text).splitlines():
        code, _, comment = line.partition("  # ")
        if found := re.fullmatch(r"(\w+): (\w+)\[(.*?)\](.*)", code):
            name, dtype, sizes, layout = found.groups()
            nodes[name] = graph.placeholder(name)
            with mode:
                nodes[name].meta["val"] = _strided(_DTYPES[dtype], _numbers(sizes), layout)
        elif code.startswith("return "):
            graph.output(_evaluated(code.removeprefix("return "), nodes))
        else:
            name, _, call = code.partition(" = ")
            nodes[name] = _called(graph, call, nodes)
            nodes[name].meta |= dict(_mark(one) for one in comment.split(" | ") if one and "[" not in one)
    return GraphModule(torch.nn.Module(), graph)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(", "))))


def _strided(dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    if strides := re.fullmatch(r" strides \((.*)\)", layout):
        return torch.empty_strided(shape, _numbers(strides[1]), dtype=dtype)
    given = torch.empty(shape, dtype=dtype)
    return given.to(memory_format=torch.channels_last) if layout == " channels_last" else given


def _called(graph: Graph, text: str, nodes: dict[str, Node]) -> Node:
    call = ast.parse(text, mode="eval").body
    if isinstance(call, ast.Subscript):
        return add_call(graph, operator.getitem, tuple(_evaluated(one, nodes) for one in (call.value, call.slice)))
    assert isinstance(call, ast.Call), f"{text} is no call"
    space, packet, overload = ast.unparse(call.func).split(".")
    target = getattr(getattr(namespace(space), packet), overload)
    keywords = {one.arg: _evaluated(one.value, nodes) for one in call.keywords if one.arg}
    return add_call(graph, target, tuple(_evaluated(one, nodes) for one in call.args), keywords)


def _evaluated(code: str | ast.expr, nodes: dict[str, Node]) -> Any:
    text = code if isinstance(code, str) else ast.unparse(code)
    return eval(text, {"torch": torch, "inf": float("inf"), **_DTYPES, **nodes})


def _mark(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if key == "backward":
        return HALF, "is_backward"
    if key.isupper():
        return RECOMPUTE, CheckpointPolicy[key]
    return _PREFIX + key, eval(value) if value else True
