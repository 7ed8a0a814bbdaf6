"""The program's names for the inputs of one of Dynamo's graphs, and for its nodes."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from ort_dynamo.graph.marks import READABLE, SCOPE, WRITTEN_FOR
from ort_dynamo.graph.source_line import innermost_module
from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames, utf8
from ort_dynamo.torch_internals.tracing.frames import current_compile_id
from ort_dynamo.torch_internals.tracing.program import (
    function_name,
    keywords_name,
    locals_under_trace,
    positionals_name,
    source_of,
    spell_input,
    spell_outputs,
)

__all__ = ["Program", "name_nodes", "output_names", "read_program"]


@dataclass(frozen=True)
class Program:
    """One function of the program, as Dynamo traces it.

    Attributes:
        name: the class of the module that all its parameters are in, or the function's name.
        inputs: a name for each input of Dynamo's graph. A parameter or buffer has its name in `state_dict()`. An
            argument has its name and the path in it, such as "batch.input_ids"; one in `**kwargs` has its keyword.
        compile_id: torch's name for the compile, such as "0/1".
        aliases: input -> other names of the same parameter or buffer, such as those of tied weights.
    """

    name: str
    inputs: tuple[str, ...]
    compile_id: str | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_TEXT = r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_STEP = re.compile(rf"(?:\[|, ){_TEXT}[\])]|\[(?P<key>[^'\"\]]*)\]|\.(?P<attribute>\w+)")
"""One step of Dynamo's expression for an input. A text in it is written as Python writes it, with escapes."""
_HOLDERS = {"_modules", "_parameters", "_buffers"}
_ATTRIBUTES = "__dict__"
"""Names by which Dynamo reads the parts of a module after the function has set an attribute of it."""


def read_program(gm: GraphModule, inputs: Sequence[Any]) -> Program:
    """Find the program's names for the inputs of Dynamo's graph, while Dynamo traces it.

    A parameter is named relative to the module through which the traced function reaches it. After a graph break that
    is the module whose forward begins there. If there are two such modules, names begin with the function's names for
    them.

    Args:
        gm: Dynamo's graph.
        inputs: its inputs; names of tied weights are found only if they are the parameters themselves.
    """
    found = [_steps(source_of(node) or node.name) for node in gm.graph.find_nodes(op="placeholder")]
    roots = dict.fromkeys(root for root, _ in found if root is not None)
    unique = UniqueNames()
    keywords = keywords_name()
    module = _module(locals_under_trace(), *roots)
    found = [(root, _passed_on(steps, module) if root is None else steps) for root, steps in found]
    spelt = [_input_name(root, steps, keywords, len(roots) > 1) for root, steps in found]
    known = {} if module is None else _names_of_tensors(module)
    names = tuple(map(unique.fresh, _known_names(spelt, inputs, known)))
    compile_id = current_compile_id()
    if module is None:
        return Program(function_name() or "graph", names, compile_id)
    return Program(type(module).__name__, names, compile_id, _aliases(known, names, inputs))


def _steps(source: str) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Give the way to the module that holds a parameter or buffer, or None if it is no such; and the way from there."""
    found = map(_step, _STEP.finditer(source))
    steps = tuple(step for step in found if step != _ATTRIBUTES) or (source,)
    holder = next((index for index, step in enumerate(steps) if step in _HOLDERS), None)
    if holder is None:
        return None, steps
    return steps[:holder], tuple(step for step in steps[holder:] if step not in _HOLDERS)


def _step(match: re.Match[str]) -> str:
    if match["text"] is not None:
        return str(ast.literal_eval(match["text"]))
    return match["key"] or match["attribute"] or "0"


def _passed_on(steps: tuple[str, ...], module: nn.Module | None) -> tuple[str, ...]:
    """Return the path of an argument that a function of `*args` passes on to a module, by the module's name for it."""
    if module is None or len(steps) < 2 or steps[0] != positionals_name():
        return steps
    parameters = list(inspect.signature(module.forward).parameters.values())
    index = int(steps[1])
    if index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL:
        return (parameters[index].name, *steps[2:])
    return steps


def _input_name(root: tuple[str, ...] | None, steps: tuple[str, ...], keywords: str | None, with_root: bool) -> str:
    if root is None:
        return ".".join(steps[1:] if len(steps) > 1 and steps[0] == keywords else steps)
    return ".".join((*root, *steps) if with_root else steps)


def _module(values: Mapping[str, Any], *ways: Sequence[str]) -> nn.Module | None:
    """Return the one module that holds all parameters; where there are none, the one whose method the function is."""
    ways = ways or (("self",),)
    found = values.get(ways[0][0]) if len(ways) == len(ways[0]) == 1 else None
    return found if isinstance(found, nn.Module) else None


def _names_of_tensors(module: nn.Module) -> dict[int, list[str]]:
    """Give all names that a module has for each of its parameters and buffers, by id."""
    every: dict[int, list[str]] = {}
    for holds in (module.named_parameters, module.named_buffers):
        for name, tensor in holds(remove_duplicate=False):
            every.setdefault(id(tensor), []).append(name)
    return every


def _known_names(names: Sequence[str], inputs: Sequence[Any], known: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield the module's own name of an input that Dynamo reaches another way, such as through a wrapper's closure."""
    for name, value in itertools.zip_longest(names, inputs[: len(names)]):
        own = known.get(id(value), (name,))
        yield name if name in own else own[0]


def _aliases(
    known: Mapping[int, Sequence[str]], names: Sequence[str], inputs: Sequence[Any]
) -> dict[str, tuple[str, ...]]:
    others = {name: known.get(id(value), []) for name, value in zip(names, inputs, strict=False)}
    return {name: tuple(o for o in found if o != name) for name, found in others.items() if len(found) > 1}


def name_nodes(gm: GraphModule, program: Program, saved: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give each node of a graph a name that people can read, in its meta under READABLE, and return all by node name.

    Inputs and outputs have the program's names. Other nodes have their module and their own name, such as
    "layers.3.mlp/mm_1". Names of nodes outside of all modules begin with the program's name.

    Args:
        gm: a graph of AOTAutograd, forward or backward after the partition.
        program: the names of the function that it comes from.
        saved: the names of the forward's nodes that are inputs of the backward.
    """
    gm.meta[WRITTEN_FOR] = f"{program.name} {program.compile_id}"
    unique = UniqueNames()
    names: dict[str, str] = {}

    def put(node: Node, name: str) -> None:
        names[node.name] = node.meta[READABLE] = unique.fresh(name)

    for node in gm.graph.nodes:
        node.meta[SCOPE] = (innermost_module(node) or ("",))[0] or program.name
    for node in gm.graph.find_nodes(op="placeholder"):
        put(node, spell_input(node, program.inputs) or (saved or {}).get(node.name) or _placed(node))
    (output,) = gm.graph.find_nodes(op="output")
    for node, name in zip(output.args[0], spell_outputs(output, program.inputs), strict=True):
        if isinstance(node, Node) and name is not None and node.name not in names:
            put(node, name)
    for node in gm.graph.nodes:
        if node.op != "output" and node.name not in names:
            put(node, _placed(node))
    return names


def output_names(gm: GraphModule, program: Program) -> tuple[str | None, ...]:
    """Give the program's names for the outputs of such a graph, in order; of saved tensors, those that they have here.

    A value that is two outputs, or an input as well, has one name of its own, and may have another here.
    """
    (output,) = gm.graph.find_nodes(op="output")
    spelled = zip(output.args[0], spell_outputs(output, program.inputs), strict=True)
    return tuple(_saved_name(node) if name is None else utf8(name) for node, name in spelled)


def _saved_name(value: Any) -> str | None:
    return str(value.meta[READABLE]) if isinstance(value, Node) else None


def _placed(node: Node) -> str:
    return f"{node.meta[SCOPE]}/{node.name}"
