"""A fixed sample of damaged input; `python tests/fuzz/fuzz.py --count 2000 --seed 1` is a long run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fuzz import COUNTS


def test_damaged_input_is_read_or_refused_by_its_error() -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^(\w+), seed 0: (.*)$", done.stdout, re.MULTILINE))
    assert found.keys() == COUNTS.keys()
    for said in found.values():
        counts = {state: int(count) for count, state in re.findall(r"(\d+) ([a-z ]+)", said)}
        assert counts["refused"], said
        assert set(counts) - {"refused", "no protobuf", "not saved"}, f"nothing was read: {said}"
