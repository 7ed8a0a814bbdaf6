"""Checks of a device before anything is measured on it; each returns its findings and a verdict."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from bench.contestants import compile_with
from bench.cuda_device import Place, resident_bytes
from bench.cuda_models import SMALL, build_model
from bench.workloads import Workload

__all__ = ["CHECKS", "Found", "copies", "memcpy_nodes"]

Found = dict[str, Any]
"""The findings of a part; "ok" is its verdict."""


def _gradients(loss: Callable[..., Tensor], workload: Workload) -> list[Tensor]:
    parameters = list(workload.module.parameters())
    found = loss(*workload.batch)
    return [found.detach(), *torch.autograd.grad(found, parameters)]


def _distance(ours: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The norm of the difference over the norm, of all numbers together, in float64."""
    pairs = [(one.double(), other.double()) for one, other in zip(ours, exact, strict=True)]
    apart = sum(float((one - other).square().sum()) for one, other in pairs)
    size = sum(float(other.square().sum()) for _, other in pairs)
    return float((apart / max(size, 1e-300)) ** 0.5)


_IN_SESSIONS = {"placement": "onnxruntime"}

_ROOM = {None: (4.0, 2e-6), torch.bfloat16: (2.0, 1e-3)}
"""dtype of autocast -> largest ratio of our distance from float64 to eager's, and a distance that always passes."""


def check_numbers(place: Place, name: str, dtype: torch.dtype | None) -> Found:
    """Loss and gradients, without dropout: their distance from float64's, beside that of eager's own.

    In float32 all operators run in sessions; in bfloat16 the default placement decides.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    workload = build_model(name, place.scale, place.device, dropout=False)
    start = copy.deepcopy(workload.module.state_dict())  # a batch norm's statistics move
    double = Workload(
        copy.deepcopy(workload.module).double(),
        tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in workload.batch),
    )
    exact = _gradients(double.module, double)
    options = _IN_SESSIONS if dtype is None else None
    with place.autocast(dtype):
        eager = _distance(_gradients(workload.module, workload), exact)
        workload.module.load_state_dict(start)
        ours = _distance(_gradients(compile_with("ort_train", workload.module, options), workload), exact)
    times, anyhow = _ROOM[dtype]
    nodes = {where: counters["ort_train"][f"{where}_nodes"] for where in ("native", "chosen", "eager")}
    return {
        "eager": eager,
        "ours": ours,
        "nodes": nodes,
        "in eager": dict(counters["ort_train_eager"]),
        "ok": ours <= max(times * eager, anyhow) and nodes["native"] + nodes["chosen"] > 0,
    }


def copies(names: Iterable[str]) -> Counter[str]:
    """Kind of copy ("HtoD", "DtoH", "DtoD") -> how often it is among the names of a device's events."""
    kinds = ("HtoD", "DtoH", "DtoD")
    return Counter(kind for name in names if name.startswith("Memcpy") for kind in kinds if kind in name)


def check_copies(place: Place) -> Found:
    """No copy between host and device in a step, by torch's profiler, but those that eager makes as well."""
    torch._dynamo.reset()
    workload = build_model("gpt", place.scale, place.device)
    steps, found = 3, {}
    activity = torch.profiler.ProfilerActivity
    for backend in ("eager", "ort_train"):
        loss = compile_with(backend, workload.module)
        for _ in range(3):
            _gradients(loss, workload)
        place.wait()
        with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if place.on_cuda else [])]) as profile:
            for _ in range(steps):
                _gradients(loss, workload)
            place.wait()
        names = [event.name for event in profile.events()]
        found[backend] = {kind: count / steps for kind, count in copies(names).items()}
    ours, eager = found["ort_train"], found["eager"]
    between = all(ours.get(kind, 0) <= eager.get(kind, 0) for kind in ("HtoD", "DtoH"))
    return {"copies a step": found, "ok": between}


def memcpy_nodes(folder: str | Path) -> Counter[str]:
    """Copies between host and device in the models of a folder, as ONNX Runtime's optimizers leave them."""
    models = sorted(Path(folder).rglob("optimized/*.onnx"))
    if not models:
        raise FileNotFoundError(f"no optimized model in {folder}")
    nodes = (node.op_type for path in models for node in onnx.load(path, load_external_data=False).graph.node)
    return Counter(kind for kind in nodes if kind.startswith("Memcpy"))


def check_memcpy_nodes(place: Place) -> Found:
    """No node of ONNX Runtime's that copies between host and device."""
    torch._dynamo.reset()
    found: dict[str, int] = {}
    for name in ("gpt", "bert", "resnet18"):
        workload = build_model(name, place.scale, place.device)
        with tempfile.TemporaryDirectory() as folder:
            _gradients(compile_with("ort_train", workload.module, {"save_onnx": folder, **_IN_SESSIONS}), workload)
            found[name] = memcpy_nodes(folder).total()
    return {"nodes": found, "ok": not any(found.values())}


def check_flat_memory(place: Place) -> Found:
    """Memory does not grow from step 100 to 1,000, the device's and the process's: pinned memory counts there."""
    torch._dynamo.reset()
    workload = build_model("bert", "tiny", place.device)
    loss = compile_with("ort_train", workload.module)
    few, many = (100, 1000) if place.on_cuda else (20, 60)
    seen = {}
    for step in range(1, many + 1):
        _gradients(loss, workload)
        if step in (few, many):
            seen[step] = (place.allocated(), resident_bytes())
    (device, process), (device_later, process_later) = seen[few], seen[many]
    growth = {"device": device_later - device, "process": process_later - process}
    return {"growth": growth, "steps": many - few, "ok": growth["device"] <= 0 and growth["process"] < 32 << 20}


def _batches(workload: Workload, count: int) -> list[tuple[Tensor, ...]]:
    """Batches of the same shapes, each with other numbers: the floating ones scaled, the others turned."""
    return [tuple(x * (1 + n) if x.is_floating_point() else x.roll(n, 0) for x in workload.batch) for n in range(count)]


def _close(ours: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return _distance(ours, expected) < 1e-4


def check_streams(place: Place) -> Found:
    """Steps in turn on two streams, each with its own batch that comes late: results are those of one stream."""
    torch._dynamo.reset()
    workload = build_model("gpt", "tiny", place.device, dropout=False)
    loss = compile_with("ort_train", workload.module)
    batches = _batches(workload, 6)
    expected = [_gradients(workload.module, Workload(workload.module, batch)) for batch in batches]
    _gradients(loss, workload)
    place.wait()
    wrong = []
    for turn, (batch, right) in enumerate(zip(batches, expected, strict=True)):
        with place.new_stream() if turn % 2 else contextlib.nullcontext():
            late = tuple(torch.empty_like(tensor) for tensor in batch)
            place.delay()
            for tensor, source in zip(late, batch, strict=True):
                tensor.copy_(source)
            results = [result + 0 for result in _gradients(loss, Workload(workload.module, late))]
            del late
            for size in (1 << 12, 1 << 16, 1 << 20):  # memory that was freed too early is overwritten
                torch.full((size,), float("nan"), device=place.device)
        place.wait()
        if not _close(results, right):
            wrong.append(turn)
    return {"wrong turns": wrong, "ok": not wrong}


def check_threads(place: Place) -> Found:
    """Two threads, each on its own stream and with its own batches, run one compiled model."""
    torch._dynamo.reset()
    workload = build_model("gpt", "tiny", place.device, dropout=False)
    loss = compile_with("ort_train", workload.module)
    _gradients(loss, workload)
    batches = _batches(workload, 2)
    expected = [_gradients(workload.module, Workload(workload.module, batch)) for batch in batches]
    place.wait()
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with place.new_stream():
                for turn in range(20):
                    results = _gradients(loss, Workload(workload.module, batches[number]))
                    if not _close(results, expected[number]):
                        wrong.append(f"thread {number}, turn {turn}")
        except Exception as error:  # a thread's error would end in its own traceback alone
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"wrong": wrong, "ok": not wrong}


def check_graphs(place: Place) -> Found:
    """Losses of steps that are replayed by CUDA graphs are those of steps that are not."""
    torch._dynamo.reset()
    counters.clear()
    losses: dict[str | None, list[float]] = {}
    for mode in (None, "reduce-overhead"):
        workload = build_model("gpt", "tiny", place.device, dropout=False)
        compiled: Callable[..., Tensor] = torch.compile(
            workload.module, backend="ort_train", mode=mode, fullgraph=True, dynamic=False
        )
        losses[mode] = _trained(compiled, workload.module, _batches(workload, 8))
    apart = max(abs(one - other) / abs(one) for one, other in zip(*losses.values(), strict=True))
    refused = dict(counters["ort_train_not_recorded"])
    return {"apart": apart, "refused": refused, "ok": apart < 1e-4 and not refused}


def _trained(step: Callable[..., Tensor], module: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CHECKS: dict[str, Callable[[Place], Found]] = {
    **{f"float32 {name}": lambda place, name=name: check_numbers(place, name, None) for name in SMALL},
    **{f"bfloat16 {name}": lambda place, name=name: check_numbers(place, name, torch.bfloat16) for name in SMALL},
    "copies": check_copies,
    "memcpy nodes": check_memcpy_nodes,
    "two streams": check_streams,
    "two threads": check_threads,
    "flat memory": check_flat_memory,
    "cuda graphs": check_graphs,
}
"""name -> check, in their order."""
