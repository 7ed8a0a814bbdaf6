"""The record of a compiled graph's memory, against figures by hand and against the live bytes of a run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ort_dynamo.capture.trace import trace
from ort_dynamo.compilation.cut import cut, mark
from ort_dynamo.options.groups import Options, RecomputeOptions
from ort_dynamo.passes.fx.analysis.memory import MemoryRecord, memory_record
from ort_dynamo.runtime.installed.providers import find_target


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all allocations that operators make and that are still alive, beside given ones."""

    def __init__(self, free: set[int], held: list[Any]) -> None:
        super().__init__()
        self._free = free
        self._views: Counter[int] = Counter()
        self._nbytes: dict[int, int] = {}
        self.peak = 0
        self._note(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result

    def _note(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and (key := allocation(value)) not in self._free:
                self._views[key] += 1
                self._nbytes[key] = value.untyped_storage().nbytes()
                weakref.finalize(value, self._forget, key)
        self.peak = max(self.peak, sum(self._nbytes.values()))

    def _forget(self, key: int) -> None:
        self._views[key] -= 1
        if not self._views[key]:
            del self._nbytes[key]


def allocation(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def observe(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> tuple[MemoryRecord, list[int]]:
    """The record of the one graph of `function`, and the peaks of its forward and backward, operator by operator."""
    records: list[MemoryRecord] = []
    peaks: list[int] = []
    own: set[int] = set()

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        target = find_target("cpu")
        mark(joint, Options(), target, 1)
        halves = cut(joint, inputs, Options(recompute=RecomputeOptions(**options)), target, **kwargs)
        records.append(memory_record(joint, halves.forward, halves.backward, kwargs["num_fwd_outputs"]))
        return halves.forward, halves.backward

    def tracked(gm: GraphModule, _: slice) -> Callable[..., Any]:
        def run(inputs: list[Any]) -> Any:
            tensors = [i for i in inputs if isinstance(i, Tensor)]
            if not peaks:
                own.update(map(allocation, tensors))
            live = LiveBytes(own, tensors)
            with live:
                result = Interpreter(gm).run(*inputs)
            peaks.append(live.peak)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd passes one list
        return run

    backend = partial(trace, forward=tracked, backward=tracked, inference=tracked, partition=partition)
    torch.compile(function, backend=backend, fullgraph=True)(*args).backward()
    (record,) = records
    return record, peaks


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_figures_of_a_small_graph_are_those_made_by_hand() -> None:
    record, _ = observe(lambda x, w: F.gelu(x @ w).sum(), weight(2, 3), weight(3, 4))
    (saved,) = record.saved
    assert (saved.name, saved.shape, saved.dtype, saved.nbytes) == ("mm", (2, 4), torch.float32, 32)
    assert saved.operator == "aten.mm.default"
    assert "record, _ = observe(lambda x, w: F.gelu(x @ w).sum()" in saved.where
    assert record.recomputed == ()
    assert record.nbytes == record.nbytes_without == 32
    assert record.forward_peak == 32 + 32 + 4  # product, GELU, sum
    # Product and cotangent live to the end; GELU's gradient to its last reader; two results.
    assert record.backward_peak == 32 + 4 + 32 + 48 + 24


def test_a_selection_takes_both_of_its_sides_while_it_runs() -> None:
    record, _ = observe(lambda x, w: F.relu(x @ w).sum(), weight(4, 1), weight(1, 4))
    assert record.backward_peak == 64 + 4 + 64 + 64 + 16  # ReLU, cotangent, gradient, factor, mask
    record, _ = observe(lambda x, w: (x @ w).masked_fill(w.sum() > 0, 0.0).sum(), weight(4, 1), weight(1, 4))
    assert record.forward_peak == 64 + 1 + 64 + 2 * 64


def test_inputs_of_a_mask_are_freed_before_the_selection() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: F.relu(x @ w), x, use_reentrant=False).sum()

    record, _ = observe(function, weight(4, 1), weight(1, 4))
    assert record.backward_peak == 4 + 64 + 64 + 16  # neither the product nor the ReLU


def test_recomputed_tensor_is_listed_with_its_line_and_pass() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (F.gelu(x) @ w).sum()

    record, _ = observe(function, weight(2, 2, 3), weight(3, 4), gelu_recompute=True)
    (again,) = record.recomputed  # the view of it is not worth a line
    assert (again.name, again.operator, again.by) == ("gelu", "aten.gelu.default", "recompute_gelu")
    assert "return (F.gelu(x) @ w).sum()" in again.where
    assert again.time == record.time
    assert 0 < again.time < 1
    assert (record.nbytes, record.nbytes_without) == (0, 48)


def test_a_record_of_tensors_without_elements_is_a_line() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (F.gelu(x) @ w).sum()

    record, _ = observe(function, weight(2, 2, 3), weight(3, 4), gelu_recompute=True)
    text = replace(record, nbytes_without=0).summary()
    assert text.startswith("0 bytes saved for the backward in 0 tensors; 1 recomputed, ")


def test_recomputation_by_a_checkpoint_is_attributed_to_it() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.exp(x.sin()) @ w, x, use_reentrant=False).sum()

    record, _ = observe(function, weight(2, 3), weight(3, 4))
    assert {one.by for one in record.recomputed} == {"torch.utils.checkpoint"}
    assert {one.operator for one in record.recomputed} >= {"aten.sin.default", "aten.exp.default"}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(8, 32) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), 0.1)
        return x.square().mean()


@pytest.mark.parametrize(
    "options",
    [{}, {"gelu_recompute": True}, {"memory_budget": 0.5}, {"memory_budget": 0.0}, {"recompute_plan": "Gelu+:1:2"}],
    ids=str,
)
def test_predicted_peaks_are_those_of_a_run_operator_by_operator(options: dict[str, Any]) -> None:
    record, peaks = observe(Layers(), torch.randn(5, 8), **options)
    assert [record.forward_peak, record.backward_peak] == peaks
