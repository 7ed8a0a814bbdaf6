"""Writes the Python of an outer graph: torch's calls around the sessions, each step by its cheapest spelling.

For tiny graphs the way to an operator is most of its cost: `x.detach()` takes a quarter of the time of
`torch.ops.aten.detach.default(x)`, and both are the same call of torch's dispatcher.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.kernels.dropout_mask import DROPOUT_MASK, dropout_mask
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, without_wrapper

__all__ = ["IslandCall", "outer_code", "run_name"]


@dataclass(frozen=True)
class IslandCall:
    """The parts of a call of an island.

    Attributes:
        run: the function from the island's inputs to a tuple of its outputs.
        outputs: the number of outputs.
        stopped: the exception class of `run` if ONNX Runtime stops.
        error: turns that exception into the error for the user.
        covers: the modules and the graph that the island belongs to, for profiles.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    outputs: int
    stopped: type[Exception]
    error: Callable[[Any], Exception]
    covers: str = ""


def outer_code(
    gm: GraphModule, islands: Mapping[str, IslandCall], shown: Mapping[Node, int] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Write the function that an outer graph is.

    It takes its inputs out of a list, which it empties, and forgets each value after its last use:

        def outer(given):
            primals_1, tanh, tangents_1, = given
            given.clear()
            try:
                getitem, getitem_1, = run_island_0(tangents_1, primals_1, tanh)
            except Stopped as stopped:
                raise error_of_island_0(stopped) from stopped.__cause__
            del primals_1, tanh, tangents_1
            slice_2 = getitem[4:8]
            return (getitem_1, slice_2,)

    Args:
        gm: the outer graph.
        islands: name of a submodule that is an island -> how it is called.
        shown: node -> a number. With it the function takes another argument, `show`, which it calls with the number and
            the value of each of these nodes as soon as it has that, and hands to each island.

    Returns:
        The lines, and the values that they use by name.
    """
    writer = _Writer(gm, islands, shown)
    for node in gm.graph.nodes:
        writer.write(node)
    return writer.lines, writer.values


def run_name(island: str) -> str:
    """Return the name of an island's `run` in the code."""
    return f"run_{island}"


class _Writer:
    def __init__(
        self, gm: GraphModule, islands: Mapping[str, IslandCall], shown: Mapping[Node, int] | None = None
    ) -> None:
        self.lines = ["def outer(given):" if shown is None else "def outer(given, show):"]
        self._shown = shown
        self.values: dict[str, Any] = {}
        self._gm = gm
        self._islands = islands
        self._taken = {"given", "stopped", *RESERVED, *map(run_name, islands)}
        self._names = {node: self._free(node.name) for node in gm.graph.nodes}
        self._constants: dict[int, str] = {}
        self._unpacked = {item for node in gm.graph.nodes for item in self._items(node)}
        self._last = self._last_uses()
        if inputs := gm.graph.find_nodes(op="placeholder"):
            self._add(f"{self._listed(inputs)} = given", "given.clear()")

    def write(self, node: Node) -> None:
        """Write the lines of the next node, and delete the values that no later node reads."""
        name = self._names[node]
        if node.op == "get_attr":
            self.values[name] = operator.attrgetter(str(node.target))(self._gm)
        elif node.op == "output":
            self._add(f"return {self._spell(node.args[0])}")
        elif node.op == "call_module" and node.target in self._islands:
            self._call_island(node)
        elif node.op != "placeholder" and node not in self._unpacked:
            call = self._call(node)
            self._add(f"{name} = {call}" if node.users else call)
        if self._shown is not None and node in self._shown:
            self._add(f"show({self._shown[node]}, {name})")
        if dead := self._last.get(node):
            self._add(f"del {', '.join(map(self._names.__getitem__, dead))}")

    def _add(self, *lines: str) -> None:
        self.lines += [f"    {line}" for line in lines]

    def _last_uses(self) -> dict[Node, list[Node]]:
        """Node -> the values that nothing after it reads, of those that end before the function does."""
        last: dict[Node, Node] = {}
        for node in self._gm.graph.nodes:
            for value in (node, *node.all_input_nodes):
                last[value] = node
        found: dict[Node, list[Node]] = {}
        for value, reader in last.items():
            is_variable = value.op == "placeholder" or (value.users and value.op != "get_attr")
            if is_variable and reader.op != "output" and not self._items(value):
                found.setdefault(reader, []).append(value)
        return found

    # -- calls ---------------------------------------------------------------------------------------------------

    def _items(self, node: Node) -> list[Node]:
        """Return the getitem nodes of an island's results, in order, if each has one and nothing else reads it."""
        if node.op != "call_module" or node.target not in self._islands:
            return []
        items: dict[Any, Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        outputs = range(self._islands[str(node.target)].outputs)
        return [items[index] for index in outputs] if len(node.users) == len(outputs) and {*items} == {*outputs} else []

    def _call_island(self, node: Node) -> None:
        name = str(node.target)
        call = self._islands[name]
        run = run_name(name)  # of its own even where islands share a session: a profile tells them apart
        self.values[run] = call.run
        stopped, error = self._constant(call.stopped, "Stopped"), self._constant(call.error, f"error_of_{name}")
        items = self._items(node)
        arguments = [*([] if self._shown is None else ["show"]), *map(self._spell, node.args)]
        self._add(
            "try:",
            f"    {self._listed(items) or self._names[node]} = {run}({', '.join(arguments)})",
            f"except {stopped} as stopped:",
            f"    raise {error}(stopped) from stopped.__cause__",
        )

    def _call(self, node: Node) -> str:
        arguments = [self._spell(argument) for argument in node.args]
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if method := self._method(node):
            return method
        arguments += [
            f"{name}={self._spell(argument)}" if _is_name(name) else f"**{{{name!r}: {self._spell(argument)}}}"
            for name, argument in node.kwargs.items()
        ]
        if node.op == "call_method":
            method = f".{node.target}" if _is_name(str(node.target)) else f".__getattribute__({str(node.target)!r})"
            return f"{arguments[0]}{method}({', '.join(arguments[1:])})"
        function: Any = node.target
        if node.op == "call_module":
            function = self._gm.get_submodule(str(node.target))
        elif isinstance(function, OpOverload):
            function = dropout_mask if function is DROPOUT_MASK else without_wrapper(function)
        return f"{self._constant(function, _name_of(node.target))}({', '.join(arguments)})"

    def _method(self, node: Node) -> str | None:
        """Return the call as one of a tensor's method, or as an index, where there is one for it."""
        if node.kwargs or not (node.args and isinstance(node.args[0], Node)):
            return None
        tensor, *rest = node.args
        if node.target is aten.slice.Tensor and len(rest) == 3 and rest[0] == 0:
            return f"{self._spell(tensor)}[{self._spell(rest[1])}:{self._spell(rest[2])}]"
        if node.target not in _METHODS:
            return None
        if len(rest) == 1 and isinstance(rest[0], (list, tuple)) and rest[0]:
            rest = list(rest[0])  # separate names are faster than a list
        return f"{self._spell(tensor)}.{_METHODS[node.target]}({', '.join(map(self._spell, rest))})"

    # -- names and values ----------------------------------------------------------------------------------------

    def _free(self, name: str) -> str:
        """Return a name of the code that nothing has: the given one, or one like it."""
        name = name if _is_name(name) else "value"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _listed(self, nodes: Iterable[Node]) -> str:
        return " ".join(f"{self._names[node]}," for node in nodes)

    def _spell(self, value: Any) -> str:
        match value:
            case Node():
                return self._names[value]
            case tuple():
                return f"({' '.join(f'{self._spell(one)},' for one in value)})"
            case list():
                return f"[{', '.join(map(self._spell, value))}]"
            case dict():
                return f"{{{', '.join(f'{key!r}: {self._spell(one)}' for key, one in value.items())}}}"
            case slice():
                return f"slice({self._spell(value.start)}, {self._spell(value.stop)}, {self._spell(value.step)})"
        if type(value) in (bool, int, str, type(None)) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._constant(value, type(value).__name__)

    def _constant(self, value: Any, name: str) -> str:
        """Return the name in the code of a value that cannot be written as source."""
        if id(value) not in self._constants:
            name = self._free(name)
            self._constants[id(value)], self.values[name] = name, value  # held, so that no other has its id
        return self._constants[id(value)]


def _name_of(target: Any) -> str:
    name = str(target) if isinstance(target, (OpOverload, str)) else getattr(target, "__name__", "")
    name = name.replace(".", "_")
    return name if _is_name(name) else "function"


def _is_name(text: str) -> bool:
    """Check whether a text is a name in Python's code, and the same name there: Python replaces some letters."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


RESERVED = frozenset(dir(builtins)) | {
    *keyword.kwlist,
    *("DUAL_LEVEL", "in_spans", "in_torch", "note_run", "outer", "profiler", "results", "sees_calls", "show"),
    *("transform_level", "unusual", "watches"),
}
"""Names that no value of a graph has: Python's, and those of lines that are added to these."""

_METHODS = {
    aten.clone.default: "clone",
    aten.detach.default: "detach",
    aten.expand.default: "expand",
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.select.int: "select",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.view.default: "view",
}
"""Overload without keywords -> the method that is the same call."""
