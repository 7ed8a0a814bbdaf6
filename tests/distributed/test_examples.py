"""The scripts of examples/distributed, each run as torchrun runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import Ranks, describe, script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "checkpoint_resume"])
def test_an_example_trains(ranks: Ranks, name: str) -> None:
    results = ranks.outcomes(script, 2, str(EXAMPLES / f"{name}.py"))
    assert [result.exitcode for result in results] == [0, 0], describe(results)
    found = losses("".join(result.printed for result in results))
    assert list(found) == [5, 10, 15, 20]
    assert found[20] < found[5]


def test_training_goes_on_with_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    runs = []
    for world in (4, 2):
        results = ranks.outcomes(script, world, str(EXAMPLES / "checkpoint_resume.py"), str(place))
        assert all(result.exitcode == 0 for result in results), describe(results)
        runs.append(losses(results[0].printed))
    assert list(runs[0]) == list(range(1, 11))
    assert list(runs[1]) == list(range(6, 11))
    for step, loss in runs[1].items():
        assert loss == pytest.approx(runs[0][step], rel=2e-5, abs=1e-6)
