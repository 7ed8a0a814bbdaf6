"""A training step as one graph: forward, loss, gradients, clipping and the optimizer's update.

ONNX Runtime then runs all of it in one session, with no Python between the gradients and the new weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.fx.traceback import preserve_node_meta

from ort_dynamo.embedding import CompileRecord, Options, compile_step, read_program
from ort_dynamo.errors import TrainingGraphError
from ort_dynamo.training.torch_internals import compile_region, held_weakly
from ort_dynamo.training.trainer.training_state import TrainedWeight, TrainingState, UpdateGroup
from ort_dynamo.training.trainer.update_rules import gradient_divisor, gradient_norm

__all__ = ["StepKind", "WholeStep", "WholeStepModule"]


@dataclass(frozen=True)
class StepKind:
    """The tasks of a step beside forward and gradients.

    Attributes:
        updates: whether weights are updated; otherwise gradients are only accumulated.
        gathers: the number of steps over which gradients are accumulated; 1 accumulates none.
        scales: whether the loss is scaled, and the update skipped if gradients are not finite.
        clips: whether the norm of gradients is clipped, if the optimizer has a bound.
        stands_alone: whether the graph also skips such an update and counts updates, without its runner.
    """

    updates: bool = True
    gathers: int = 1
    scales: bool = False
    clips: bool = True
    stands_alone: bool = False


class WholeStepModule(nn.Module):
    """Calls a forward graph, computes its gradients and updates weights. It is functional: nothing changes in place.

    Its inputs are those of the graph; then `lr` and `scale` (float64, 0-d), the count of each group (int64, 0-d), and
    for each weight: the master weight if no input of the graph is it, its moments if the step updates, and the
    accumulated gradient if it accumulates. A parameter of a narrower dtype is not its master weight, and the graph does
    not read a weight that only earlier steps of the accumulation read. Its outputs are those of the graph, and more. A
    step that updates also returns `all_finite` (bool, 0-d), the new master and moments of each weight, and the counts
    if it stands alone. A step that does not update returns the accumulated gradient of each weight.

    Args:
        graph: the forward graph. One output requires a gradient: the loss.
        groups: the weights, grouped by their update rule.
        places: for each weight, in this order, the index of the graph's input that is its parameter, or None.
        kind: the tasks of the step.
        reached: names of weights that had a gradient in earlier steps of the accumulation, for a step that updates.

    Attributes:
        found: names of the weights that have a gradient in this step, once it was traced.
    """

    def __init__(
        self,
        graph: GraphModule,
        groups: Sequence[UpdateGroup],
        places: Sequence[int | None],
        kind: StepKind,
        reached: Container[str] = (),
    ) -> None:
        super().__init__()
        self.graph_module = graph
        self._kind = kind
        self._inputs = len(graph.graph.find_nodes(op="placeholder"))
        self._places = tuple(places)
        self._groups = [(group.rule, len(group.weights)) for group in groups]
        weights = [weight for group in groups for weight in group.weights]
        self._names = [weight.name for weight in weights]
        self._narrow = [weight.is_narrow for weight in weights]
        self._reached = [weight.name in reached for weight in weights]
        self.found: set[str] = set()

    def forward(self, *args: Any) -> list[Any]:
        """Compute the step."""
        inputs, rest = list(args[: self._inputs]), iter(args[self._inputs :])
        lr, scale = next(rest), next(rest)
        counts = [next(rest) for _ in self._groups]
        rules = [rule for rule, size in self._groups for _ in range(size)]
        masters, moments, gathered = [], [], []
        for rule, place, is_narrow in zip(rules, self._places, self._narrow, strict=True):
            masters.append(next(rest) if is_narrow or place is None else inputs[place])
            moments.append([next(rest) for _ in range(rule.moments)] if self._kind.updates else [])
            gathered.append(next(rest) if self._kind.gathers > 1 else None)
        outputs, found = self._gradients(inputs, scale)
        self.found = {name for name, gradient in zip(self._names, found, strict=True) if gradient is not None}
        gradients = [
            None if gradient is None else gradient.to(master.dtype)
            for gradient, master in zip(found, masters, strict=True)
        ]
        sums = [_sum(before, gradient) for before, gradient in zip(gathered, gradients, strict=True)]
        if not self._kind.updates:
            return [*outputs, *sums]
        has_sum = (now or name in self.found for now, name in zip(self._reached, self._names, strict=True))
        sums = [total if known else None for total, known in zip(sums, has_sum, strict=True)]
        with torch.autocast(masters[0].device.type, enabled=False):
            made = self._update(masters, sums, moments, counts, lr, scale)
        if self._kind.stands_alone:
            made += [count + 1 for count in counts]
        return [*outputs, *made]

    def _gradients(self, inputs: list[Any], scale: Tensor) -> tuple[list[Any], Sequence[Tensor | None]]:
        with torch.enable_grad():
            leaves = {place: inputs[place].detach().requires_grad_() for place in self._places if place is not None}
            for place, leaf in leaves.items():
                inputs[place] = leaf
            with preserve_node_meta():  # traced operators of a node keep its module and the user's line
                outputs = Interpreter(self.graph_module).run(*inputs)
            losses = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            if not losses:
                raise TrainingGraphError(reason="the loss does not depend on any trainable weight")
            if len(losses) != 1:
                raise TrainingGraphError(
                    reason=f"{len(losses)} of its outputs have gradients; only the loss may have one"
                )
            device = losses[0].device.type
            seed = scale.to(losses[0].dtype) if self._kind.scales else torch.ones_like(losses[0])
            with torch.autocast(device, enabled=False):  # as torch's engine: the forward's casts have their gradients
                given = [*leaves.values()]
                found = torch.autograd.grad(losses[0], given, seed.expand_as(losses[0]), allow_unused=True)
        by_place: dict[int | None, Tensor | None] = dict(zip(leaves, found, strict=True))
        gradients = [by_place.get(place) for place in self._places]
        return [one.detach() if isinstance(one, Tensor) else one for one in outputs], gradients

    def _update(
        self,
        masters: Sequence[Tensor],
        sums: Sequence[Tensor | None],
        moments: Sequence[list[Tensor]],
        counts: Sequence[Tensor],
        lr: Tensor,
        scale: Tensor,
    ) -> list[Tensor]:
        kind = self._kind
        mean = [None if g is None else g * (1 / kind.gathers) if kind.gathers > 1 else g for g in sums]
        all_finite = torch.ones((), dtype=torch.bool, device=masters[0].device)
        norm = None
        if kind.scales or (kind.clips and any(rule.max_norm_clip is not None for rule, _ in self._groups)):
            norm = gradient_norm([g for g in mean if g is not None])
            all_finite = norm.isfinite()
        made: list[Tensor] = []
        begin = 0
        for (rule, size), count in zip(self._groups, counts, strict=True):
            every = range(begin, begin + size)
            begin += size
            reached = [index for index in every if mean[index] is not None]
            own: list[Any] = [mean[index] for index in reached]
            if norm is not None:
                factor = 1 / gradient_divisor(norm, scale, rule.max_norm_clip if kind.clips else None)
                own = [g * factor.to(g.dtype) for g in own]
            columns = [[moments[index][k] for index in reached] for k in range(rule.moments)]
            updated = rule.update([masters[index] for index in reached], own, columns, count + 1, lr)
            rows = dict(zip(reached, zip(updated.weights, *updated.moments, strict=True), strict=True))
            for index in every:
                before = (masters[index], *moments[index])
                row = rows.get(index, before)  # a weight on which no loss depends stays as it is
                if kind.stands_alone and kind.scales:
                    row = tuple(torch.where(all_finite, a, b) for a, b in zip(row, before, strict=True))
                made.extend(row)
        return [all_finite, *made]


def _sum(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if before is None or gradient is None:
        return gradient if before is None else before
    return before + gradient


_MOST_SETS = 8
"""Sets of reached weights that have compiled graphs. With more of them, steps are split, and need no graph for each."""

_NOTHING: tuple[list[TrainedWeight], list[Tensor], frozenset[str]] = ([], [], frozenset())


class WholeStep:
    """Runs steps of one kind, each as one compiled graph.

    Args:
        entry: makes a function with code of its own, which gives the loss and the outputs of the model; the loss alone
            of them has a gradient.
        prefix: the beginning of parameters' names in it, before their names in the state.
        state: the trained state; the steps change it.
        options: how to compile.
        kind: the tasks of the steps.
        recurrent: whether the model has recurrent layers to trace.

    Attributes:
        has_begun: whether the last call came as far as to run the compiled graph.
    """

    def __init__(
        self,
        entry: Callable[[], Callable[..., Any]],
        prefix: str,
        state: TrainingState,
        options: Options,
        kind: StepKind,
        *,
        recurrent: bool = False,
    ) -> None:
        self._state = state
        self._prefix = prefix
        self._options = options
        self._kind = kind
        self._entry = entry
        self._recurrent = recurrent
        self._regions: dict[frozenset[str], Callable[..., Any]] = {}
        self.has_begun: bool = False
        self._lr = torch.zeros((), dtype=torch.float64)
        self._scale = torch.ones((), dtype=torch.float64)
        self._pending: tuple[list[TrainedWeight], list[Tensor], frozenset[str]] = _NOTHING
        self.records: list[CompileRecord] = []

    def __call__(self, inputs: Sequence[Any], lr: float, scale: float) -> tuple[Any, bool]:
        """Run one step.

        Args:
            inputs: of the model.
            lr: the learning rate.
            scale: the loss scale.

        Returns:
            The model's results, and whether all gradients were finite: if not, no weight has changed.
        """
        self.has_begun = False
        self._lr.fill_(lr)
        self._scale.fill_(scale)
        outputs = self._region()(*inputs)
        (weights, made, with_gradient), self._pending = self._pending, _NOTHING
        if not self._kind.updates:
            self._state.reached |= with_gradient
            torch._foreach_copy_([one.gathered for one in weights if one.gathered is not None], made)
            return outputs, True
        all_finite = not self._kind.scales or bool(made[0])
        if all_finite:
            torch._foreach_copy_(self._state.tensors(weights), made[1:])
            for group in self._state.groups:
                group.count += 1
            self._state.round()
        self._state.forget_gathered()
        return outputs, all_finite

    def _region(self) -> Callable[..., Any]:
        """Return the region for the weights that earlier steps of the accumulation have reached.

        A graph that updates has these weights as inputs, also where its own forward does not read them.
        """
        reached = frozenset(self._state.reached if self._kind.updates else ())
        if reached not in self._regions:
            if len(self._regions) == _MOST_SETS:
                reason = f"steps of an accumulation reach more than {_MOST_SETS} sets of weights, each with its graphs"
                raise TrainingGraphError(reason=reason)
            backend = partial(held_weakly(self._compile), reached=reached)
            self._regions[reached] = compile_region(
                self._entry(), backend, dynamic=None, whole=True, recurrent=self._recurrent
            )
        return self._regions[reached]

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any], reached: frozenset[str]) -> Callable[..., Any]:
        names = read_program(gm, example_inputs).inputs
        places = {self._state.name_of(name.removeprefix(self._prefix)): index for index, name in enumerate(names)}
        groups = self._state.groups_of({*places, *reached})
        weights = [weight for group in groups for weight in group.weights]
        trained = [places.get(weight.name) for weight in weights]
        if all(place is None for place in trained):
            raise TrainingGraphError(reason="it reads no trainable weight")
        own = {id(weight.parameter) for weight in self._state.by_name.values()}
        if any(id(one) in own and place not in trained for place, one in enumerate(example_inputs)):
            raise TrainingGraphError(reason="it reads a trainable weight whose name cannot be told")
        before = len(names)
        # Dynamo keeps the compiled function as long as the entry, which belongs to this object.
        kind, lr, scale, held = self._kind, self._lr, self._scale, weakref.ref(self)

        def more_inputs() -> list[Tensor]:
            made = [lr, scale, *(group.count for group in groups)]
            for weight, place in zip(weights, trained, strict=True):
                made += [weight.master] * (weight.is_narrow or place is None)
                made += weight.moments * kind.updates
                if kind.gathers > 1 and weight.gathered is not None:
                    made.append(weight.gathered)
            return made

        found: list[WholeStepModule] = []

        def around(graph: GraphModule) -> WholeStepModule:
            found.append(WholeStepModule(graph, groups, trained, kind, reached))
            return found[-1]

        compiled, record = compile_step(gm, example_inputs, around, more_inputs(), self._options)
        with_gradient = frozenset(found[-1].found)
        self.records.append(record)
        count = len(gm.graph.find_nodes(op="output")[0].args[0])
        parameters = [
            (place, weight.parameter.detach())
            for place, weight in zip(trained, weights, strict=True)
            if place is not None
        ]

        def run(*inputs: Any) -> tuple[Any, ...]:
            step = held()
            assert step is not None, "its region runs"
            step.has_begun = True
            given = list(inputs)
            for place, parameter in parameters:
                given[place] = parameter
            with torch.no_grad():
                results = compiled(*given, *more_inputs())
            step._pending = weights, list(results[count:]), with_gradient
            return tuple(results[:count])

        assert before == len(example_inputs)
        return run
