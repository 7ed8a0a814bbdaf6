"""The recipes of docs/tools, and the program of docs/add_a_pass.md, run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"

NEEDED = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "peft": ["peft", "transformers"],
    "trainer": ["accelerate", "transformers"],
}
IN_CI = {"accelerate", "add_a_pass", "lightning"}  # test_trainer.py has a Trainer; the others are slow


def recipes() -> list[object]:
    found: list[object] = []
    for page in [DOCS / "add_a_pass.md", *sorted((DOCS / "tools").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        assert blocks, f"{page.name} has no recipe"
        marks = [] if page.stem in IN_CI else [pytest.mark.slow]
        found += [pytest.param(page.stem, block, marks=marks, id=f"{page.stem}-{i}") for i, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("page", "recipe"), recipes())
def test_a_recipe_runs(page: str, recipe: str, tmp_path: Path) -> None:
    for package in NEEDED.get(page, []):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", recipe], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if "summary()" in recipe:
        nodes = re.search(r"nodes: (\d+) in ONNX Runtime, \d+ in torch by design, 0 in eager", done.stdout)
        assert nodes is not None, done.stdout
        assert int(nodes[1]) > 0
