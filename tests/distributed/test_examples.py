"""The scripts of examples/distributed, each run as torchrun runs it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from ranks import Ranks, describe, script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
WORLDS = {"fsdp2_tp": 4}
"""Examples that need more than two ranks."""


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "checkpoint_resume"])
def test_an_example_trains(ranks: Ranks, name: str) -> None:
    results = ranks.outcomes(script, WORLDS.get(name, 2), str(EXAMPLES / f"{name}.py"))
    assert not any(result.exitcode for result in results), describe(results)
    found = losses("".join(result.printed for result in results))
    assert list(found) == [5, 10, 15, 20]
    assert found[20] < found[5]


def train_on(ranks: Ranks, world: int, place: Path) -> dict[int, float]:
    """Run the example with a checkpoint; the losses of the steps that it took."""
    results = ranks.outcomes(script, world, str(EXAMPLES / "checkpoint_resume.py"), str(place))
    assert all(result.exitcode == 0 for result in results), describe(results)
    return losses(results[0].printed)


def assert_goes_on(later: dict[int, float], before: dict[int, float], steps: range) -> None:
    assert list(later) == list(steps)
    for step in later.keys() & before.keys():
        assert later[step] == pytest.approx(before[step], rel=2e-5, abs=1e-6)


def test_training_goes_on_with_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    before = train_on(ranks, 4, place)
    assert list(before) == list(range(1, 11))
    assert_goes_on(train_on(ranks, 2, place), before, range(9, 11))


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    killed = Path(__file__).with_name("killed_while_it_writes.py")
    results = ranks.outcomes(script, 2, str(killed), str(EXAMPLES / "checkpoint_resume.py"), str(place))
    assert [result.exitcode for result in results] == [1, -signal.SIGKILL], describe(results)
    assert list((place / "unfinished-8").glob("__1_*"))
    assert [path.name for path in place.glob("step-*")] == ["step-0004"]
    before = losses(results[0].printed)
    assert list(before) == list(range(1, 9))
    assert_goes_on(train_on(ranks, 2, place), before, range(5, 11))
