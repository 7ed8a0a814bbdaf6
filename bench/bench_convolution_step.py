"""Times of conv nets, with one thread and with all, in units of eager's and of inductor's.

Measured are a training step, and inference in eval mode under no_grad, with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from bench.contestants import TrainingStep, compile_with
from bench.conv_nets import CONV_NETS, build_conv_net
from bench.results import Compare
from bench.workloads import Size, Workload

_ROUNDS = {"tiny": 1, "small": 12, "medium": 6}

_WARM_UP_STEPS = 3


@pytest.fixture(params=[1, None], ids=["one thread", "all threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param or before)
    yield str(torch.get_num_threads())
    torch.set_num_threads(before)


@pytest.mark.parametrize("net", CONV_NETS)
def test_convolution_step(net: str, threads: str, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    torch._dynamo.reset()  # compiled graphs depend on the number of threads
    steps = {backend: TrainingStep(build_conv_net(net, size), backend) for backend in backends}
    losses = {backend: torch.stack([step() for _ in range(_WARM_UP_STEPS)]) for backend, step in steps.items()}
    torch.testing.assert_close(losses["ort_train"], losses["eager"], rtol=1e-2, atol=1e-3)
    compare("convolution step", f"{net}, {threads} thread(s)", steps, _ROUNDS[size])


@pytest.mark.parametrize("net", CONV_NETS)
def test_convolution_inference(net: str, threads: str, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    torch._dynamo.reset()
    inferences = {backend: _inference(build_conv_net(net, size), backend) for backend in backends}
    losses = {backend: [call() for _ in range(_WARM_UP_STEPS)][-1] for backend, call in inferences.items()}
    torch.testing.assert_close(losses["ort_train"], losses["eager"], rtol=1e-3, atol=1e-4)
    compare("convolution inference", f"{net}, {threads} thread(s)", inferences, _ROUNDS[size])


def _inference(workload: Workload, backend: str) -> Callable[[], torch.Tensor]:
    with torch.no_grad():
        for _ in range(_WARM_UP_STEPS):
            workload.module(*workload.batch)  # in training mode: running statistics that fit
    function = compile_with(backend, workload.module.eval())

    def call() -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = function(*workload.batch)
        return loss

    return call
