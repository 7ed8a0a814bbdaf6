"""Tests of AOTAutograd's cache: the next process traces nothing below Dynamo and computes the same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

import ort_dynamo
from ort_dynamo.__main__ import main
from ort_dynamo.cache import disk
from ort_dynamo.cache.folder import SUFFIX
from ort_dynamo.errors import NotInOnnxRuntimeError
from ort_dynamo.listeners import trace_cache
from ort_dynamo.lowering import registry
from ort_dynamo.passes.outside import register_pass
from ort_dynamo.report.record import RECORDS
from ort_dynamo.torch_internals.aot_cache import AOT_CACHE

pytestmark = pytest.mark.skipif(not AOT_CACHE, reason="this torch keeps nothing of a backend of others")

PROGRAM = """
import json, sys
import torch
import ort_dynamo
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.3),
    torch.nn.Linear(4 * 36, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(model, backend="ort_train", options={"placement": sys.argv[1]})
losses = []
for size in (4, 4, 5, 6):
    loss = torch.nn.functional.cross_entropy(step(torch.randn(size, 1, 8, 8)), torch.arange(size) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
losses.append(float(model[1].running_mean.sum()).hex())
print(json.dumps({"losses": losses, "torch": counters["aot_autograd"], "counts": counters["ort_train"],
                  "native": counters["ort_train_native"], "summary": str(ort_dynamo.summary())}))
"""


def ran(tmp_path: Path, placement: str = "onnxruntime", **variables: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "ORT_DYNAMO_CACHE": "1",
        "ORT_DYNAMO_CACHE_DIR": str(tmp_path / "cache"),
        "ORT_DYNAMO_TRACE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        **variables,
    }
    done = run_program(PROGRAM, placement, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_process_traces_nothing_and_trains_the_same(tmp_path: Path) -> None:
    first, second = ran(tmp_path), ran(tmp_path, PYTHONHASHSEED="2")
    assert first["torch"]["autograd_cache_saved"] == first["torch"]["autograd_cache_miss"] == 2  # 4 and any other size
    assert second["torch"]["autograd_cache_hit"] == 2
    assert "autograd_cache_miss" not in second["torch"]
    for name in ("losses", "counts", "native"):
        assert first[name] == second[name]
    assert "compiles 2, graphs 4, islands 4 (4 from the cache)" in second["summary"]


def test_graph_with_operators_placed_in_torch_is_a_cache_hit(tmp_path: Path) -> None:
    first, second = ran(tmp_path, "fastest"), ran(tmp_path, "fastest", PYTHONHASHSEED="2")
    assert second["torch"]["autograd_cache_hit"] == 2
    assert first["losses"] == second["losses"]
    assert first["counts"]["chosen_nodes"] == second["counts"]["chosen_nodes"] > 0


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).relu().mean((2, 3)))


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_graphs_that_are_read_count_as_compiled(place: Path, placement: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    for times in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = torch.compile(Images(), backend="ort_train", options={"placement": placement})
        ort_dynamo.require_compiled(model)(x).sum().backward()
        assert hits() == (times, 1 - times)
        strict = ort_dynamo.require_compiled(model, whole="onnxruntime")
        if placement == "onnxruntime":
            strict(x)
            continue
        with pytest.raises(NotInOnnxRuntimeError, match=r"nodes \(forward, backward\): 0 in ONNX Runtime"):
            strict(x)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that compiles of this process store in; torch's is beside it."""
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ORT_DYNAMO_TRACE_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return tmp_path / "cache"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).tanh())


@pytest.mark.filterwarnings("ignore:.* force disabled by torch.compiler.config:UserWarning")
@pytest.mark.parametrize("off", ["ORT_DYNAMO_TRACE_CACHE", "ORT_DYNAMO_CACHE", "torch"])
def test_switches_leave_it_off(place: Path, off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(off, "0")
    with torch.compiler.config.patch(force_disable_caches=off == "torch"):
        outcome(Small(), torch.ones(3, 4))
    assert not (place.parent / "torch" / "aotautograd").exists()
    assert bool(list(place.glob(f"*{SUFFIX}"))) == (off != "ORT_DYNAMO_CACHE")


def outcome(function: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] = {}, **compiled: Any) -> list[Any]:
    """Results and gradients, computed as in a new process."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    if isinstance(function, type):
        function = function()
    leaves = [one.clone().requires_grad_() if one.is_floating_point() else one.clone() for one in inputs]
    results = torch.compile(function, backend="ort_train", options=dict(options), **compiled)(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    found = [one.detach().clone() for one in results]
    loss = sum(one.sum() for one in results if one.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return [*found, *(one.grad for one in leaves if one.requires_grad), *leaves]


def hits() -> tuple[int, int]:
    return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            assert torch.equal(mine, theirs)


def written(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        y.add_(1)
    return x * y


def several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return z, z.t(), z[0], x.expand(2, *x.shape), z.detach() + 1, torch.arange(3)


def dropout_and_noise(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5) * torch.rand_like(y)


def in_eager(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.det(x @ y) * (x + y).sum()


def branching(x: Tensor, y: Tensor) -> Any:
    return torch.cond(y.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


X, Y = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), torch.eye(3) + 0.1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [written, several, dropout_and_noise, in_eager, branching])
def test_graph_read_from_the_cache_computes_the_same(place: Path, function: Callable[..., Any], dynamic: bool) -> None:
    y = Y if function is not written else Y.to(torch.int64)
    first = outcome(function, X, y, dynamic=dynamic)
    before = [(graph.role, graph.native, graph.eager) for record in RECORDS for graph in record.graphs]
    second = outcome(function, X, y, dynamic=dynamic)
    if function is not branching:  # a graph with sub-graphs around it may be left out
        assert hits() == (1, 0)
    assert_equal(second, first)
    assert [(graph.role, graph.native, graph.eager) for record in RECORDS for graph in record.graphs] == before


def test_cache_hit_logs_eager_operators_again(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcome(in_eager, X, Y)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        outcome(in_eager, X, Y)
    assert hits() == (1, 0)
    assert [one for one in caplog.messages if "runs in eager" in one]


def test_an_island_that_is_gone_is_a_miss(place: Path) -> None:
    first = outcome(Small, torch.ones(3, 4))
    for _ in range(2):
        files = sorted(place.glob(f"*{SUFFIX}"))
        assert len(files) == 2
        files[_].unlink()
        assert_equal(outcome(Small, torch.ones(3, 4)), first)
        assert hits() == (0, 1)
        ((record,),) = [list(RECORDS)]
        assert [graph.role for graph in record.graphs] == ["forward", "backward"]
    assert_equal(outcome(Small, torch.ones(3, 4)), first)
    assert hits() == (1, 0)


class Heard(logging.Handler):
    """Collects torch's messages about results that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    handler, logger = Heard(), logging.getLogger("torch._inductor.codecache")
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)


def test_a_cleared_cache_is_a_quiet_miss(place: Path, heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = outcome(Small, torch.ones(3, 4))
    assert main(["cache", "clear"]) == 0
    with caplog.at_level(logging.INFO, "ort_dynamo"):
        assert_equal(outcome(Small, torch.ones(3, 4)), first)
    assert hits() == (0, 1)
    assert heard == []
    (said,) = [one for one in caplog.messages if "compiled again" in one]
    assert said.endswith("the cache of compiled graphs has no usable entry of an island: absent")
    assert_equal(outcome(Small, torch.ones(3, 4)), first)
    assert (hits(), heard) == ((1, 0), [])


def test_torch_still_reports_a_damaged_result(place: Path, heard: list[str]) -> None:
    first = outcome(Small, torch.ones(3, 4))
    stored = [one for one in (place.parent / "torch" / "aotautograd").rglob("*") if one.is_file()]
    for file in stored:
        file.write_bytes(file.read_bytes()[:100])
    assert_equal(outcome(Small, torch.ones(3, 4)), first)
    assert len(heard) == len(stored) == 1
    assert heard[0].endswith("unable to load compiled graph")


def test_a_damaged_island_is_reported_by_us(place: Path, heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
    outcome(Small, torch.ones(3, 4))
    for file in place.glob(f"*{SUFFIX}"):
        file.write_bytes(file.read_bytes()[:100])
    outcome(Small, torch.ones(3, 4))
    assert heard == []
    assert [one for one in caplog.messages if "cannot be used" in one]


@pytest.mark.parametrize(
    "options",
    [{"debug": {"fuse": False}}, {"graph_optimization": "basic"}, {"threads": 3}, {"memory_budget": 0.5}],
    ids=str,
)
def test_other_options_are_other_results(place: Path, options: dict[str, Any]) -> None:
    outcome(Small, torch.ones(3, 4))
    outcome(Small, torch.ones(3, 4), options=options)
    assert hits() == (0, 1)


def test_passes_and_lowerings_of_a_program_are_seen(place: Path) -> None:
    outcome(Small, torch.ones(3, 4))
    handle = register_pass(RemoveUnusedNodesPass())
    try:
        outcome(Small, torch.ones(3, 4))
        assert hits() == (0, 1)
    finally:
        handle.remove()
    outcome(Small, torch.ones(3, 4))
    assert hits() == (1, 0)


@dataclass(frozen=True)
class Nothing(PassBase):
    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, False)


@pytest.mark.parametrize("added", ["first", "last", "for one compile", "lowering"])
def test_fx_passes_and_lowerings_of_a_program_leave_no_trace(
    place: Path, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"extra_passes": (Nothing(),)} if added == "for one compile" else {}
    handle = register_pass(Nothing(), first=added == "first") if added in ("first", "last") else None
    if added == "lowering":
        monkeypatch.setattr(registry, "_FROM_OUTSIDE", {})
        ort_dynamo.register_lowering(torch.ops.aten.special_airy_ai.default, replace=True)(
            lambda ctx, x: x
        )  # the model has none
    for _ in range(2):
        outcome(Small, torch.ones(3, 4), options=options)
        assert hits() == (0, 0)
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize(
    "options", [{"debug": {"verify": True}}, {"debug": {"trace_cache": False}}, {"cache": False}], ids=str
)
def test_verified_or_uncached_compile_is_not_stored(place: Path, options: dict[str, Any]) -> None:
    outcome(Small, torch.ones(3, 4), options=options)
    outcome(Small, torch.ones(3, 4), options=options)
    assert hits() == (0, 0)


def guarded(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 3 else x * 3


def test_sizes_are_guarded_as_when_it_was_compiled(place: Path) -> None:
    for size in (5, 2, 7):
        first = outcome(guarded, torch.ones(size, 2), dynamic=True)
        assert first[0][0, 0] == (2 if size > 3 else 3)


def filled(x: Tensor, number: float) -> Any:
    return x + torch.full((2,), number), x * number


def test_a_number_that_was_taken_for_a_constant_is_not_taken_for_another(place: Path) -> None:
    compiled = torch.compile(filled, backend="ort_train", dynamic=True)
    for number in (0.5, 0.25, -1.0, 3.0):
        found = compiled(torch.ones(2), number)
        assert [one.tolist() for one in found] == [[1 + number] * 2, [number] * 2]


def test_save_onnx_writes_the_models_of_a_cached_graph(place: Path, tmp_path: Path) -> None:
    outcome(Small, torch.ones(3, 4))
    outcome(Small, torch.ones(3, 4), options={"save_onnx": str(tmp_path / "saved")})
    assert len(list((tmp_path / "saved").glob("*.onnx"))) >= 2


def test_artifacts_that_are_no_entries_are_not_taken(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    sound = hashlib.sha256(b"").hexdigest()
    for key in ("../../escaped", "/tmp/escaped", sound, sound.upper(), ""):
        disk._load_artifact(key, b"cos\nsystem\n(S'true'\ntR.")
    assert not list(tmp_files(place.parent))
    assert all("is ignored" in record.getMessage() for record in caplog.records)


def tmp_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_default_trace_cache_stores_only_large_graphs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DYNAMO_TRACE_CACHE")
    monkeypatch.setattr(trace_cache, "_seen", 0)
    monkeypatch.setattr(trace_cache, "WORTH_IT", 15)
    outcome(written, torch.ones(3, 4), torch.ones(3, 4))
    assert hits() == (0, 0)
    outcome(Small(), torch.ones(3, 4))
    assert hits() == (0, 1)
