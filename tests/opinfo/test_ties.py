"""Results that differ from eager's only among equal elements, and their nearest wrong neighbours."""

import pytest
import torch
from ties import assert_equal_but_for_ties, has_free_ties
from torch.testing._internal.opinfo.core import SampleInput

from ort_dynamo.testing import observe

SAMPLE = SampleInput(torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0], requires_grad=True), args=(2,))


def top(order):
    """Give the result of `topk(2)` of SAMPLE, with the indices `order`."""

    def function(x):
        positions = torch.tensor(order)
        return x.gather(0, positions), positions

    return observe(function, (SAMPLE.input,), seed=0)


def check(actual):
    assert_equal_but_for_ties("topk", SAMPLE, actual, top([4, 0]), None)


def test_another_of_two_equal_elements_passes():
    check(top([4, 2]))
    check(top([4, 0]))


@pytest.mark.parametrize("order", [[4, 1], [0, 4], [2, 0], [4, 4]])
def test_positions_of_other_values_fail(order):
    with pytest.raises(AssertionError):
        check(top(order))


def test_a_gradient_that_does_not_follow_the_positions_fails():
    other = top([4, 2])
    with pytest.raises(AssertionError, match="at output 1"):
        check({**other, "gradient of argument 0": top([4, 0])["gradient of argument 0"]})


def test_a_gradient_at_an_element_too_many_fails():
    other = top([4, 2])
    gradient = other["gradient of argument 0"] + torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    with pytest.raises(AssertionError, match="by value"):
        check({**other, "gradient of argument 0": gradient})


def test_a_place_named_twice_fails():
    twice = {**top([4, 0]), "output 1": torch.tensor([0, 0]), "output 0": torch.tensor([1.0, 1.0])}
    sample = SampleInput(SAMPLE.input, args=(2,))
    expected = {**twice, "output 1": torch.tensor([0, 2])}
    with pytest.raises(AssertionError, match="a place twice"):
        assert_equal_but_for_ties("topk", sample, twice, expected, None)


def test_only_operators_whose_order_is_open_are_compared_so():
    x = torch.rand(3)
    assert has_free_ties("sort", SampleInput(x))
    assert not has_free_ties("sort", SampleInput(x, kwargs={"stable": True}))
    assert has_free_ties("median", SampleInput(x, args=(0,)))
    assert not has_free_ties("median", SampleInput(x))
    assert not has_free_ties("max", SampleInput(x, args=(0,)))
