"""A function's key changes with its behaviour."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ort_dynamo.cache.function_key import NotKeyableError, spell_function


def define(source: str, **names: Any) -> Callable[..., Any]:
    space: dict[str, Any] = {"__name__": "mine", **names}
    exec(source, space)
    return space["f"]


def test_the_place_of_the_source_does_not_enter() -> None:
    assert spell_function(define("def f(x): return x + 1")) == spell_function(
        define("\n\n\ndef f(x):\n    return x + 1")
    )


def test_functions_that_do_different_things_have_different_spellings() -> None:
    functions = [
        define("def f(x): return x + 1"),
        define("def f(x): return x + 2"),
        define("def f(x): return x + 1.0"),
        define("def f(x): return x + True"),
        define("def f(x): return x - 1"),
        define("def f(x, y=1): return x + y"),
        define("def f(x, y=2): return x + y"),
        define("def f(x, *, y=2): return x + y"),
        define("def f(x): return x + c", c=1),
        define("def f(x): return x + c", c=2),
        define("def f(x): return x + c", c=-0.0),
        define("def f(x): return x + c", c=0.0),
        define("def f(x): return x + c", c=float("nan")),
        define("def f(x): return x + c", c=np.array([1, 2])),
        define("def f(x): return x + c", c=np.array([1, 3])),
        define("def f(x): return x.to(c)", c=torch.float16),
        define("def f(x): return x.to(c)", c=ir.DataType.FLOAT),
        define("def f(x): return x.to(c)", c=ir.DataType.DOUBLE),
        define("def f(x): return c[x]", c={"a": (1, 2)}),
        define("def f(x): return c[x]", c={"a": (2, 1)}),
        define("def f(x): return x.sin()"),
        define("def f(x): return x.cos()"),
        define("def f(x): return m.sin(x)", m=math),
        define("def f(x): return m.sin(x)", m=torch),
        define("def g(x): return x + 1\ndef f(x): return g(x)"),
        define("def g(x): return x + 2\ndef f(x): return g(x)"),
        define("def g(n): return lambda x: x + n\nf = g(1)"),
        define("def g(n): return lambda x: x + n\nf = g(2)"),
        functools.partial(define("def f(x, y): return x + y"), y=1),
        functools.partial(define("def f(x, y): return x + y"), y=2),
        define("def f(x):\n    try: return x\n    except ValueError: return 1"),
        define("def f(x): return (lambda y: y + 1)(x)"),
        define("def f(x): return (lambda y: y + 2)(x)"),
        define("def f(x): return c(x)", c=math.sin),
        define("def f(x): return c(x)", c=torch.ops.aten.sin.default),
    ]
    assert len({spell_function(f) for f in functions}) == len(functions)


def test_functions_that_call_each_other_are_spelled() -> None:
    pair = "def g(x): return f(x - {n})\ndef f(x): return x and g(x)"
    assert spell_function(define(pair.format(n=1))) == spell_function(define(pair.format(n=1)))
    assert spell_function(define(pair.format(n=1))) != spell_function(define(pair.format(n=2)))


@pytest.mark.parametrize(
    "function",
    [
        define("def f(x): return x + c", c=torch.ones(1)),
        define("def f(x): return x + c", c=object()),
        define("def f(x): return m.helper(x)", m=ModuleType("mine")),
        define("def f(x):\n    import mine\n    return x"),
        define("class C: pass\ndef f(x): return C()"),
        [].append,
    ],
    ids=["tensor", "object", "module", "import", "class", "bound method"],
)
def test_function_that_cannot_be_serialized_has_no_key(function: Callable[..., Any]) -> None:
    with pytest.raises(NotKeyableError):
        spell_function(function)
