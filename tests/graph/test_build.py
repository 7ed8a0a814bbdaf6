"""Tests of BuildSpec: everything that decides how an island is built is in its graph key."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.compilation.compiler import build_spec
from ort_dynamo.graph.build import BuildSpec, spell_pass
from ort_dynamo.graph.graph_key import graph_key
from ort_dynamo.lowering.build_island import build_island
from ort_dynamo.options.groups import DumpOptions, Options, SessionSettings
from ort_dynamo.passes.onnx.fold_casts import FoldCasts
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.targets.target import Target
from ort_dynamo.testing import assert_close

CPU = torch.device("cpu")
KEYED = (BuildSpec, SessionSettings, DumpOptions, Target)
DERIVED = {(Target, "kernels"), (Target, "defects")}
"""Fields outside the key, each made of others that are in it."""


def spec(role: str = "forward", **options: Any) -> BuildSpec:
    return build_spec(Options(**options), find_target("cpu"), CPU, role)


def island() -> torch.fx.GraphModule:
    gm = make_fx(lambda x: (x.relu().sum(-1),), tracing_mode="fake")(torch.ones(2, 3))
    for node in gm.graph.find_nodes(op="output"):
        node.meta.pop("val", None)
    return gm


def fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of attributes, by name, to every field of a dataclass and of the dataclasses in it."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if (type(value), field.name) in DERIVED:
            continue
        if type(inner) in KEYED:
            yield from fields(inner, (*path, field.name))
        else:
            yield (*path, field.name)


def changed(value: Any, path: tuple[str, ...]) -> Any:
    name, *rest = path
    inner = getattr(value, name)
    return dataclasses.replace(value, **{name: changed(inner, tuple(rest)) if rest else other(inner)})


def other(value: Any) -> Any:
    """A value of the same kind that differs."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case None:
            return "somewhere"
        case torch.device():
            return torch.device("cuda", 1)
        case frozenset():
            return value | {"one more"}
        case tuple():
            return (*value, ("name", "value"))
    raise AssertionError(f"a field of a type that this test does not know: {value!r}")


PATHS = [path for path in fields(spec()) if path != ("passes",)]


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_another_value_of_any_field_makes_another_key(path: tuple[str, ...]) -> None:
    gm, first = island(), spec()
    assert graph_key(gm, first) == graph_key(gm, spec())
    assert graph_key(gm, first) != graph_key(gm, changed(first, path))


def test_passes_enter_with_their_parameters_and_in_order() -> None:
    gm, first = island(), spec()
    one, two = FoldCasts(), RemoveUnusedNodesPass()
    keys = [
        graph_key(gm, dataclasses.replace(first, passes=passes))
        for passes in ((), (one,), (two,), (one, two), (two, one))
    ]
    assert len(set(keys)) == len(keys)
    assert spec().passes != ()


class Scale(InPlacePass):
    """A pass that is no dataclass."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, model: Any) -> PassResult:
        return PassResult(model, modified=False)


def test_passes_that_are_no_dataclasses_enter_by_class_module_and_attributes() -> None:
    shift = type("Shift", (Scale,), {"__module__": Scale.__module__})
    elsewhere = type("Scale", (Scale,), {"__module__": "elsewhere", "__qualname__": "Scale"})
    texts = {spell_pass(one) for one in (Scale(1.0), Scale(2.0), shift(1.0), elsewhere(1.0))}
    assert len(texts) == 4
    assert spell_pass(Scale(1.0)) == spell_pass(Scale(1.0))


@dataclasses.dataclass(frozen=True, eq=False)
class Table(InPlacePass):
    values: Any

    def call(self, model: Any) -> PassResult:
        return PassResult(model, modified=False)


@pytest.mark.parametrize(
    "make", [Table, Scale, lambda values: Table({"a": [values]}), lambda values: Scale(Table(values))]
)
@pytest.mark.parametrize("kind", [np.array, torch.tensor, ir.tensor, lambda values: torch.tensor(values).bfloat16()])
def test_arrays_of_a_pass_enter_by_their_content(make: Any, kind: Any) -> None:
    values = [0.0] * 2000
    texts = {spell_pass(make(kind(values)))}
    for changed in (1.0, 1.0 + 2**-7):
        values[1000] = changed
        texts |= {spell_pass(make(kind(values))), spell_pass(make(kind(values)))}
    assert len(texts) == 3


@dataclasses.dataclass(frozen=True)
class Guided(InPlacePass):
    target: Target

    def call(self, model: ir.Model) -> PassResult:
        return PassResult(model, False)


def test_the_tables_of_a_pass_s_target_are_not_walked_for_arrays() -> None:
    class Unread(dict[Any, Any]):
        def values(self) -> Any:
            raise AssertionError("the repr of a target is its identity")

    target = dataclasses.replace(spec().target, kernels=Unread(spec().target.kernels))
    assert spell_pass(Guided(target)) == f"Guided(target={target!r})"


def test_a_pass_may_hold_tensors_without_bytes_and_cycles() -> None:
    cycle: dict[str, Any] = {}
    cycle["itself"] = cycle
    with FakeTensorMode():
        fake = torch.ones(3)
    for value in (torch.ones(3, device="meta"), fake, torch.ones(2, dtype=torch.complex64).conj(), cycle):
        assert spell_pass(Scale(value)) == spell_pass(Scale(value))  # type: ignore[arg-type]


def reads_outside_the_key(role: str) -> list[str]:
    """Fields that compiling an island reads and that its key lacks."""
    read: dict[type, set[str]] = defaultdict(set)

    def watch(cls: type, patch: pytest.MonkeyPatch) -> None:
        original = cls.__getattribute__

        def record(self: Any, name: str) -> Any:
            read[cls].add(name)
            return original(self, name)

        patch.setattr(cls, "__getattribute__", record)

    gm, built_by = island(), spec(role)
    with pytest.MonkeyPatch.context() as patch:
        for cls in KEYED:
            watch(cls, patch)
        build_island(gm, built_by, "test")
    found = []
    for cls in KEYED:
        names = {field.name: field for field in dataclasses.fields(cls)}
        assert read[cls] & names.keys(), f"{cls.__name__} was not read at all: nothing is watched"
        for name in sorted(read[cls] & names.keys()):
            if not names[name].repr and (cls, name) not in DERIVED:
                found.append(f"{cls.__name__}.{name}")
    return found


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_everything_that_compiling_an_island_reads_is_in_its_key(role: str) -> None:
    assert reads_outside_the_key(role) == []


def test_a_field_that_is_read_and_leaves_the_key_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (field,) = [f for f in dataclasses.fields(SessionSettings) if f.name == "graph_optimization"]
    monkeypatch.setattr(field, "repr", False)
    assert reads_outside_the_key("forward") == ["SessionSettings.graph_optimization"]


def test_a_session_takes_only_the_inputs_that_it_reads() -> None:
    def gradients(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.aten.native_layer_norm_backward(dy, x, [3], mean, rstd, weight, bias, [True, True, True])

    x = torch.randn(2, 3)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [3], None, None, 1e-5)
    arguments = torch.ones(2, 3), x, mean, rstd, torch.rand(3), torch.rand(3)
    gm = make_fx(gradients, tracing_mode="fake")(*arguments)
    gm.graph.output_node().meta.pop("val", None)
    compiled = open_graph(build_island(gm, spec(), "test"), spec().target, CPU)
    assert [one.is_read for one in compiled.built.inputs] == [True] * 5 + [False]
    assert len(onnx.ModelProto.FromString(compiled.built.model).graph.input) == 5
    for ours, expected in zip(compiled.run(*arguments), gradients(*arguments), strict=True):
        assert_close(ours, expected, "gradient")
