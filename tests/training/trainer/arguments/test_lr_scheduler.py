"""Section 2.7 of ORTTrainer's reference: schedules of the learning rate."""

from __future__ import annotations

from typing import Any

import pytest

from ort_dynamo import TrainStepInfo, optim
from ort_dynamo.training.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

KINDS = (ConstantWarmupLRScheduler, CosineWarmupLRScheduler, LinearWarmupLRScheduler, PolyWarmupLRScheduler)


def rates(scheduler: _LRScheduler, lr: float = 1.0, steps: int = 10) -> list[float]:
    config, found = optim.SGDConfig(lr=lr), []
    for step in range(steps):
        given = scheduler._step(TrainStepInfo(config, optimization_step=step))
        assert scheduler.get_last_lr() == given
        found += given
    assert len(found) == steps
    return found


WARMUP = [0.0, 0.2, 0.4, 0.6, 0.8]
POSITIONAL = {
    ConstantWarmupLRScheduler: [*WARMUP, 1.0, 1.0, 1.0, 1.0, 1.0],
    # The second argument is the number of cycles.
    CosineWarmupLRScheduler: [
        *(0.0, 0.9763960957919413, 0.9059835861602854, 0.7956724530494887, 0.6563036824392345),
        *(0.5015739416158049, 0.34668951940611276, 0.2068719061737831, 0.09586187986225325, 0.0245691111902418),
    ],
    LinearWarmupLRScheduler: [*WARMUP, 1.0, 0.8, 0.6, 0.4, 0.2],
    # The second argument is the last learning rate.
    PolyWarmupLRScheduler: [
        *(0.0, 0.9509018036072144, 0.9008016032064128, 0.8507014028056112, 0.8006012024048097),
        *(0.750501002004008, 0.7004008016032064, 0.6503006012024048, 0.6002004008016032, 0.5501002004008015),
    ],
}
BY_NAME = {
    ConstantWarmupLRScheduler: [*WARMUP, 1.0, 1.0, 1.0, 1.0, 1.0],
    CosineWarmupLRScheduler: [
        *(*WARMUP, 1.0),
        *(0.9045084971874737, 0.6545084971874737, 0.34549150281252633, 0.09549150281252633),
    ],
    LinearWarmupLRScheduler: [*WARMUP, 1.0, 0.8, 0.6, 0.4, 0.2],
    PolyWarmupLRScheduler: [*WARMUP, 1.0, 0.80000002, 0.60000004, 0.40000006, 0.20000008],
}


@pytest.mark.parametrize("kind", KINDS)
def test_positional_arguments_have_their_old_order(kind: Any) -> None:
    assert rates(kind(10, 0.5)) == pytest.approx(POSITIONAL[kind], rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_steps_may_be_warm_up(kind: Any) -> None:
    scheduler = kind(total_steps=10, warmup=0.5)
    assert (scheduler.total_steps, scheduler.warmup) == (10, 0.5)
    assert scheduler.get_last_lr() == []
    assert rates(scheduler) == pytest.approx(BY_NAME[kind], rel=1e-12)


@pytest.mark.parametrize("kind", [ConstantWarmupLRScheduler, CosineWarmupLRScheduler, LinearWarmupLRScheduler])
def test_the_configured_rate_is_scaled(kind: Any) -> None:
    expected = [0.3 * rate for rate in BY_NAME[kind]]
    assert rates(kind(10, warmup=0.5), lr=0.3) == pytest.approx(expected, rel=1e-12)


def test_a_polynomial_ends_at_its_last_rate_and_stays() -> None:
    found = rates(PolyWarmupLRScheduler(4, lr_end=0.1, power=2.0, warmup=0.0), lr=0.5, steps=8)
    assert found == pytest.approx([0.4 * (1 - step / 4) ** 2 + 0.1 for step in range(5)] + [0.1] * 3)


def test_after_the_last_step_a_line_stays_at_zero_and_a_cosine_rises_again() -> None:
    assert rates(LinearWarmupLRScheduler(4, 0.0), steps=7)[4:] == [0.0, 0.0, 0.0]
    assert rates(CosineWarmupLRScheduler(4, warmup=0.0), steps=9)[4::4] == pytest.approx([0.0, 1.0])


def test_a_warm_up_of_less_than_one_step_starts_at_zero() -> None:
    assert rates(LinearWarmupLRScheduler(10), steps=3) == pytest.approx([0.0, 9 / 9.98, 8 / 9.98])
    assert rates(ConstantWarmupLRScheduler(10, 0.0), steps=2) == [1.0, 1.0]


def test_a_polynomial_needs_a_rate_above_its_last() -> None:
    scheduler = PolyWarmupLRScheduler(10, lr_end=0.5)
    with pytest.raises(AssertionError) as caught:
        rates(scheduler, lr=0.5)
    assert str(caught.value) == "lr_end (0.5) must be smaller than initial lr (0.5)"


TOTAL = "total_steps must be a strict positive number"
FRACTION = "warmup must be a float between (0, 1]"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_steps": 0}, TOTAL),
        ({"total_steps": -3}, TOTAL),
        ({"total_steps": 10.0}, TOTAL),
        ({"warmup": 1.0}, FRACTION),
        ({"warmup": -0.1}, FRACTION),
        ({"warmup": 0}, FRACTION),
        ({"warmup": float("nan")}, FRACTION),
    ],
)
def test_steps_and_warm_up_have_their_ranges(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        kind(**{"total_steps": 10, **settings})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (CosineWarmupLRScheduler, "cycles", 0.0, "cycles must be a positive float"),
        (CosineWarmupLRScheduler, "cycles", 1, "cycles must be a positive float"),
        (PolyWarmupLRScheduler, "lr_end", -1.0, "lr_end must be a positive float"),
        (PolyWarmupLRScheduler, "lr_end", 0, "lr_end must be a positive float"),
        (PolyWarmupLRScheduler, "power", -1.0, "power must be a positive float"),
        (PolyWarmupLRScheduler, "power", 1, "power must be a positive float"),
    ],
)
def test_arguments_of_a_schedule_are_checked_for_their_range(kind: Any, name: str, value: Any, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        kind(10, **{name: value})
    assert str(caught.value) == message


def test_a_schedule_of_ones_own_defines_the_rate() -> None:
    class Halving(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
            return [train_step_info.optimizer_config.lr / 2**train_step_info.optimization_step]

    assert rates(Halving(), steps=3) == [1.0, 0.5, 0.25]
    with pytest.raises(NotImplementedError):
        optim._LRScheduler().get_lr(TrainStepInfo(optim.SGDConfig()))
