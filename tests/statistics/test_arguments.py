"""The arguments of collect_statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo import collect_statistics
from ort_dynamo.errors import InvalidArgumentError


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every_is_a_number_above_zero(every: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="every"), collect_statistics(every=every):
        pass


@pytest.mark.parametrize("modules", [3, [3], ["0", None], nn.Linear(2, 2)])
def test_modules_are_paths(modules: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="modules"), collect_statistics(modules=modules):
        pass


def test_a_run_without_a_value_of_the_modules_is_not_taken_for_no_run() -> None:
    compiled = torch.compile(nn.Linear(8, 4), backend="ort_train")
    with collect_statistics(modules="layers.*") as run:
        compiled(torch.randn(4, 8)).sum().backward()
    assert str(run) == (
        "0 values, 0 graphs, 0 steps\nGraphs of ort_train ran, and no value of theirs was collected. "
        "Are `modules` paths as in named_modules()?"
    )
