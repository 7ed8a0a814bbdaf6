"""Section 2.8 of ORTTrainer's reference: loss scalers."""

from __future__ import annotations

import pytest

from ort_dynamo import TrainStepInfo, amp, optim
from ort_dynamo.training.amp.loss_scaler import DynamicLossScaler

INFO = TrainStepInfo(optim.SGDConfig())
OVERFLOW = TrainStepInfo(optim.SGDConfig(), all_finite=False)


def test_the_scale_doubles_after_each_window_and_halves_at_each_overflow() -> None:
    scaler = amp.DynamicLossScaler()
    assert (scaler.loss_scale, scaler.up_scale_window) == (2.0**16, 2000)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (1.0, 2.0**24)
    expected = 2.0**16
    for window in range(9):
        for count in range(1, 2000):
            assert scaler.update(INFO) == expected
            assert scaler._stable_steps_count == count
        expected = min(expected * 2, 2.0**24)
        assert scaler.update(INFO) == expected == 2.0 ** min(17 + window, 24)
        assert scaler._stable_steps_count == 0
    for exponent in [*range(23, -1, -1), 0, 0, 0]:
        assert scaler.update(OVERFLOW) == 2.0**exponent


def test_an_overflow_starts_the_window_anew() -> None:
    scaler = DynamicLossScaler(loss_scale=4, up_scale_window=3)
    assert [scaler.update(info) for info in (INFO, INFO, OVERFLOW, INFO, INFO, INFO)] == [4, 4, 2, 2, 2, 4]
    assert isinstance(scaler.loss_scale, float)


def test_the_users_values_are_used() -> None:
    scaler = amp.loss_scaler.DynamicLossScaler(
        automatic_update=False, loss_scale=3, up_scale_window=7, min_loss_scale=5, max_loss_scale=10
    )
    assert scaler.automatic_update is False
    assert (scaler.loss_scale, scaler.min_loss_scale, scaler.max_loss_scale) == (3, 5, 10)
    assert scaler.up_scale_window == 7


def test_without_automatic_updates_the_scale_is_static() -> None:
    scaler = DynamicLossScaler(automatic_update=False, loss_scale=8.0, up_scale_window=1)
    assert [scaler.update(info) for info in (INFO, OVERFLOW, INFO)] == [8.0, 8.0, 8.0]


def test_a_reset_goes_back_to_the_first_scale_and_count() -> None:
    scaler = DynamicLossScaler(loss_scale=8.0)
    scaler.update(OVERFLOW)
    scaler.update(INFO)
    scaler.reset()
    assert (scaler.loss_scale, scaler._stable_steps_count) == (8.0, 0)
    plain = amp.LossScaler(2.0)
    plain.loss_scale = 5
    plain.reset()
    assert plain.loss_scale == 2.0


def test_the_base_has_no_rule_of_its_own() -> None:
    with pytest.raises(NotImplementedError):
        amp.LossScaler(loss_scale=float(1 << 16)).update(INFO)


@pytest.mark.parametrize("scale", [0, -1.0, None, "1", float("nan")])
def test_a_scale_is_a_number_above_zero(scale: object) -> None:
    scaler = amp.LossScaler(1.0)
    with pytest.raises(AssertionError, match=r"^'loss_scale' must be a positive float$"):
        amp.LossScaler(scale)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"^'loss_scale' must be a positive float$"):
        scaler.loss_scale = scale  # type: ignore[assignment]
    assert scaler.loss_scale == 1.0


def test_the_name_of_the_input_is_text() -> None:
    scaler = amp.DynamicLossScaler()
    assert scaler.input_name is None
    scaler.input_name = "scale"
    assert scaler.input_name == "scale"
    with pytest.raises(AssertionError, match=r"^'input_name' must be a string$"):
        scaler.input_name = None  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"^'input_name' cannot be empty$"):
        scaler.input_name = ""
