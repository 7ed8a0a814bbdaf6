"""Tests of graph keys over graphs made by hand: each part of a node enters, and no name does."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import CleanDiv, FloorDiv

from ort_dynamo.graph import graph_key as graph_keys
from ort_dynamo.graph.graph_key import GraphKey, graph_key
from ort_dynamo.graph.marks import GATE, IGNORES_NAN
from ort_dynamo.torch_internals.sizes.size_guards import SIZE_FACTS, Fact

aten = torch.ops.aten
FAKES = FakeTensorMode()


def fake(*shape: int, **made: Any) -> torch.Tensor:
    with FAKES:
        return torch.empty(shape, **made)


def graph_of(
    *arguments: Any,
    target: Any = aten.add.Tensor,
    meta: dict[str, Any] | None = None,
    val: Any = None,
    returned: bool = True,
    **keywords: Any,
) -> GraphModule:
    """A graph of two inputs, x and y, and a call; "x" and "y" among its arguments are these inputs."""
    graph = Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "y")}
    for one in inputs.values():
        one.meta["val"] = fake(2, 3)
    given = [inputs[one] if one in ("x", "y") else one for one in arguments]
    node = graph.call_function(target, tuple(given), keywords)
    node.meta = {"val": fake(2, 3) if val is None else val, **(meta or {})}
    graph.output((node if returned else inputs["x"],))
    return GraphModule({}, graph)


def key(gm: GraphModule, **functions: Callable[..., Any]) -> GraphKey:
    made = graph_key(gm, functions=functions)
    assert made is not None
    return made


def assert_all_differ(graphs: list[GraphModule]) -> None:
    keys = [key(gm) for gm in graphs]
    for one, two in itertools.combinations(range(len(keys)), 2):
        assert keys[one] != keys[two], f"{graphs[one].code}\nhas the key of\n{graphs[two].code}"


CONSTANTS = [
    *(None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, 0j, 1j, "a", "b", "1"),
    *(torch.float32, torch.int64, torch.device("cpu"), torch.device("cuda", 1), torch.strided, torch.sparse_coo),
    *(torch.contiguous_format, torch.channels_last, "x", "y"),
    *((), (0,), (1,), (0, 1), (1, 0), ((0,), 1), (0, (1,))),
    *({}, {"a": 0}, {"b": 0}, {"a": 1}, {"a": 0, "b": 0}),
    *(slice(None), slice(1), slice(1, None), slice(None, None, 1), slice(1, 1), slice(1, None, 1), slice(None, 1, 1)),
]


def test_arguments_that_differ_make_keys_that_differ() -> None:
    assert_all_differ(
        [
            *(graph_of("x", one) for one in CONSTANTS),
            *(graph_of("x", other=one) for one in CONSTANTS),
            *(graph_of("x", alpha=one) for one in CONSTANTS),
            *(graph_of("x", (2, one)) for one in CONSTANTS),
            graph_of("x"),
        ]
    )


def test_keywords_have_no_order() -> None:
    assert key(graph_of("x", alpha=1, other=2)) == key(graph_of("x", other=2, alpha=1))


def test_lists_are_tuples() -> None:
    assert key(graph_of("x", [1, 2])) == key(graph_of("x", (1, 2)))


def test_operators_that_differ_make_keys_that_differ() -> None:
    targets = aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, operator.add, operator.sub, operator.pow, math.pow
    assert_all_differ([graph_of("x", "y", target=target) for target in targets])


def test_results_that_differ_make_keys_that_differ() -> None:
    values = [
        fake(2, 3),
        fake(3, 2),
        fake(3, 2).t(),
        fake(2, 4)[:, 1:],
        fake(2, 4)[:, :3],
        fake(2, 3, dtype=torch.float64),
        fake(2, 3, device="meta"),
        fake(2, 3, layout=torch.sparse_coo),
        fake(2, 4, layout=torch.sparse_coo),
        (fake(2, 3), fake(2, 3)),
        (fake(2, 3), None),
        (None, fake(2, 3)),
        1,
        1.0,
        True,
    ]
    assert_all_differ([graph_of("x", val=value) for value in values])
    assert_all_differ([graph_of("x", val=value, returned=False) for value in values])


@pytest.mark.parametrize("value", [object(), torch.nn.Identity(), b"1", {1}], ids=["object", "module", "bytes", "set"])
def test_a_graph_with_a_value_without_a_text_has_no_key(value: Any) -> None:
    assert graph_key(graph_of("x", val=(value,))) is None


def test_a_function_without_a_module_has_no_key() -> None:
    assert graph_key(graph_of("x", target=type("Callable", (), {"__call__": abs, "__name__": "f"})())) is None


def test_marks_that_lowerings_read_enter() -> None:
    marks = [{}, {GATE: True}, {IGNORES_NAN: True}, {GATE: True, IGNORES_NAN: True}]
    assert_all_differ([graph_of("x", meta=one) for one in marks])
    assert key(graph_of("x", meta={GATE: False})) == key(graph_of("x"))


def symbols(shapes: ShapeEnv | None = None, first: int = 5) -> Iterator[torch.SymInt]:
    """Sizes of one environment, each a symbol of its own; the example's values begin with `first`."""
    mode = FakeTensorMode(shape_env=shapes or ShapeEnv())
    for size in itertools.count(first):
        dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        yield mode.from_tensor(torch.empty(size), symbolic_context=dynamic).shape[0]


def test_facts_about_sizes_enter() -> None:
    sizes = symbols()
    n, m = (next(sizes).node.expr for _ in range(2))
    facts = [
        (),
        (Fact("asked", (n,), None),),
        (Fact("asked", (n,), True),),
        (Fact("asked", (n,), False),),
        (Fact("asked else", (n,), True),),
        (Fact("asked", (n + 1,), True),),
        (Fact("asked", (n, m), True),),
        (Fact("asked", (n,), True), Fact("asked", (m,), True)),
    ]
    assert_all_differ([graph_of("x", meta={SIZE_FACTS: one}) for one in facts])
    assert key(graph_of("x", meta={SIZE_FACTS: facts[1]})) == key(
        graph_of("x", meta={SIZE_FACTS: (Fact("asked", (m,), None),)})
    )


def test_scalars_that_differ_as_expressions_make_keys_that_differ() -> None:
    shapes = ShapeEnv()
    sizes = symbols(shapes)
    n, m = next(sizes), next(sizes)
    flag, scale = shapes.create_unbacked_symbool(), shapes.create_unbacked_symfloat()
    values = [n, n + 1, n * 2, n + m, n * m, n // 2, n % 2, m - n, n > 5, n >= 5, flag, scale, scale + 1.0, scale * 2.0]
    values += [scale * 0.1, scale * 0.10000000000000002]  # equal in 15 digits
    assert_all_differ([graph_of("x", val=value) for value in values])
    assert_all_differ([graph_of("x", val=(n, value)) for value in values])
    assert_all_differ([graph_of("x", val=(n, m, one)) for one in (n, m, n + m, 5, 6)])
    assert key(graph_of("x", val=(n, n))) == key(graph_of("x", val=(m, m)))
    with FakeTensorMode(shape_env=shapes):
        first, second = (graph_of("x", val=torch.empty(one, 3, one)) for one in (n, m))
    assert key(first) == key(second)


def test_the_kind_of_a_symbol_enters() -> None:
    shapes = ShapeEnv()
    size = next(symbols(shapes))
    unbacked = shapes.create_unbacked_symint()
    assert_all_differ([graph_of("x", val=n) for n in (size, unbacked)])


def test_kind_assumptions_and_functions_of_symbols_enter() -> None:
    about = [
        sympy.Symbol("s5", integer=True),
        sympy.Symbol("s5", integer=True, positive=True),
        sympy.Symbol("u5", integer=True),  # another kind
        FloorDiv(sympy.Symbol("s5", integer=True), 2),
        CleanDiv(sympy.Symbol("s5", integer=True), 2),  # prints like the one before
    ]
    assert_all_differ([graph_of("x", meta={SIZE_FACTS: (Fact("asked", (one,), True),)}) for one in about])


def test_symbols_that_appear_together_are_numbered_alike_in_every_process() -> None:
    keys = set()
    for first in (7, 96, 995):
        symbols = [sympy.Symbol(f"s{number}", integer=True) for number in range(first, first + 8)]
        expression = sum(factor * symbol for factor, symbol in enumerate(symbols, 1))
        keys.add(key(graph_of("x", meta={SIZE_FACTS: (Fact("asked", (expression,), True),)})))
    assert len(keys) == 1


def layouts() -> Iterator[torch.Tensor]:
    """Two transposed tensors of equal sizes and strides; one is known to have a dimension of size 1."""
    for is_known in (True, False):
        shapes = ShapeEnv()
        n = next(symbols(shapes, 150 if is_known else 350))
        if is_known:
            assert n >= 100
            assert n < 200
        with FakeTensorMode(shape_env=shapes):
            yield torch.empty(3, n // 100).t()


def test_the_layouts_of_symbolic_inputs_and_outputs_enter() -> None:
    def graph(entering: torch.Tensor, leaving: torch.Tensor) -> GraphModule:
        gm = graph_of("x", val=leaving)
        gm.graph.find_nodes(op="placeholder")[0].meta["val"] = entering
        return gm

    known, unknown = layouts()
    assert_all_differ([graph(known, fake(2, 3)), graph(unknown, fake(2, 3))])
    assert_all_differ([graph(fake(2, 3), known), graph(fake(2, 3), unknown)])


def with_subgraph(name: str, constant: float, inner: Any = None) -> GraphModule:
    """A graph with a subgraph, which has a constant and may name something itself."""
    body = graph_of("x", constant)
    if inner is not None:
        body.inner = inner
        with body.graph.inserting_before(body.graph.output_node()):
            body.graph.get_attr("inner")
    gm = graph_of("x", "y")
    setattr(gm, name, body)
    with gm.graph.inserting_before(next(iter(gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)))):
        branch = gm.graph.get_attr(name)
    branch.meta["val"] = body
    return gm


def test_subgraphs_enter_with_those_in_them_and_without_their_names() -> None:
    deep = [with_subgraph("a", 1, graph_of("x", constant)) for constant in (1, 2)]
    assert_all_differ([with_subgraph("a", 1), with_subgraph("a", 2), *deep])
    assert key(with_subgraph("a", 1)) == key(with_subgraph("b", 1))


def test_a_subgraph_with_a_tensor_has_no_key() -> None:
    assert graph_key(with_subgraph("a", 1, torch.nn.Parameter(torch.ones(1)))) is None


def one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def two_more(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def test_functions_of_the_program_enter_with_their_roles() -> None:
    gm = graph_of("x", "y")
    keys = [
        key(gm),
        key(gm, lowering=one_more),
        key(gm, lowering=two_more),
        key(gm, other=one_more),
        key(gm, lowering=one_more, other=two_more),
        key(gm, lowering=two_more, other=one_more),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[4] == key(gm, other=two_more, lowering=one_more)


def test_a_function_without_a_text_leaves_no_key() -> None:
    assert graph_key(graph_of("x", "y"), functions={"lowering": [].append}) is None


PACKAGES = "ort-dynamo", "torch", "onnx", "onnx-ir", "onnxscript", "numpy", "sympy"


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_of_a_package_makes_another_key(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = graph_keys.importlib.metadata.version

    def changed(name: str) -> str:
        return "another" if name == package else str(version(name))

    def missing(name: str) -> str:
        if name == package:
            raise graph_keys.importlib.metadata.PackageNotFoundError
        return str(version(name))

    keys = []
    for found in (version, changed, missing):
        monkeypatch.setattr(graph_keys.importlib.metadata, "version", found)
        graph_keys._versions.cache_clear()
        keys.append(key(graph_of("x", "y")))
    graph_keys._versions.cache_clear()
    assert len(set(keys)) == 3
