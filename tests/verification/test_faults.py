"""A planted fault is named in one run: the operator, the line, the wrong part, and a program that repeats it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from forked import run_program
from twelve_layers import TwelveLayers, batch

import ort_dynamo
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.errors import LoweringError, NotCompiledError, ResultsDifferError
from ort_dynamo.runtime import session

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten


def wrong_tanh(ctx: Any, x: ir.Value) -> ir.Value:
    return ctx.op.Mul(ctx.op.Tanh(x), 1.01)


def wrong_tanh_backward(ctx: Any, grad: ir.Value, out: ir.Value) -> ir.Value:
    return ctx.op.Mul(grad, ctx.op.Sub(1.0, out))


def repeated(program: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that repeats a fault, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORT_DYNAMO_CACHE": "0"}
    return run_program(Path(program), cwd=cwd, env=environment, timeout=240)


@pytest.mark.parametrize(
    ("operator", "lowering", "node", "graph"),
    [
        (aten.tanh.default, wrong_tanh, "tanh", "forward"),
        (aten.tanh_backward.default, wrong_tanh_backward, "tanh_backward", "backward"),
    ],
)
def test_a_wrong_lowering_is_named_and_repeated(
    tmp_path: Path, operator: Any, lowering: Any, node: str, graph: str
) -> None:
    ort_dynamo.register_lowering(operator, replace=True)(lowering)
    result = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path)
    fault = result.fault
    assert not result.ok
    assert fault is not None
    assert (fault.operator, fault.node, fault.graph) == (str(operator), node, graph)
    assert fault.culprit == "lowering"
    assert f"{lowering.__name__}, which your program registered" in fault.cause
    assert fault.module == "special (Special)"
    assert "twelve_layers.py" in fault.line
    assert "return torch.tanh(x)" in fault.line
    assert any("Mul(" in one for one in fault.onnx_nodes)
    assert str(fault) in str(result)
    assert len(str(result).splitlines()) < 40
    with pytest.raises(ResultsDifferError, match=f"The first operator that differs: {operator}"):
        result.raise_if_wrong()
    ran = repeated(fault.repeat, cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "differs from torch" in ran.stdout


def test_the_program_exits_with_0_once_the_lowering_is_right(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.tanh.default, replace=True)(wrong_tanh)
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    program = Path(fault.repeat)
    text = program.read_text()
    program.write_text(text.replace("1.01", "1.0"))
    assert program.read_text() != text
    ran = repeated(fault.repeat, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_wrong_kernel_is_told_from_a_wrong_lowering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = session._open

    def tampered(built: Any, *given: Any) -> Any:
        model = onnx.ModelProto.FromString(built.model)
        for node in model.graph.node:
            if node.op_type == "Tanh":
                node.op_type = "Erf"
        return real(dataclasses.replace(built, model=model.SerializeToString()), *given)

    monkeypatch.setattr(session, "_open", tampered)
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.operator, fault.graph, fault.culprit) == ("aten.tanh.default", "forward", "kernel")
    assert "a kernel of onnxruntime" in fault.cause
    assert "= Tanh(" in fault.onnx_nodes[0]
    assert "return torch.tanh(x)" in fault.line


@dataclass(frozen=True)
class TakeErf(ir.passes.InPlacePass):
    """Replaces each Tanh by another function."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model."""
        found = [node for node in model.graph if node.op_type == "Tanh"]
        for node in found:
            node.op_type = "Erf"
        return ir.passes.PassResult(model, modified=bool(found))


def test_a_wrong_pass_is_named_and_repeated(tmp_path: Path) -> None:
    ort_dynamo.register_pass(TakeErf())
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.operator, fault.graph, fault.culprit) == ("aten.tanh.default", "forward", "pass")
    assert "TakeErf()" in fault.cause
    assert "= Erf(" in fault.onnx_nodes[0]
    assert "return torch.tanh(x)" in fault.line
    ran = repeated(fault.repeat, cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "the models differ" in ran.stdout


def test_wrong_optimizers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ort_dynamo.lowering import build_island

    real = build_island.optimize

    def tampered(*given: Any) -> bytes:
        model = onnx.ModelProto.FromString(real(*given))
        for node in model.graph.node:
            if node.op_type == "Tanh":
                node.op_type = "Erf"
        return model.SerializeToString()

    monkeypatch.setattr(build_island, "optimize", tampered)
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.graph, fault.culprit) == ("forward", "optimizer")
    assert "ONNX Runtime's optimizers" in fault.cause


def test_a_wrong_pass_on_the_outer_graph_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ort_dynamo.verification import record

    real = record.Recorder.finished

    def tampered(self: Any, graph: Any, run: Any) -> Any:
        def wrong(given: list[Any]) -> Any:
            return tuple(one * 1.1 if isinstance(one, torch.Tensor) and one.ndim == 0 else one for one in run(given))

        return real(self, graph, wrong)

    monkeypatch.setattr(record.Recorder, "finished", tampered)
    result = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path)
    assert result.fault is not None
    assert (result.fault.graph, result.fault.culprit, result.fault.operator) == ("forward", "outside", "")


def test_a_fault_in_the_trace_has_no_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = Compilation.run

    def traced_wrong(self: Compilation, gm: torch.fx.GraphModule, *given: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=torch.tanh):
            node.target = torch.sigmoid
        gm.recompile()
        return real(self, gm, *given)

    monkeypatch.setattr(Compilation, "run", traced_wrong)
    result = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path)
    assert not result.ok
    assert result.fault is None
    assert "the cause is before the graphs" in str(result).replace("\n", " ")
    assert "<pre>" in result._repr_html_()


# -- faults that cannot be written or repeated -----------------------------------------------------------------------


def test_a_fault_is_told_where_its_program_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ort_dynamo.register_lowering(aten.tanh.default, replace=True)(wrong_tanh)
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=blocked / "faults").fault
    assert fault is not None
    assert (fault.operator, fault.culprit, fault.repeat) == ("aten.tanh.default", "lowering", "")
    assert "the program that repeats it could not be written: " in fault.cause


def test_a_pass_at_fault_is_told_where_its_models_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ort_dynamo.register_pass(TakeErf())
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=blocked / "faults").fault
    assert fault is not None
    assert (fault.operator, fault.culprit, fault.repeat) == ("aten.tanh.default", "pass", "")
    assert "TakeErf()" in fault.cause
    assert "could not be written: " in fault.cause


def test_a_fault_is_told_where_its_operator_cannot_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*given: Any) -> Any:
        raise LoweringError(node="tanh", where="a line", error="no such size")

    monkeypatch.setattr("ort_dynamo.verification.find_fault.run_alone", refused)
    ort_dynamo.register_lowering(aten.tanh.default, replace=True)(wrong_tanh)
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.operator, fault.culprit, fault.repeat) == ("aten.tanh.default", "lowering or kernel", "")
    assert "no such size" in fault.cause


def test_a_call_without_a_graph_is_no_success(tmp_path: Path) -> None:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    result = ort_dynamo.verify(lambda x: outside(x), torch.ones(2), folder=tmp_path)
    assert (result.ok, result.graphs) == (True, 0)
    assert str(result).startswith("Nothing was compiled: ")
    assert "So ort_train was not checked." in str(result)
    assert "Equal to eager mode" not in str(result)
    with pytest.raises(NotCompiledError, match="found no graph"):
        result.raise_if_wrong()


# -- the option ------------------------------------------------------------------------------------------------------


def test_the_option_raises_at_the_first_call_that_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ort_dynamo.register_lowering(aten.tanh_backward.default, replace=True)(wrong_tanh_backward)
    model = TwelveLayers()
    compiled = torch.compile(model, backend="ort_train", options={"verify": 1})
    with pytest.raises(ResultsDifferError, match=r"The first operator that differs: aten\.tanh_backward\.default"):
        compiled(*batch())
    assert list((tmp_path / "ort_dynamo_faults").glob("*.py"))


def test_the_option_checks_the_first_calls_alone_and_says_so_once_each(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model, given = TwelveLayers(), batch()
    compiled = torch.compile(model, backend="ort_train", options={"verify": 2})
    with caplog.at_level("INFO", logger="ort_dynamo.verification"):
        for _ in range(3):
            torch.manual_seed(3)
            loss = compiled(*given)
            torch.manual_seed(3)
            torch.testing.assert_close(loss, model(*given))
            loss.backward()
    said = [record.getMessage() for record in caplog.records]
    assert [one.partition(": Equal")[0] for one in said] == ["ort_train: call 1 of 2", "ort_train: call 2 of 2"]
    assert "layers.3.up.weight" in dict(model.named_parameters())


def test_the_option_names_parameters_as_the_program_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ort_dynamo.register_lowering(aten.tanh.default, replace=True)(wrong_tanh)
    with pytest.raises(ResultsDifferError, match=r"gradient of input layers\.\d+\.norm\.weight"):
        torch.compile(TwelveLayers(), backend="ort_train", options={"verify": 1})(*batch())


def test_an_earlier_releases_flag_still_checks_graphs() -> None:
    from ort_dynamo.options.groups import parse_options

    with pytest.warns(FutureWarning, match="verify"):
        options = parse_options(None, {"verify": True})
    assert (options.dump.verify, options.verify.verified_calls) == (True, None)
    options = parse_options(None, {"verify": 3, "debug": {"verify": True}})
    assert (options.dump.verify, options.verify.verified_calls) == (True, 3)
