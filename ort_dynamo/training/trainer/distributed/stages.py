"""Stages of a model that processes run one after the other: torch's pipelining, cut where modules begin."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from ort_dynamo.errors import SeveralProcessesError
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.torch_internals import expect_only_what_stages_send, tree_map
from ort_dynamo.training.trainer.model_with_loss import CombinedModel, flat_outputs

__all__ = ["Stages", "cuts_of", "mesh_of_stages"]

_Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def cuts_of(options: ORTTrainerOptions, model: nn.Module) -> list[str]:
    """Return the modules at which stages begin, but for the first stage.

    Raises:
        SeveralProcessesError: they are not one fewer than stages, or the model has no such module.
    """
    asked = options.distributed.pipeline_parallel
    text: str = asked.pipeline_cut_info_string
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = dict(model.named_modules())
    if unknown := [name for name in names if name not in known]:
        reason = (
            f"pipeline_cut_info_string names {', '.join(unknown)}, and the model has no such modules. It takes names "
            f"of modules at which a stage begins, separated by commas, not ONNX edges: {', '.join(list(known)[1:9])}"
        )
        raise SeveralProcessesError(reason=reason)
    stages = asked.pipeline_parallel_size
    if len(names) != stages - 1 or len(set(names)) < len(names):
        reason = (
            f"pipeline_parallel_size is {stages}, and pipeline_cut_info_string, {text!r}, names {len(set(names))} "
            f"modules. Name {stages - 1}: the one at which each stage but the first begins, separated by commas"
        )
        raise SeveralProcessesError(reason=reason)
    return names


def mesh_of_stages(combined: nn.Module, stages: int) -> DeviceMesh:
    """Give all processes by "data" and "pipeline", neighbours in a pipeline; all begin with rank 0's weights."""
    device = next(iter(combined.parameters())).device
    for tensor in [*combined.parameters(), *combined.buffers()]:
        distributed.broadcast(tensor.detach(), 0)
    sizes = (distributed.get_world_size() // stages, stages)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("data", "pipeline"))


_IN_TRACED = "combined.model."
"""Name prefix of the model's parameters in the traced module."""


class Stages:
    """Runs this process's stage of a model, and gives all processes of a pipeline the model's results.

    Torch's tracer cuts the model for each size of a batch, for training and for evaluation: weights are the model's.

    Args:
        combined: model and loss; all of it, of which this process runs a part.
        mesh: all processes by "data" and "pipeline".
        cuts: names of modules at which a stage begins.
        micro_batches: into how many parts a batch is cut.

    Attributes:
        compiles: compiles this process's stage; it is set before a first step.
        own: the names of the weights and buffers that are this process's.
    """

    def __init__(self, combined: CombinedModel, mesh: DeviceMesh, cuts: Sequence[str], micro_batches: int) -> None:
        self._combined = combined
        self._traced = _Outputs(combined)
        self._cuts: list[str] | None = list(cuts)
        self.compiles: _Compile = lambda called: called
        self._count = len(cuts) + 1
        self._micro_batches = micro_batches
        self.group: distributed.ProcessGroup = mesh["pipeline"].get_group()
        self._stage = mesh["pipeline"].get_local_rank()
        self._device = next(iter(combined.parameters())).device
        self._pipes: dict[Any, Any] = {}
        self._runs: dict[Any, _StageRun] = {}
        self.own: set[str] = set()

    def divide(self, inputs: Sequence[Tensor], *, predicts: bool) -> None:
        """Find which weights and buffers are this process's, by a first batch; those of no stage are the first's.

        Raises:
            SeveralProcessesError: the model cannot be cut so, or stages share weights, or one has none to train.
        """
        pipe = self._pipe(tuple(inputs) if predicts else self._given(inputs))
        model = self._combined.model
        names: dict[int, list[str]] = {}
        for name, one in model.state_dict(keep_vars=True).items():
            names.setdefault(id(one), []).append(name)
        found: list[set[str]] = []
        for index in range(self._count):
            module = pipe.get_stage_module(index)
            of_stage = [*module.parameters(), *module.buffers()]
            found.append({name for one in of_stage for name in names.get(id(one), ())})
        for index, one in enumerate(found):
            weights = pipe.get_stage_module(index).named_parameters()
            # torch's tracer gives each stage its own copy of a shared weight, and nothing keeps the copies equal.
            copies = {name.removeprefix(_IN_TRACED) for name, weight in weights if id(weight) not in names}
            if shared := sorted(copies | one & {name for other in found[index + 1 :] for name in other}):
                reason = f"stages of the pipeline share {', '.join(shared)}. Cut so that one stage has all uses of them"
                raise SeveralProcessesError(reason=reason)
            if not any(name in one and weight.requires_grad for name, weight in model.named_parameters()):
                reason = f"stage {index} of the pipeline has no weights to train. Cut elsewhere"
                raise SeveralProcessesError(reason=reason)
        rest = {name for same in names.values() for name in same} - {name for one in found for name in one}
        self.own = found[self._stage] | (rest if self._stage == 0 else set())

    def train(self, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward, which add to the `grad` of this stage's weights; gives loss and outputs."""
        given = self._given(inputs)
        self._check(inputs)
        run = self._run(given, trains=True)
        losses: list[Tensor] = []
        last = self._stage == self._count - 1
        kept: dict[str, Any] = {"target": inputs[-1], "losses": losses} if last else {}
        with torch.enable_grad():
            found = run.step(given, **kept)
        results = None
        if last:
            loss = torch.stack([one.detach() for one in losses]).mean()
            results = [loss, *self._outputs(found, loss)]
        loss, *outputs = self._told(results)
        return loss, outputs

    def evaluate(self, inputs: Sequence[Tensor], *, predicts: bool = False) -> list[Tensor]:
        """Run the forward; gives the outputs, and where it `predicts` without the loss of a loss_fn."""
        given = tuple(inputs) if predicts else self._given(inputs)
        found = self._run(given, trains=False).step(given)
        results = None
        if self._stage == self._count - 1:
            loss = None if predicts else self._traced.loss(found, inputs[-1])
            results = self._outputs(found, loss)
        return self._told(results)

    def _given(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Drop the label of a loss_fn, which the model does not take."""
        return tuple(inputs[:-1])

    def _outputs(self, found: Any, loss: Tensor | None) -> list[Tensor]:
        outputs = [one.detach() for one in ((found,) if isinstance(found, Tensor) else found)]
        if loss is not None:
            outputs.insert(0, loss.detach())
        return outputs

    def _told(self, results: list[Tensor] | None) -> list[Tensor]:
        """Send the results of the last stage to all processes of the pipeline."""
        told = [None if results is None else [one.cpu() for one in results]]
        distributed.broadcast_object_list(told, group=self.group, group_src=self._count - 1)
        assert told[0] is not None
        return [one.to(self._device) for one in told[0]]

    def _run(self, given: tuple[Tensor, ...], *, trains: bool) -> _StageRun:
        key = (trains, *_sizes(given))
        if key not in self._runs:
            pipe = self._pipe(given)
            stage = pipe.build_stage(self._stage, self._device, self.group)
            reads = _reads_of(pipe)[self._stage]
            own, run = None, self.compiles(stage.submod.forward)
            if self._stage:
                own = run = _OwnInputs(run, reads, self._micro_batches)
                expect_only_what_stages_send(stage)
            stage.submod.forward = run  # torch's stage reads the module's graph, too
            # 1F1B has no fewer micro-batches than stages.
            kind: Any = Schedule1F1B if trains and self._micro_batches >= self._count else ScheduleGPipe
            loss_fn = self._traced.loss if trains else None
            self._runs[key] = _StageRun(kind(stage, n_microbatches=self._micro_batches, loss_fn=loss_fn), reads, own)
        return self._runs[key]

    def _check(self, inputs: Sequence[Tensor]) -> None:
        parts = self._micro_batches
        if any(one.dim() == 0 or one.shape[0] % parts or one.shape[0] == 0 for one in inputs):
            sizes = ", ".join(str(list(one.shape)) for one in inputs)
            reason = f"num_pipeline_micro_batches ({parts}) does not divide the first size of the inputs ({sizes})"
            raise SeveralProcessesError(reason=reason)

    def _pipe(self, given: tuple[Tensor, ...]) -> Any:
        """Return the model in stages, as it is now: in training or in evaluation."""
        key = (self._combined.model.training, *_sizes(given))
        if key in self._pipes:
            return self._pipes[key]
        parts = self._micro_batches
        self._check(given)
        micro = tuple(one[: one.shape[0] // parts] for one in given)
        spec = None if self._cuts is None else {f"{_IN_TRACED}{name}": SplitPoint.BEGINNING for name in self._cuts}
        self._cuts = None  # the marks stay in the modules
        try:
            pipe = pipeline(self._traced, micro, split_spec=spec)
        except Exception as error:  # any error of model code that torch.export cannot trace
            reason = (
                f"torch's pipeline tracer cannot split this model ({error}). Train without a pipeline, or build stages "
                "by hand: torch.distributed.pipelining with torch.compile(stage, backend='ort_train')"
            )
            raise SeveralProcessesError(reason=reason) from error
        if pipe.num_stages != self._count:
            reason = (
                f"torch's pipeline tracer makes {pipe.num_stages} stages of this model, where {self._count} are asked "
                "for: each module that pipeline_cut_info_string names has to run exactly once, after another one"
            )
            raise SeveralProcessesError(reason=reason)
        _refuse_several_readers(pipe)
        self._pipes[key] = pipe
        return pipe


def _reads_of(pipe: Any) -> list[list[int | None]]:
    """List each stage's arguments: the index of the model's input, or None if another stage sends it."""
    nodes = list(pipe.split_gm.graph.nodes)
    numbers = {node: number for number, node in enumerate(one for one in nodes if one.op == "placeholder")}
    return [[numbers.get(argument) for argument in node.args] for node in nodes if node.op == "call_module"]


def _refuse_several_readers(pipe: Any) -> None:
    """Raise SeveralProcessesError for a value of one stage that several read: torch sums no gradients of it."""
    stages = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for index, stage in enumerate(stages):
        (made,) = pipe.get_stage_module(index).graph.find_nodes(op="output")[0].args
        taken = [node for node in stage.users if node.target is operator.getitem]
        for node in taken or [stage]:
            value = made[node.args[1]] if taken else made
            readers = [user for user in node.users if user in stages]
            if len(readers) > 1 and value.meta["val"].is_floating_point():
                reason = (
                    f"several stages of the pipeline read the value {node.name} of stage {index}. Cut elsewhere, or "
                    "compute it in each of these stages; inputs of the model each stage may read"
                )
                raise SeveralProcessesError(reason=reason)


class _OwnInputs:
    """Calls a stage after the first with the tensors sent to it and a micro-batch of the model's inputs that it reads.

    Schedules run a stage's micro-batches in order.

    Args:
        run: the stage.
        reads: its arguments, as `_reads_of` gives them.
        parts: how many micro-batches there are.
    """

    def __init__(self, run: Callable[..., Any], reads: Sequence[int | None], parts: int) -> None:
        self._stage = run
        self._reads = reads
        self._parts = parts
        self._left: Iterator[tuple[Tensor, ...]] = iter(())

    def begin(self, given: Sequence[Tensor]) -> None:
        """Take the inputs of a step."""
        own = [given[number].chunk(self._parts) for number in self._reads if number is not None]
        self._left = iter([tuple(one[part] for one in own) for part in range(self._parts)])

    def __call__(self, *sent: Tensor) -> Any:
        """Run the next micro-batch."""
        from_stages, own = iter(sent), iter(next(self._left))
        return self._stage(*(next(from_stages if number is None else own) for number in self._reads))


@dataclass(frozen=True)
class _StageRun:
    """A stage's schedule.

    Attributes:
        schedule: torch's.
        reads: the stage's arguments, as `_reads_of` gives them.
        own: gives a later stage the model's inputs; None of the first, whose inputs torch gives.
    """

    schedule: Any
    reads: Sequence[int | None]
    own: _OwnInputs | None

    def step(self, given: Sequence[Tensor], **kept: Any) -> Any:
        """Run all micro-batches."""
        if self.own is not None:
            self.own.begin(given)
            return self.schedule.step(**kept)
        return self.schedule.step(*(given[number] for number in self.reads if number is not None), **kept)


def _sizes(given: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(one.shape), one.dtype) for one in given)


class _Seen:
    """A model's outputs as seen while tracing; torch.export restores the module's attributes afterwards.

    Attributes:
        shape: the model's result, with indices instead of tensors.
    """

    def __init__(self) -> None:
        self.shape: Any = None


class _Outputs(nn.Module):
    """Gives the tensors that a model returns, which are joined along their first axes, and the loss of them."""

    def __init__(self, combined: CombinedModel) -> None:
        super().__init__()
        self.combined = combined
        self.seen = _Seen()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.combined.called(inputs)
        flat = list(flat_outputs(found))
        places = {id(one): index for index, one in enumerate(flat)}
        self.seen.shape = tree_map(lambda one: places.get(id(one)), found)
        return tuple(flat)

    def loss(self, found: Any, target: Tensor) -> Tensor:
        """Return the loss of this module's result."""
        flat = (found,) if isinstance(found, Tensor) else found
        assert self.combined.loss_fn is not None
        given = tree_map(lambda place: None if place is None else flat[place], self.seen.shape)
        return self.combined.loss_fn(given, target)
