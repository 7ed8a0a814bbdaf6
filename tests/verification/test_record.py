"""Recorded graphs replay their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.compilation.choose_target import placement_threads
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.options.groups import parse_options
from ort_dynamo.verification.record import Recorder, random_states_set


def backend_of(recorder: Recorder) -> Callable[..., Any]:
    options = parse_options(None, None)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return Compilation(options, torch.device("cpu"), placement_threads(options), recorder).run(gm, inputs)

    return backend


def test_random_numbers_are_those_of_the_recorded_run_and_torch_goes_on_as_before() -> None:
    recorder = Recorder()
    compiled = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend=backend_of(recorder))
    x = torch.ones(100)
    with recorder.recording():
        dropped = compiled(x)
    (run,) = recorder.runs
    assert list(run.generators) == [torch.device("cpu")]
    before = torch.get_rng_state()
    with random_states_set(run.generators):
        assert torch.equal(torch.nn.functional.dropout(x, 0.5), dropped)
    assert torch.equal(torch.get_rng_state(), before)
