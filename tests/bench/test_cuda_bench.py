"""Tests of bench/cuda.py on the CPU, with the code that measures a device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
import torch

cuda = pytest.importorskip("bench.cuda", reason="bench is importable under `python -m pytest` only")
checks = pytest.importorskip("bench.cuda_checks")
models = pytest.importorskip("bench.cuda_models")
places = pytest.importorskip("bench.cuda_device")
speed = pytest.importorskip("bench.cuda_speed")

CPU = torch.device("cpu")


@pytest.fixture
def place() -> Any:
    return places.Place(CPU, "tiny", time.monotonic() + 600)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    conv: Any = torch.backends.cudnn.conv
    kept = torch.get_float32_matmul_precision(), conv.fp32_precision
    yield
    torch.set_float32_matmul_precision(kept[0])
    conv.fp32_precision = kept[1]


def run(tmp_path: Path, *given: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "cuda.json"
    status = cuda.main(["--device", "cpu", "--scale", "tiny", "--out", str(out), *given])
    found: dict[str, Any] = json.loads(out.read_text())
    return status, found


def test_a_model_is_checked_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(speed.CONTESTANTS, "inductor")  # a C++ compiler is not everywhere
    status, found = run(tmp_path, "--only", "mlp")
    assert status == 0
    assert list(found["parts"]) == ["float32 mlp", "bfloat16 mlp", "step of mlp"]
    assert found["parts"]["float32 mlp"]["nodes"]["eager"] == 0
    step = found["parts"]["step of mlp"]
    assert set(step["seconds"]) == {"eager", "ort_train", "ort_train, recorded"}
    assert set(step["ratios"]) == {"ort_train/eager", "ort_train, recorded/eager"}
    assert all(share > 0 for share in step["share of the product rate"].values())
    assert "ort_train/eager: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["copies", "memcpy nodes", "two streams", "two threads", "cuda graphs", "float32 unet"]
)
def test_a_check_passes_on_the_cpu(place: Any, name: str) -> None:
    assert checks.CHECKS[name](place)["ok"]


def test_every_model_builds_alike_from_equal_seeds() -> None:
    for name in (*models.SMALL, *models.LARGE):
        one, other = (models.build_model(name, "tiny", CPU, seed=3) for _ in range(2))
        assert all(map(torch.equal, one.module.state_dict().values(), other.module.state_dict().values()))
        assert all(map(torch.equal, one.batch, other.batch))


def test_a_part_that_fails_loses_nothing_of_the_others(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[int] = []

    def fails(place: Any) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    parts = {"one": lambda _: {"ok": True, "x": 1.5}, "two": fails, "three": lambda _: {"ok": False, "y": {"a": 2}}}
    found = cuda.run_parts(parts, place, lambda so_far: kept.append(len(so_far)))
    assert kept == [1, 2, 3, 3]
    assert [one["ok"] for one in found.values()] == [True, False, False]
    assert "fails" in found["two"]["at"]
    assert cuda.table(found) == [
        "ok      one: x 1.5",
        "FAILED  two: RuntimeError: CUDA error: an illegal memory access was encountered",
        "FAILED  three: y {a: 2}",
    ]


def test_a_failure_is_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PARTS", {"one": lambda _: {"ok": False}})
    assert run(tmp_path)[0] == 1


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--seconds", "0", "--only", "mlp")
    assert status == 1
    assert {one["error"] for one in found["parts"].values()} == {"the time was over"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_how_to_try_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "run_parts", None)  # not to be called
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "none")
    assert ended.value.code == 2
    assert "cannot write --out: " in capsys.readouterr().err


def test_a_contestant_that_fails_is_named_and_the_others_are_measured(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(function: Any) -> Any:
        def fails(*_: Any) -> None:
            raise RuntimeError("no")

        return fails

    monkeypatch.setattr(speed, "CONTESTANTS", {"eager": lambda f: f, "inductor": refuses})
    found = speed.measure(place, "mlp")
    assert found["absent"] == {"inductor": "RuntimeError: no"}
    assert set(found["seconds"]) == {"eager"}
    assert not found["ok"]


def test_wrong_numbers_are_seen(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "compile_with", lambda backend, module, options=None: lambda *x: module(*x) * 1.001)
    assert not checks.check_streams(place)["ok"]
    assert not checks.check_numbers(place, "mlp", None)["ok"]


def test_copies_are_told_apart_by_their_names() -> None:
    names = ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD (Device -> Device)"]
    assert checks.copies([*names, "aten::copy_", "HtoD", *names[:1]]) == {"HtoD": 2, "DtoH": 1, "DtoD": 1}


def test_copying_nodes_are_counted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no optimized model"):
        checks.memcpy_nodes(tmp_path)
    (tmp_path / "optimized").mkdir()
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { a = MemcpyToHost (x) y = Relu (a) }'
    )
    onnx.save(model, tmp_path / "optimized" / "forward.onnx")
    assert checks.memcpy_nodes(tmp_path) == {"MemcpyToHost": 1}


def test_contestants_take_turns_in_every_order() -> None:
    seen: list[str] = []
    steps = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    samples = speed.interleaved(steps, lambda step: step() or float(len(seen)), 6)
    assert {len(values) for values in samples.values()} == {6}
    assert len({tuple(seen[i : i + 3]) for i in range(0, 18, 3)}) == 6
