"""Programs that repeat a fault hold the operator with its arguments, and the lowering of the program."""

from __future__ import annotations

import ast
import itertools
import runpy
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.fx import Graph

import ort_dynamo
from ort_dynamo.graph.build import BuildSpec
from ort_dynamo.options.groups import DumpOptions, SessionOptions
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.torch_internals.fakes import FakeTensorMode
from ort_dynamo.torch_internals.tracing.lazy_code import graph_module
from ort_dynamo.verification.models import LoweredIsland
from ort_dynamo.verification.repeat import write_models, write_operator, written

aten = torch.ops.aten
FACTOR = 2.0


def ran(program: str) -> int:
    """The status that a program exits with, in this process."""
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(program, run_name="__main__")
    return int(exited.value.code)  # type: ignore[arg-type]


ARGUMENTS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.cat.default, ([torch.ones(2), torch.zeros(3)], 0), {}),
    (aten.clamp.default, (torch.randn(3), -float("inf"), 0.5), {}),
    (aten.gelu.default, (torch.randn(3),), {"approximate": "tanh"}),
    (aten._to_copy.default, (torch.randn(3),), {"dtype": torch.float16}),
    (aten.full_like.default, (torch.randn(3), 2), {"dtype": torch.float64, "device": torch.device("cpu")}),
    (aten.clone.default, (torch.randn(3, 4),), {"memory_format": torch.contiguous_format}),
    (aten.max.dim, (torch.randn(3, 4).t(), 1), {}),
]


@pytest.mark.parametrize(("operator", "args", "kwargs"), ARGUMENTS, ids=[str(one[0]) for one in ARGUMENTS])
def test_arguments_are_written_as_they_are(operator: Any, args: Any, kwargs: Any, tmp_path: Path) -> None:
    program = write_operator(tmp_path, "case", operator, args, kwargs, None, 'File "a.py", line 1')
    assert ran(program) == 0


def doubled(ctx: Any, x: ir.Value) -> ir.Value:
    return ctx.op.Mul(ctx.op.Exp(x), FACTOR)


def test_a_lowering_is_written_with_the_constants_that_it_reads(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(doubled)
    program = write_operator(tmp_path, "case", aten.exp.default, (torch.randn(3),), {}, None, "")
    text = Path(program).read_text()
    assert "FACTOR = 2.0" in text
    assert "def doubled(ctx, x):" in text
    assert ran(program) == 1


def test_a_lowering_that_cannot_be_written_is_imported_or_no_program_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_lowerings.py").write_text(
        "FACTORS = [-1.0]\n\n\ndef wrong(ctx, x):\n    return ctx.op.Mul(x, FACTORS[0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import their_lowerings  # type: ignore[import-not-found]

    given = (torch.randn(3),)
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(their_lowerings.wrong)
    program = write_operator(tmp_path, "case", aten.exp.default, given, {}, None, "")
    assert "from their_lowerings import wrong" in Path(program).read_text()
    assert ran(program) == 1
    factors = their_lowerings.FACTORS
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(lambda ctx, x: ctx.op.Mul(x, factors[0]))
    path, reason = written(write_operator, tmp_path, "other", aten.exp.default, given, {}, None, "")
    assert path == ""
    assert "the lowering reads factors, a list" in reason
    assert not (tmp_path / "other.py").exists()
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(lambda ctx, x: their_lowerings.wrong(ctx, x))
    program = write_operator(tmp_path, "third", aten.exp.default, given, {}, None, "")
    assert "lowering = lambda ctx, x: their_lowerings.wrong(ctx, x)" in Path(program).read_text()
    assert ran(program) == 1


def by_helpers(ctx: Any, x: ir.Value) -> ir.Value:
    return doubled(ctx, x) if FACTOR else by_helpers(ctx, x)


def test_a_lowering_is_written_with_the_functions_that_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "op", object())  # named like an attribute that the lowering reads
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(by_helpers)
    program = write_operator(tmp_path, "case", aten.exp.default, (torch.randn(3),), {}, None, "")
    text = Path(program).read_text()
    assert text.index("def doubled(ctx, x):") < text.index("def by_helpers(ctx, x):")
    assert ran(program) == 1


def test_a_lowering_may_read_modules_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_folder").mkdir()
    (tmp_path / "their_folder" / "factors.py").write_text("TWO = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import their_folder.factors  # type: ignore[import-not-found]

    def twice(ctx: Any, x: ir.Value) -> ir.Value:
        (factor,) = itertools.repeat(their_folder.factors.TWO, 1)
        return ctx.op.Mul(ctx.op.Exp(x), factor)

    ort_dynamo.register_lowering(aten.exp.default, replace=True)(twice)
    program = write_operator(tmp_path, "case", aten.exp.default, (torch.randn(3),), {}, None, "")
    monkeypatch.setattr("sys.path", [one for one in sys.path if one != str(tmp_path)])
    for name in ("their_folder", "their_folder.factors"):
        monkeypatch.delitem(sys.modules, name)
    assert ran(program) == 1


half = lambda ctx, x: ctx.op.Mul(x, 0.5)  # noqa: E731


def test_a_lambda_is_written_with_the_lambdas_that_it_calls(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(
        lambda ctx, x: half(ctx, x),
    )
    program = write_operator(tmp_path, "case", aten.exp.default, (torch.randn(3),), {}, None, "")
    text = Path(program).read_text()
    assert text.index("half = lambda ctx, x") < text.index("lowering = lambda ctx, x")
    assert ran(program) == 1


x = 2.0


def by_the_name_x(ctx: Any, value: ir.Value) -> ir.Value:
    return ctx.op.Mul(value, x)


def by_a_default(ctx: Any, value: ir.Value, factor: float = FACTOR) -> ir.Value:
    return ctx.op.Mul(value, factor)


def test_a_default_is_written_and_names_of_the_program_are_not_taken(tmp_path: Path) -> None:
    given = (write_operator, tmp_path, "case", aten.exp.default, (torch.randn(3),), {}, None, "")
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(by_a_default)
    program, _ = written(*given)
    assert "FACTOR = 2.0" in Path(program).read_text()
    assert ran(program) == 1
    ort_dynamo.register_lowering(aten.exp.default, replace=True)(by_the_name_x)
    program, _ = written(*given)
    assert "import by_the_name_x" in Path(program).read_text(), "its x would be overwritten"
    assert ran(program) == 1


def test_two_functions_of_one_name_are_not_mistaken(tmp_path: Path) -> None:
    def made(doubled: Any) -> Any:
        def outer(ctx: Any, x: ir.Value) -> ir.Value:
            return doubled(ctx, by_helpers(ctx, x))

        return outer

    def other() -> Any:
        def doubled(ctx: Any, x: ir.Value) -> ir.Value:
            return ctx.op.Mul(x, 3.0)

        return doubled

    ort_dynamo.register_lowering(aten.exp.default, replace=True)(made(other()))
    program, reason = written(write_operator, tmp_path, "case", aten.exp.default, (torch.randn(3),), {}, None, "")
    assert program == ""
    assert "two values called doubled" in reason


def test_a_program_of_a_pass_takes_any_name_and_any_text(tmp_path: Path) -> None:
    gm = graph_module({}, Graph())
    x = gm.graph.placeholder("x")
    mode = FakeTensorMode()
    x.meta["val"] = mode.from_tensor(torch.randn(3))
    node = gm.graph.call_function(aten.tanh.default, (x,))
    node.meta["val"] = mode.from_tensor(torch.randn(3))
    gm.graph.output((node,))
    target = usable_target("cpu")
    spec = BuildSpec((), SessionOptions().resolved(), DumpOptions(), target, torch.device("cpu"), in_order=False)
    island = LoweredIsland(gm, spec)
    cause = r'the pass Mine(folder="C:\Users\me\x")'
    program = write_models(tmp_path, "forward-a<b>", island, None, [torch.randn(3)], cause)
    assert ran(program) == 0
    assert ast.get_docstring(ast.parse(Path(program).read_text())).endswith(cause.replace('"', "'"))
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"forward-a_b_.{kind}" for kind in ("onnx", "pt", "py")]


def test_the_line_of_an_operator_may_have_any_text(tmp_path: Path) -> None:
    line = r'File "C:\Users\me.py", line 1'
    program = write_operator(tmp_path, "case", aten.tanh.default, (torch.randn(3),), {}, None, line)
    assert ran(program) == 0
    assert line.replace('"', "'") in ast.get_docstring(ast.parse(Path(program).read_text()))
