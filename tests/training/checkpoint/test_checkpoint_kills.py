"""A saver that is killed leaves a whole file or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, random, signal, sys, time, warnings

from ort_dynamo.training import _checkpoint_storage as storage, checkpoint

assert "h5py" not in sys.modules, "importing the module imports h5py"

import h5py
import numpy as np

warnings.simplefilter("ignore", DeprecationWarning)  # fork beside torch's threads; the child uses none of them
kills, folder = int(sys.argv[1]), sys.argv[2]
delays = random.Random(kills)
state = {"model": {"full_precision": {str(i): np.full((100, 100), i, np.float32) for i in range(50)}}}
whole, patience = 0, 1
for number in range(kills):
    child = os.fork()
    if child == 0:
        for save in range(10000):
            storage.save(state, f"{folder}/{number}.{save}")
        os._exit(0)
    time.sleep((0.02 + delays.random() * 0.1) * patience)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    for name in os.listdir(folder):
        if not name.endswith(".tmp"):
            found = storage.load(f"{folder}/{name}")["model"]["full_precision"]
            assert sorted(found) == sorted(state["model"]["full_precision"]), name
            assert all((found[str(i)] == i).all() for i in range(50)), name
            whole += 1
        os.unlink(f"{folder}/{name}")
    patience *= 1 if whole else 2  # a busy machine
print(whole)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_a_file_is_whole_or_absent_when_its_saver_is_killed(kills: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(kills), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no save was fast enough; nothing was tested"
