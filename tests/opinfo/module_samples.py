"""PyTorch's module database: every torch.nn module with sample arguments, as one function of (args, kwargs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from opinfo_samples import TOLERANCES, quiet
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from ort_dynamo.testing import assert_close, observe

__all__ = ["Call", "assert_module_like_eager", "modules", "samples_of_module"]


class Call(nn.Module):
    """Calls a module with a tuple and a dict of arguments, so that gradients are taken for keyword arguments, too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The module's result."""
        return self.module(*args, **kwargs)


@cache
def modules() -> dict[str, ModuleInfo]:
    """Name -> module that takes float32 on the CPU."""
    return {info.name: info for info in module_db if torch.float32 in info.supported_dtypes("cpu")}


def samples_of_module(info: ModuleInfo, training: bool) -> Iterator[tuple[Call, ModuleInput]]:
    """The module, made and in train() or eval() mode, with each sample of its arguments; float32, on the CPU."""
    torch.manual_seed(0)
    with quiet():
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for sample in inputs:
            if sample.forward_input is None:
                continue
            made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            yield Call(made.to(torch.float32).train(training)), sample


def assert_module_like_eager(module: Call, sample: ModuleInput) -> bool:
    """Compare outputs, gradients, buffers and arguments after one forward and backward.

    Returns:
        True if anything was compiled: where Dynamo gives no graph, eager has run twice.

    Raises:
        AssertionError: with the differences.
    """
    counters.clear()
    torch._dynamo.reset()
    arguments = (sample.forward_input.args, dict(sample.forward_input.kwargs))
    with quiet(), config.patch(allow_rnn=True):
        expected = observe(module, arguments, seed=0)
        actual = observe(module, arguments, 0, True, lambda f: torch.compile(f, backend="ort_train"))
    assert actual.keys() == expected.keys(), f"{sorted(actual)} is not {sorted(expected)}"
    for what, value in expected.items():
        strides = what.startswith("output")
        assert_close(actual[what], value, what, TOLERANCES[torch.float32], strides=strides)
    return bool(counters["ort_train"]["graphs"])
