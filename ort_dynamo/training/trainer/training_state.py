"""The weights, moments, counts and gathered gradients that a training step reads and changes.

Of a weight that several processes share, each has a part: the local tensor of torch's DTensor.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from ort_dynamo.training.trainer.update_rules import Rule

__all__ = [
    "TrainedWeight",
    "TrainingState",
    "UpdateGroup",
    "group_of",
    "local_of",
    "norm_over",
    "part_of",
    "split_axis",
    "square_sum_over",
]

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class TrainedWeight:
    """One parameter that is trained.

    Attributes:
        name: its name in the model's state_dict.
        parameter: the model's own.
        master: the tensor that is updated: a float32 copy of a float16 or bfloat16 parameter, otherwise its own memory.
        moments: the optimizer's, as many as its rule has, each of the master's shape and dtype.
        gathered: the sum of gradients since the last update, like the master; None where an update follows each step.
        is_own: whether this process updates it; otherwise it has no moments, and the parameter itself for a master.
        group: the processes that have a part of it each, where one alone does not have it: master, moments and gathered
            are this process's part then.
    """

    name: str
    parameter: nn.Parameter
    master: Tensor
    moments: list[Tensor]
    gathered: Tensor | None
    is_own: bool = True
    group: ProcessGroup | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed and the update is computed."""
        return torch.float32 if self.is_narrow else self.parameter.dtype

    @property
    def is_narrow(self) -> bool:
        """True if the parameter is a rounded copy of the master weight."""
        return self.parameter.dtype in _NARROW


@dataclass(eq=False)
class UpdateGroup:
    """Weights that are updated alike, and as often.

    Attributes:
        rule: how.
        weights: which.
        count: int64, 0-d, on the CPU: how many updates there were.
    """

    rule: Rule
    weights: list[TrainedWeight]
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))


class TrainingState:
    """All that is trained of a model.

    Args:
        parameters: name -> parameter, of those that are trained.
        rules: name -> how it is updated.
        gathers: whether gradients of several steps go into one update.
        tied: another name of one of the parameters -> its name.

    Attributes:
        reached: names of weights that have had a gradient since the last update, where gradients are gathered. An
            update leaves the others alone, as torch's optimizers do where a gradient is None.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rules: Mapping[str, Rule],
        *,
        gathers: bool,
        tied: Mapping[str, str] = {},
    ) -> None:
        self._tied = dict(tied)
        self.reached: set[str] = set()
        self.weights: list[TrainedWeight] = [
            _weight(name, one, rules[name], gathers) for name, one in parameters.items()
        ]
        self.by_name: dict[str, TrainedWeight] = {weight.name: weight for weight in self.weights}
        grouped: dict[Rule, list[TrainedWeight]] = {}
        for weight in self.weights:
            grouped.setdefault(rules[weight.name], []).append(weight)
        self.groups: list[UpdateGroup] = [UpdateGroup(rule, weights) for rule, weights in grouped.items()]

    def divide(self, own: Container[int]) -> None:
        """Keep the optimizer's state of those weights alone whose parameters' `id`s are given."""
        for weight in self.weights:
            if id(weight.parameter) not in own:
                weight.is_own, weight.moments, weight.master = False, [], weight.parameter.detach()

    @property
    def elements(self) -> int:
        """The number of trained elements."""
        return sum(weight.master.numel() for weight in self.weights)

    def name_of(self, name: str) -> str:
        """Return the name of a parameter here, of whichever name the model has for it; other names are left alone."""
        return self._tied.get(name, name)

    def master_of(self, name: str) -> Tensor | None:
        """Find the master of the parameter of any of the model's names; None if it is not trained."""
        weight = self.by_name.get(self.name_of(name))
        return None if weight is None else weight.master

    def regroup(self, counts: Mapping[str, int]) -> None:
        """Take other counts of updates, by name; weights that have different ones are in groups of their own then."""
        grouped: dict[tuple[Rule, int], list[TrainedWeight]] = {}
        for group in self.groups:
            for weight in group.weights:
                count = counts.get(weight.name, int(group.count))
                grouped.setdefault((group.rule, count), []).append(weight)
        self.groups = [
            UpdateGroup(rule, weights, torch.tensor(count, dtype=torch.int64))
            for (rule, count), weights in grouped.items()
        ]

    def groups_of(self, names: Container[str]) -> list[UpdateGroup]:
        """Return the groups with those of their weights that are among the names; their counts are shared."""
        found = [
            UpdateGroup(group.rule, [weight for weight in group.weights if weight.name in names], group.count)
            for group in self.groups
        ]
        return [group for group in found if group.weights]

    @staticmethod
    def tensors(weights: Sequence[TrainedWeight]) -> list[Tensor]:
        """Return the tensors that an update replaces: master, then moments, of one weight after the other."""
        return [one for weight in weights for one in (weight.master, *weight.moments)]

    def make_gathered(self, gathers: bool) -> None:
        """Make the sums of gradients where gradients are gathered from now on, and drop them where they are not."""
        for weight in self.weights:
            if not gathers:
                weight.gathered = None
            elif weight.gathered is None:
                weight.gathered = torch.zeros_like(weight.master, memory_format=torch.contiguous_format)

    def forget_gathered(self) -> None:
        """Begin to gather gradients anew."""
        self.reached.clear()
        if gathered := [weight.gathered for weight in self.weights if weight.gathered is not None]:
            torch._foreach_zero_(gathered)

    def round(self) -> None:
        """Round masters to the parameters that are narrower."""
        for weight in self.weights:
            if weight.is_narrow:
                local_of(weight.parameter.detach()).copy_(weight.master)


def _weight(name: str, parameter: nn.Parameter, rule: Rule, gathers: bool) -> TrainedWeight:
    own = local_of(parameter.detach())
    master = own.float() if parameter.dtype in _NARROW else own
    moments = [torch.zeros_like(master, memory_format=torch.contiguous_format) for _ in range(rule.moments)]
    gathered = torch.zeros_like(master, memory_format=torch.contiguous_format) if gathers else None
    return TrainedWeight(name, parameter, master, moments, gathered, group=group_of(parameter))


def local_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part that this process has, in the tensor's own memory; of a gradient, divided as `like` is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def split_axis(tensor: Tensor) -> int | None:
    """Return the axis that a tensor is divided along; None where each process has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,) = tensor.placements
    return placement.dim if isinstance(placement, Shard) else None


def group_of(tensor: Tensor) -> ProcessGroup | None:
    """Return the processes that a tensor is divided among."""
    return tensor.device_mesh.get_group() if isinstance(tensor, DTensor) and split_axis(tensor) is not None else None


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a tensor, divided as `like` is; the tensor itself if its shape differs."""
    axis = split_axis(like)
    if axis is None or whole.shape != like.shape:
        return whole
    assert isinstance(like, DTensor)
    return whole.chunk(like.device_mesh.size(), axis)[like.device_mesh.get_local_rank()]


def square_sum_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the squares of all parts."""
    total = (tensor * tensor).sum()
    distributed.all_reduce(total, group=group)
    return total


def norm_over(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the norm of all parts together."""
    return torch.sqrt((tensor * tensor).sum() if group is None else square_sum_over(tensor, group))
