"""A cache folder that is full, read-only or disappears does not change a step."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import ran

PROGRAM = """
import json, os, resource, shutil, sys, threading
import torch
from ort_dynamo.cache.disk import COUNTS
from ort_dynamo.report.record import RECORDS

torch.set_num_threads(1)
folder, fault = sys.argv[1:]
if fault == "small files":
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))
over = threading.Event()


def remove():
    while not over.wait(0.001):
        shutil.rmtree(folder, ignore_errors=True)


if fault == "vanishes":
    threading.Thread(target=remove).start()
losses = []
for width in (4, 5):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    loss = torch.compile(model, backend="ort_train")(torch.ones(3, 4)).sum()
    loss.backward()
    losses.append([loss.item().hex(), model[0].weight.grad.sum().item().hex()])
    if fault == "is replaced" and width == 4:
        shutil.rmtree(folder)
        open(folder, "w").close()
over.set()
islands = [island for record in RECORDS for graph in record.graphs for island in graph.islands]
print(json.dumps({"losses": losses, "sources": [one.source for one in islands], "counts": COUNTS,
                  "native": sum(graph.native.total() for record in RECORDS for graph in record.graphs)}))
"""

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
"""Commands of a shell that let a folder be read only, also by root."""


def trained(folder: Path, fault: str = "", **given: Any) -> tuple[dict[str, Any], str]:
    out, err = ran(PROGRAM, str(folder), fault, ORT_DYNAMO_CACHE="1", ORT_DYNAMO_CACHE_DIR=str(folder), **given)
    return json.loads(out), err


@functools.cache
def mounts() -> bool:
    """Check whether a process may mount file systems of its own."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("mount")):
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=4k none /mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def mounted(command: str, folder: Path) -> tuple[str, ...]:
    """Give the beginning of a command line that runs after `command`, which sees the folder as $0."""
    return ("unshare", "-rm", "sh", "-c", f'{command} && exec "$@"', str(folder))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give the results of an undisturbed process; its entries stay in `folder`."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    found, err = trained(folder)
    assert found["sources"] == ["built"] * 4
    assert "cannot be" not in err
    return {**found, "folder": folder}


@pytest.mark.parametrize("fault", ["vanishes", "is replaced"])
def test_a_folder_that_goes_away(expected: dict[str, Any], tmp_path: Path, fault: str) -> None:
    found, err = trained(tmp_path / "cache", fault)
    assert found["losses"] == expected["losses"]
    assert found["sources"] == ["built"] * 4
    assert "Traceback" not in err
    if fault == "is replaced":
        assert "is not a folder" in err
        assert found["counts"]["refused"] == 2


def test_files_that_may_not_grow(expected: dict[str, Any], tmp_path: Path) -> None:
    found, err = trained(tmp_path / "cache", "small files")
    assert found["losses"] == expected["losses"]
    assert "cannot be written: [Errno 27]" in err
    assert found["native"] == expected["native"]  # the temporary files that ONNX Runtime writes are not needed
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk(expected: dict[str, Any], tmp_path: Path) -> None:
    if not mounts():
        pytest.skip("no file system can be mounted here")
    inside = mounted('mount -t tmpfs -o size=4k,mode=700 none "$0"', tmp_path)
    found, err = trained(tmp_path, inside=inside)
    assert found["losses"] == expected["losses"]
    assert "cannot be written: [Errno 28] No space left on device" in err


def test_a_folder_that_can_only_be_read_is_read(expected: dict[str, Any]) -> None:
    if not mounts():
        pytest.skip("no file system can be mounted here")
    inside = mounted(READ_ONLY, expected["folder"])
    found, err = trained(expected["folder"], inside=inside)
    assert found["losses"] == expected["losses"]
    assert found["sources"] == ["disk"] * 4
    assert "cannot be" not in err
    found, err = trained(expected["folder"], inside=inside, ORT_DYNAMO_CACHE_SIZE="1kb")  # too small for any entry
    assert found["losses"] == expected["losses"]
    assert "too large for an entry" in err


def test_a_folder_that_can_only_be_read_is_said_once(expected: dict[str, Any], tmp_path: Path) -> None:
    if not mounts():
        pytest.skip("no file system can be mounted here")
    tmp_path.chmod(0o700)
    found, err = trained(tmp_path, inside=mounted(READ_ONLY, tmp_path))
    assert found["losses"] == expected["losses"]
    assert found["sources"] == ["built"] * 4
    assert err.count("cannot be written: [Errno 30]") == 1


def test_commands_on_a_folder_that_can_only_be_read(expected: dict[str, Any]) -> None:
    if not mounts():
        pytest.skip("no file system can be mounted here")
    program = "import sys; from ort_dynamo.__main__ import main; print(main(['cache', *sys.argv[1:]]))"
    inside = mounted(READ_ONLY, expected["folder"])
    for action in ("list", "verify"):
        out, _ = ran(program, action, "--dir", str(expected["folder"]), inside=inside)
        assert out.splitlines()[-1] == "0"
        assert len(out.splitlines()) == {"list": 5, "verify": 2}[action]
    out, err = ran(program, "clear", "--dir", str(expected["folder"]), inside=inside)
    assert out == "2\n"
    assert "The cache of compiled graphs is not used: [Errno 30] Read-only file system" in err
