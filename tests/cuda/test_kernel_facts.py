"""The facts of kernel_facts.py hold: on the CPU, and on a device where there is one."""

from __future__ import annotations

import pytest
from kernel_facts import FACTS, Fact


def check(fact: Fact, device: str) -> None:
    found = fact.find(device)
    assert fact.meets(device, found), f"expected {fact.expected[device]}, found {found}"


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_holds_on_the_cpu(name: str) -> None:
    check(FACTS[name], "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("name", FACTS)
def test_a_fact_holds_on_cuda(name: str) -> None:
    check(FACTS[name], "cuda")


def test_a_fact_can_be_wrong() -> None:
    fact = Fact(lambda device: "1", {"cpu": "2", "cuda": "not 1"})
    assert [fact.meets(device, found) for device, found in (("cpu", "1"), ("cpu", "2"))] == [False, True]
    assert [fact.meets(device, found) for device, found in (("cuda", "1"), ("cuda", "2"))] == [False, True]
    assert fact.meets("other", "3")
