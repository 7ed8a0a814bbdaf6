"""A function's key changes with its behaviour."""

from __future__ import annotations

import enum
import functools
import importlib
import math
import operator
import re
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ort_dynamo.graph.function_key import NotKeyableError, spell_function


def define(source: str, **names: Any) -> Callable[..., Any]:
    space: dict[str, Any] = {"__name__": "mine", **names}
    exec(source, space)
    return space["f"]


def test_the_place_of_the_source_does_not_enter() -> None:
    assert spell_function(define("def f(x): return x + 1")) == spell_function(
        define("\n\n\ndef f(x):\n    return x + 1")
    )


VALUES = [
    *(None, False, True, 0, 1, 0.0, 1.0, 0j, 1j, "", "a", b"", b"a", ..., np.float64(1), np.float32(1)),
    *(np.int64(1), np.int64(2), np.uint64(1)),
    *(torch.float16, torch.device("cpu"), torch.device("cuda", 1), torch.strided, torch.sparse_coo),
    *(torch.contiguous_format, torch.channels_last, ir.DataType.FLOAT, ir.DataType.DOUBLE, re.RegexFlag.A),
    *(ir.AttributeType.FLOAT, np.array([1, 2], np.uint64)),
    *((), (1,), (1, 2), (2, 1), [], [1], [1, 2], set(), {1}, {1, 2}, {}, {1: 2}, {1: 3}, {2: 3}, torch.Size([1, 2])),
    *(np.array([1, 2]), np.array([[1, 2]]), np.array([1.0, 2.0]), np.array([1, 2], np.int32)),
]


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
        define("def f(x, *, y=3): return x + y"),
        define("def f(x):\n    class C:\n        y = c\n    return x + C.y", c=1),
        define("def f(x):\n    class C:\n        y = c\n    return x + C.y", c=2),
        define("def f(x): return (lambda: c)()", c=1),
        define("def f(x): return (lambda: c)()", c=2),
        define("def g(n): return lambda x: x + n\nf = g(1)", __name__="torch.added"),
        define("def g(n): return lambda x: x + n\nf = g(2)", __name__="torch.added"),
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
        define("def f(x): return c(x)", c=torch.ops.aten.cos.default),
        define("def f(x): return c(x)", c=torch.ops.aten.sin),
        define("def f(x): return c(x)", c=operator.neg),
        define("def f(x): return c(x)", c=operator.pow),
        define("def f(x): return c(x)", c=math.pow),
        define("def f(x): return m.c(x)", m=torch),
        define("def f(x): return m.c(x)", m=math),
        define("def f(x): return c(x)"),
        define("def f(x): return c(x)", c=int),
        define("def f(x): return c(x)", c=float),
        define("def f(): return c", c=operator),
        *(define("def f(): return c", c=value) for value in VALUES),
        *(define("def f(): return (c, 0)", c=value) for value in VALUES),
        *(define("def g(c):\n    def f(): return c\n    return f\nf = g(c)", c=value) for value in VALUES),
        define("def g(x): return x\ng.c = 1\ndef f(x): return g(x) + g.c"),
        define("def g(x): return x\ng.c = 2\ndef f(x): return g(x) + g.c"),
        define("def f(a, b): return a + b"),
        define("def f(b, a): return a + b"),
        define("def f(a, /, b): return a + b"),
        define("def f(a, *, b): return a + b"),
        define("def f(a, *b): return a"),
        define("def f(a, **b): return a"),
        define("def f(a, c): return a + c"),
        define("def f(x): return c(x)", c=torch.nn.functional.relu),
        define("def g(x): return 1\na = g\ndef f(x): return a(x) + c(x)\nc = f"),
        define("def g(x): return 1\na = g\ndef f(x): return a(x) + c(x)\nc = g"),
        functools.partial(define("def f(x, y): return x + y"), 1),
        functools.partial(define("def f(x, y): return x + y"), 2),
        functools.partial(define("def f(x, y): return x - y"), 1),
    ]
    assert len({spell_function(f) for f in functions}) == len(functions)


def test_functions_that_call_each_other_are_spelled() -> None:
    pair = "def g(x): return f(x - {n})\ndef f(x): return x and g(x)"
    assert spell_function(define(pair.format(n=1))) == spell_function(define(pair.format(n=1)))
    assert spell_function(define(pair.format(n=1))) != spell_function(define(pair.format(n=2)))


@pytest.mark.parametrize("values", [(frozenset([0, 8]), frozenset([8, 0])), (set([0, 8]), set([8, 0]))], ids=str)  # noqa: C405
def test_sets_have_no_order(values: tuple[Any, Any]) -> None:
    first, second = (spell_function(define("def f(): return c", c=value)) for value in values)
    assert first == second


@pytest.mark.parametrize(
    "module", ["numpy", "onnx", "onnx_ir", "onnxscript", "ort_dynamo", "sympy", "torch", "math", "torch.nn.functional"]
)
def test_packages_whose_versions_are_in_the_key_are_spelled_by_name(module: str) -> None:
    found = importlib.import_module(module)
    assert f"module({module})" in spell_function(define("def f(x): return m.f(x)", m=found))
    assert f"import {module}" not in spell_function(define(f"def f(x):\n    import {module}\n    return x"))


def test_python_and_numpy_enter_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    f = define("def f(x): return x + 1")
    spellings = {spell_function(f)}
    monkeypatch.setattr(np, "__version__", "another")
    spellings.add(spell_function(f))
    monkeypatch.setattr("sys.implementation", SimpleNamespace(cache_tag="another"))
    spellings.add(spell_function(f))
    assert len(spellings) == 3


def test_a_function_that_wraps_one_of_torch_is_spelled_by_its_code() -> None:
    def wrapped(number: int) -> Callable[..., Any]:
        return functools.wraps(torch.nn.functional.silu)(define(f"def f(x): return x * {number}"))

    assert spell_function(wrapped(1)) != spell_function(wrapped(2))
    first, second = (spell_function(define("def f(x): return g(x)", g=wrapped(number))) for number in (1, 2))
    assert first != second


def test_a_function_of_the_program_may_have_the_name_of_one_that_reads_files() -> None:
    one, two = (spell_function(define(f"def load(x): return x + {n}\ndef f(x): return load(x)")) for n in (1, 2))
    assert one != two


def test_numbers_of_the_system_are_spelled_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    f = define("import sys\ndef f(x): return x[: sys.maxsize]")
    before = spell_function(f)
    monkeypatch.setattr("sys.maxsize", 5)
    assert spell_function(f) != before
    assert "(3)" in spell_function(define("import sys\ndef f(x): return sys.version_info"))


Pair = namedtuple("Pair", "a b")
Color = enum.IntEnum("Color", "RED GREEN")


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, 2),
        Color.RED,
        type("Int", (int,), {})(1),
        type("Float", (float,), {})(1.0),
        type("Complex", (complex,), {})(1j),
        type("Text", (str,), {})("a"),
        type("Bytes", (bytes,), {})(b"a"),
        type("Frozen", (frozenset,), {})({1}),
        type("List", (list,), {})([1]),
        type("Set", (set,), {})({1}),
        type("Partial", (functools.partial,), {})(math.sin, 1),
        defaultdict(list, {1: 2}),
        OrderedDict({1: 2}),
        np.ma.masked_array([1, 2], [True, False]),
        np.array([None]),
        np.array([(None,)], [("a", object)])[0],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_a_derived_class_has_no_text(value: Any) -> None:
    # Its class may hold more than the class that it derives from, such as the names of a tuple's elements.
    with pytest.raises(NotKeyableError):
        spell_function(define("def f(x): return x + c.a", c=value))


@pytest.mark.parametrize(
    "function",
    [
        define("def f(x): return x + c", c=torch.ones(1)),
        define("def f(x): return x + c", c=object()),
        define("def f(x): return m.helper(x)", m=ModuleType("mine")),
        define("def f(x): return m.helper(x)", m=ModuleType("__main__")),
        define("def f(x): return g(x)", g=define("def f(x): return c", c=object(), __name__="__main__")),
        define("def f(x):\n    import mine\n    return x"),
        define("def f(x):\n    def g():\n        import mine\n    return g"),
        define("def f(x):\n    import mine.torch\n    return x"),
        define("class C: pass\ndef f(x): return C()"),
        [].append,
        define("import os\ndef f(x): return x + len(os.environ)"),
        define("from os import getenv\ndef f(x): return getenv('A')"),
        define("import sys\ndef f(x): return sys.modules['mine'].c"),
        define("import time\ndef f(x): return time.time()"),
        define("def f(x): return globals()['c']"),
        define("def f(x): return open(x)"),
        define("def f(x): return c(x)", c=open),
        define("def f(x):\n    import os\n    return x"),
        define("def f(x): return m.g(x)", m=ModuleType("string")),
        define("import numpy as np\ndef f(x): return np.load(x)"),
        define("from torch import load\ndef f(x): return load(x)"),
        define("import builtins\ndef f(x): return builtins.open(x)"),
    ],
    ids=[
        "tensor",
        "object",
        "module",
        "program",
        "its function",
        "import",
        "nested import",
        "import below",
        "class",
        "bound method",
        "environment",
        "a variable of the environment",
        "table of modules",
        "clock",
        "globals",
        "file",
        "file by another name",
        "import of state",
        "file of the name of a module of Python",
        "array in a file",
        "tensors in a file",
        "open of builtins",
    ],
)
def test_function_that_cannot_be_serialized_has_no_key(function: Callable[..., Any]) -> None:
    with pytest.raises(NotKeyableError):
        spell_function(function)
