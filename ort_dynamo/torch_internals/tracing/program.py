"""The program around a graph: Dynamo's names for its inputs, and AOTAutograd's descriptions of inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node

from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "function_name",
    "keywords_name",
    "locals_under_trace",
    "positionals_name",
    "source_of",
    "spell_input",
    "spell_outputs",
]

_translator = private("torch._dynamo.symbolic_convert:InstructionTranslator")


def source_of(placeholder: Node) -> str | None:
    """Give Dynamo's expression for an input of its graph: "L['self']._modules['a']._parameters['weight']".

    L are the function's locals and G its globals. It gives None if Dynamo did not mark the placeholder.
    """
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", None)
    return str(name() if callable(name) else name) if name is not None else None  # torch up to 2.11 has a method


def locals_under_trace() -> Mapping[str, Any]:
    """Return the locals of the function that Dynamo traces, by name; none where it does not tell, or is not at work."""
    return getattr(_current(), "f_locals", None) or {}


def function_name() -> str | None:
    """Return the name of the function that Dynamo traces; None where it does not tell, or is not at work."""
    return getattr(getattr(_current(), "f_code", None), "co_name", None)


def keywords_name() -> str | None:
    """Return the name of the traced function's `**kwargs` parameter, or None."""
    return _collecting_parameter(inspect.CO_VARKEYWORDS)


def positionals_name() -> str | None:
    """Return the name of the traced function's `*args` parameter, or None."""
    return _collecting_parameter(inspect.CO_VARARGS)


def _collecting_parameter(flag: int) -> str | None:
    code = getattr(_current(), "f_code", None)
    if code is None or not code.co_flags & flag:
        return None
    index = code.co_argcount + code.co_kwonlyargcount
    if flag == inspect.CO_VARKEYWORDS:  # CPython names *args before **kwargs
        index += bool(code.co_flags & inspect.CO_VARARGS)
    return str(code.co_varnames[index])


def _current() -> Any:
    try:
        return None if _translator is None else _translator.current_tx()
    except AttributeError:  # torch's own: no translator in this thread
        return None


def spell_input(placeholder: Node, given: Sequence[str]) -> str | None:
    """Return the name of an input of AOTAutograd's graph, by its descriptor (torch's _aot_autograd/descriptors.py).

    Args:
        placeholder: a placeholder of a forward, backward or inference graph.
        given: the names of the inputs of Dynamo's graph, in order.

    Returns:
        One of `given`, or a name derived from it; for a tangent, the output's name and ".grad". None for a saved
        tensor, and without a descriptor.
    """
    return _spell(placeholder.meta.get("desc"), given)


def spell_outputs(output: Node, given: Sequence[str]) -> tuple[str | None, ...]:
    """Give the names of a graph's outputs, in order: "output_0", "weight.grad", "running_mean.updated", None if saved.

    Takes the arguments of `spell_input`, but the graph's output node.
    """
    described = output.meta.get("desc")
    values = output.args[0]
    assert isinstance(values, (tuple, list))
    if not isinstance(described, (tuple, list)) or len(described) != len(values):
        return (None,) * len(values)
    return tuple(_spell(one, given) for one in described)


_PART_OF = {"base": "", "base_of": ".base", "grad_of": ".grad", "output": ".grad", "mutated_input": ".updated"}
"""Attribute of a descriptor that holds another one -> its suffix to that one's name."""


def _spell(description: Any, given: Sequence[str]) -> str | None:
    kind = type(description).__name__
    if description is None or kind.startswith("Saved"):
        return None
    if kind == "PlainAOTInput":
        return given[description.idx] if description.idx < len(given) else None
    if kind == "PlainAOTOutput":
        return f"output_{description.idx}"
    for attribute, ending in _PART_OF.items():
        if hasattr(description, attribute):
            part = _spell(getattr(description, attribute), given)
            inner = f".{description.attr}" if hasattr(description, "attr") else ""
            return None if part is None else f"{part}{ending}{inner}"
    return str(description.target) if hasattr(description, "target") else None
