"""Tests of the on-disk cache across processes: the same results, and no entry of another graph."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from forked import run_program
from torch import nn

from ort_dynamo.cache import disk, open_island
from ort_dynamo.cache.disk import COUNTS
from ort_dynamo.cache.entry import read_entry, read_header
from ort_dynamo.cache.folder import SUFFIX
from ort_dynamo.listeners import trace_cache
from ort_dynamo.report.record import RECORDS

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
import torch
from ort_dynamo.cache.disk import COUNTS
from ort_dynamo.report.record import RECORDS

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
step = torch.compile(model, backend="ort_train", options=json.loads(sys.argv[1]))
losses = []
for _ in range(3):
    loss = step(torch.ones(3, 4)).square().sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    losses.append(loss.item().hex())
islands = [island for record in RECORDS for graph in record.graphs for island in graph.islands]
print(json.dumps({"losses": losses, "sources": [i.source for i in islands], "misses": [i.miss for i in islands],
                  "counts": COUNTS}))
"""


def started(
    folder: Path, options: Mapping[str, Any] = {}, program: str = PROGRAM, cwd: Path | None = None, **variables: str
) -> subprocess.Popen[str]:
    environment = {**os.environ, "ORT_DYNAMO_CACHE": "1", "ORT_DYNAMO_CACHE_DIR": str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(options)],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return {**json.loads(out.splitlines()[-1]), "stderr": err}


def ran(folder: Path, options: Mapping[str, Any] = {}, **variables: str) -> dict[str, Any]:
    environment = {**os.environ, "ORT_DYNAMO_CACHE": "1", "ORT_DYNAMO_CACHE_DIR": str(folder), **variables}
    done = run_program(PROGRAM, json.dumps(options), env=environment)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that compiles of this process store in."""
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "_said", {})
    COUNTS.clear()
    return tmp_path / "cache"


def step(**options: Any) -> list[float]:
    """The loss and a gradient of a small model, compiled as in a new process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    loss = torch.compile(model, backend="ort_train", options=options)(torch.ones(3, 4)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    first = model[0].weight
    assert isinstance(first, nn.Parameter)
    assert first.grad is not None
    return [loss.item(), *first.grad.flatten().tolist()]


def sources() -> list[str]:
    return [island.source for record in RECORDS for graph in record.graphs for island in graph.islands]


def misses() -> list[str]:
    return [island.miss for record in RECORDS for graph in record.graphs for island in graph.islands]


def files(place: Path) -> list[Path]:
    return sorted(place.glob(f"*{SUFFIX}"))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "ort_dynamo.cache.disk"]


def test_second_process_reads_the_first_ones_entries_and_trains_the_same(tmp_path: Path) -> None:
    first = ran(tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    renamed = PROGRAM.replace("model", "network").replace("step", "call").replace("loss", "value")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    second = ended(
        started(
            tmp_path / "cache",
            program=renamed.replace('"value', '"loss'),
            cwd=tmp_path / "elsewhere",
            PYTHONHASHSEED="2",
            PYTHONPATH=path,
        )
    )
    assert (first["sources"], first["misses"]) == (["built"] * 2, ["absent"] * 2)
    assert (second["sources"], second["misses"]) == (["disk"] * 2, [""] * 2)
    assert second["losses"] == first["losses"]
    assert (first["counts"], second["counts"]) == ({"absent": 2}, {"hit": 2})


@pytest.mark.parametrize(
    "edited", ["lowering/ops/elementwise/activation.py", "passes/pipelines.py", "graph/boundary.py"]
)
def test_edited_sources_read_nothing(tmp_path: Path, edited: str) -> None:
    package = tmp_path / "package"
    shutil.copytree(ROOT / "ort_dynamo", package / "ort_dynamo", ignore=shutil.ignore_patterns("__pycache__"))
    digest = "from ort_dynamo.cache.source_code import source_digest as d; print(d())"

    def sources_digest() -> str:
        environment = {**os.environ, "PYTHONPATH": str(package)}
        return subprocess.run(
            [sys.executable, "-c", digest], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    first = sources_digest()
    assert sources_digest() == first
    file = package / "ort_dynamo" / edited
    file.write_text(file.read_text() + "# edited\n")
    assert sources_digest() != first


@pytest.mark.slow
def test_compiles_that_are_killed_leave_a_usable_cache(tmp_path: Path) -> None:
    whole = ran(tmp_path / "alone")
    moments = random.Random(0)
    for _ in range(100):
        process = started(tmp_path / "cache")
        time.sleep(moments.random() * 6)  # of some 4 seconds
        process.kill()
        process.communicate()
        for file in files(tmp_path / "cache"):
            read_entry(file.read_bytes(), file.stem)
    assert ran(tmp_path / "cache")["losses"] == whole["losses"]


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_that_start_together_all_train(tmp_path: Path, count: int) -> None:
    found = [ended(one) for one in [started(tmp_path / "cache") for _ in range(count)]]
    assert len({tuple(one["losses"]) for one in found}) == 1
    assert len(files(tmp_path / "cache")) == 2
    assert not [one for one in (tmp_path / "cache").iterdir() if one.suffix != SUFFIX]
    assert ran(tmp_path / "cache")["sources"] == ["disk"] * 2


def test_a_graph_is_read_after_a_reset(place: Path) -> None:
    first = step()
    assert (sources(), len(files(place))) == (["built", "built"], 2)
    assert step() == first
    assert sources() == ["disk", "disk"]


def test_memory_comes_before_the_disk(place: Path) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() * 2, backend="ort_train")(torch.ones(3))
    torch.compile(lambda y: y.sin() * 2, backend="ort_train")(torch.ones(3))
    assert sources() == ["built", "memory"]
    assert COUNTS == {"absent": 1}


@pytest.mark.parametrize(
    "options",
    [{"graph_optimization": "basic"}, {"debug": {"fuse": False}}, {"threads": 3}, {"debug": {"contrib_ops": False}}],
    ids=str,
)
def test_other_options_are_other_graphs(place: Path, options: dict[str, Any]) -> None:
    step()
    step(**options)
    assert sources() == ["built", "built"]
    assert len(files(place)) == 4


def test_another_version_of_the_sources_reads_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step()
    monkeypatch.setattr(disk, "source_digest", lambda: "another")
    step()
    assert sources() == ["built", "built"]


@pytest.mark.parametrize("fact", [0, 1])
def test_another_build_or_processor_reads_nothing(place: Path, monkeypatch: pytest.MonkeyPatch, fact: int) -> None:
    step()
    facts = list(open_island.runtime_facts())
    facts[fact] += " another"
    for module in (open_island, trace_cache):
        monkeypatch.setattr(module, "runtime_facts", lambda: tuple(facts))
    step()
    assert sources() == ["built", "built"]


def test_a_graph_that_is_saved_or_verified_is_built(place: Path, tmp_path: Path) -> None:
    step()
    step(save_onnx=str(tmp_path / "saved"))
    assert misses() == ["off", "off"]
    assert list((tmp_path / "saved").glob("*.onnx"))
    step(debug={"verify": True})
    assert misses() == ["off", "off"]


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def pickled(file: Path) -> None:
    file.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def unopenable(file: Path) -> None:
    """An entry with a right checksum whose model no runtime opens, from an origin that the graph does not have."""
    header, model = read_header(file.read_bytes())
    header["origins"] = {"Gather": 10**6}
    proto = onnx.ModelProto.FromString(bytes(model))
    proto.graph.node[0].op_type = "NoSuchOperator"
    spelled = json.dumps(header).encode()
    body = struct.pack("<Q", len(spelled)) + spelled + proto.SerializeToString()
    file.write_bytes(file.read_bytes()[:8] + hashlib.sha256(body).digest() + body)


def swapped(file: Path) -> None:
    (other,) = {*files(file.parent)} - {file}
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("spoil", "miss", "reason"),
    [
        (damage, "damaged", "its checksum is wrong"),
        (empty, "damaged", "it is not a cache entry"),
        (pickled, "damaged", "it is not a cache entry"),
        (swapped, "damaged", "it is the entry of"),
        (unopenable, "damaged", "NoSuchOperator"),
        (linked, "refused", "it is a link"),
        (piped, "refused", "it is not a regular file"),
    ],
)
def test_invalid_entry_is_a_miss_with_one_warning(
    place: Path, caplog: pytest.LogCaptureFixture, spoil: Any, miss: str, reason: str
) -> None:
    first = step()
    spoil(files(place)[0])
    assert step() == first
    assert sorted(misses()) == ["", miss]
    assert [reason in text for text in said(caplog)] == [True]
    assert step() == first
    assert sources() == ["disk", "disk"]  # the rebuilt island took its place


def test_a_folder_that_others_can_write_is_not_used(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = step()
    place.chmod(0o777)
    assert step() == first
    assert misses() == ["refused", "refused"]
    assert len(said(caplog)) == 2  # it is not read, and not written
    assert all("can be written by other users" in text for text in said(caplog))


def test_full_disk_leaves_no_entry_and_one_warning(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    first = step()
    for file in files(place):
        file.unlink()
    monkeypatch.setattr(os, "replace", full)
    assert step() == first
    assert list(place.iterdir()) == []
    (text,) = said(caplog)
    assert "cannot be written: [Errno 28] No space left on device" in text


def test_a_folder_that_cannot_be_made_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    step()
    assert misses() == ["unreadable", "unreadable"]
    assert len(said(caplog)) == 2
    assert all("The run goes on without it. Set options={'cache': FOLDER}" in text for text in said(caplog))


def test_a_folder_that_can_only_be_read_is_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes where it likes")
    ran(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o500)
    assert ran(tmp_path / "cache")["sources"] == ["disk"] * 2
    assert "cannot be written" in ran(tmp_path / "cache", {"debug": {"fuse": False}})["stderr"]


def test_the_option_wins_over_the_variable(place: Path, tmp_path: Path) -> None:
    step(cache=str(tmp_path / "own"))
    assert (len(files(tmp_path / "own")), place.exists()) == (2, False)
    step(cache=False)
    assert (misses(), place.exists()) == (["off", "off"], False)


def test_the_variable_leaves_it_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "0")
    step()
    assert (misses(), place.exists()) == (["off", "off"], False)
    step(cache=True)
    assert len(files(place)) == 2


def test_cache_size_bounds_the_entries(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step()
    largest = max(file.stat().st_size for file in files(place))
    monkeypatch.setenv("ORT_DYNAMO_CACHE_SIZE", str(largest + 100))
    step(debug={"fuse": False})
    assert len(files(place)) == 1
