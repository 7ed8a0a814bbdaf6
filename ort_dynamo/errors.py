"""The errors of this project: one class per kind, each with a template for the failure, its place and the remedy."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CacheOffError",
    "CacheRefusedError",
    "CheckpointFileError",
    "DeviceNotAvailableError",
    "DuplicateLoweringError",
    "EmptyReductionError",
    "ExecutionError",
    "FakeValueError",
    "FallbackRefusedError",
    "GradientGraphError",
    "IndexOutOfBoundsError",
    "InputDtypeError",
    "IntegerDivisionByZeroError",
    "InvalidArgumentError",
    "InvalidOptionError",
    "InvalidValueError",
    "InvalidVariableError",
    "LoweringError",
    "MissingDependencyError",
    "MissingPackageError",
    "ModelFileError",
    "NotCompiledError",
    "NotInOnnxRuntimeError",
    "OnnxModelError",
    "OpsetError",
    "OrtDynamoError",
    "PassBrokeGraphError",
    "PassFailedError",
    "PassOrderError",
    "ProcessGroupError",
    "ProgramFileError",
    "ProviderNotAvailableError",
    "RanksDisagreeError",
    "ResultsDifferError",
    "RuntimeNotInstalledError",
    "SessionError",
    "SessionMemoryError",
    "SessionsDifferError",
    "SeveralProcessesError",
    "SeveralRuntimesError",
    "TrainingGraphError",
    "UnknownModeError",
    "UnknownOptionError",
    "UnknownSettingError",
    "UnsupportedNodeError",
    "UnwritableFolderError",
]


class OrtDynamoError(RuntimeError):
    """Base of all errors raised on purpose; `message` is a template filled from the keyword arguments."""

    message: ClassVar[str]

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        super().__init__(self.message.format(**facts))


class RuntimeNotInstalledError(OrtDynamoError, ImportError):
    """No ONNX Runtime distribution is installed."""

    message = (
        "ort_train needs ONNX Runtime, and no distribution of it is installed. Install exactly one: "
        "pip install onnxruntime (for the CPU), pip install onnxruntime-gpu (for CUDA), or "
        "pip install onnxruntime-training==1.19.2 (with gradient kernels). In a clone of ort_dynamo, "
        "pip install -e '.[cpu]', '.[cuda]' or '.[training]' installs a version that was tested."
    )


class SeveralRuntimesError(OrtDynamoError, ImportError):
    """More than one distribution provides the import name `onnxruntime`; which one is loaded is an accident."""

    message = (
        "Several ONNX Runtime distributions are installed ({found}); they overwrite one another's files. "
        "Run: {fix}\n"
        "The extras cpu, cuda and training of ort_dynamo each install one."
    )


class MissingPackageError(OrtDynamoError, ImportError):
    """A package of the extra `demo` is not installed."""

    message = "The demo needs {missing}. In a clone of ort_dynamo, run pip install -e '.[demo]'."


class MissingDependencyError(OrtDynamoError, ImportError):
    """A package that a part of the project needs is not installed."""

    message = "{what} needs {package}, which is not installed. Install it: pip install {package}."


class CheckpointFileError(OrtDynamoError, ValueError):
    """A checkpoint file is damaged, is of another kind, or has content that a checkpoint must not have."""

    message = "Cannot load the checkpoint {path}: {reason}."


class ModelFileError(OrtDynamoError):
    """A model file of the command line cannot be read or written."""

    message = "Cannot {what} the ONNX model {path}: {error}"


class ProgramFileError(OrtDynamoError):
    """A program of the command line cannot be read."""

    message = "Cannot run the program {path}: {error}"


class ProviderNotAvailableError(OrtDynamoError):
    """The execution provider that a device needs is not in the installed ONNX Runtime, or does not load."""

    message = (
        "{provider} is needed for tensors on {device}, but {reason}. "
        "Available providers of {package} {version}: {available}. {advice}"
    )


class DeviceNotAvailableError(OrtDynamoError):
    """The device that an ORTTrainer is to train on is not there."""

    message = (
        "The trainer's options have device.id = {device!r}, and torch {version} finds no such device to train on. "
        "Give 'cpu', or a device such as 'cuda:0' with a torch that has CUDA."
    )


class UnknownOptionError(OrtDynamoError, ValueError):
    """A key of torch.compile(options=...) that nothing reads."""

    message = "ort_train has no option {name!r}{nearest}. Known options: {known}."


class InvalidOptionError(OrtDynamoError, ValueError):
    """A value that an option cannot take."""

    message = "ort_train option {name!r} cannot be {value!r}: expected {expected}."


class UnknownSettingError(InvalidOptionError):
    """A name in session_options that ONNX Runtime does not have."""

    message = "ort_train option {name!r}: {owner} has no {kind} {value!r}{nearest}."


class UnwritableFolderError(InvalidOptionError, OSError):
    """The folder of save_onnx or cache cannot be made, or a file of save_onnx not be written."""

    message = "ort_train option {name!r} cannot be {value!r}: {error}. Give a folder that can be written."


class InvalidArgumentError(OrtDynamoError, ValueError):
    """A value that an argument of a public function cannot take."""

    message = "{function}() cannot take {name}={value!r}: expected {expected}."


class InvalidVariableError(OrtDynamoError, ValueError, KeyError):
    """An environment variable has a value that it cannot take; ORTModule raised ValueError or KeyError."""

    message = "The environment variable {name} cannot be {value!r}: expected {expected}."

    def __str__(self) -> str:
        return self.message.format(**self.facts)


class UnknownModeError(OrtDynamoError, ValueError):
    """A torch.compile(mode=...) that is not one of ours."""

    message = (
        "ort_train has no mode {name!r}{nearest}. Known modes: {known}. 'max-autotune' and the like belong to inductor."
    )


class CacheOffError(OrtDynamoError):
    """The cache of compiled graphs is to be filled, and is off."""

    message = "The cache of compiled graphs is off: the environment variable {name} is 0. Unset it to fill the cache."


class CacheRefusedError(OrtDynamoError):
    """Others could have put something into the folder of compiled graphs, or the system refuses it."""

    message = (
        "The cache of compiled graphs is not used: {reason}. Give another folder by --dir or ORT_DYNAMO_CACHE_DIR."
    )


class DuplicateLoweringError(OrtDynamoError):
    """A second lowering for an overload that has one."""

    message = (
        "{overload} already has a lowering, {first}; the second one is {second}. "
        "From outside the project, register_lowering(..., replace=True) replaces it."
    )


class UnsupportedNodeError(OrtDynamoError):
    """Raised inside a lowering: this node cannot go to this target. The node then runs in eager."""

    message = "{reason}"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason=reason)


class LoweringError(OrtDynamoError):
    """A lowering failed in a way that is a defect of the lowering, not a property of the node."""

    message = "While lowering {node}\n  at {where}\n  {error}"


class NotCompiledError(OrtDynamoError):
    """A model that must be compiled is not compiled, or only in part."""

    message = (
        "{name} runs in eager:{reasons}\n"
        "ort_dynamo.summary() says what was compiled; python -m ort_dynamo help check_where_it_runs has the causes."
    )


class NotInOnnxRuntimeError(NotCompiledError):
    """A model that must run in ONNX Runtime alone is compiled, but torch runs some or all of its nodes."""

    message = "{name} does not run in ONNX Runtime alone, which whole='onnxruntime' requires:{reasons}\n{advice}"


class FallbackRefusedError(OrtDynamoError):
    """Nodes would run in eager under fallback='error'."""

    message = (
        "fallback='error': {count} node(s) of the {role} graph cannot run in ONNX Runtime:\n{nodes}\n"
        "Set options={{'fallback': 'eager'}} (the default) to run just these nodes in eager mode, or register a "
        "lowering of your own for them (python -m ort_dynamo help add_an_operator)."
    )


class GradientGraphError(OrtDynamoError):
    """A model cannot be exported with its gradients as one ONNX model."""

    message = "The gradients of this model cannot be exported as one ONNX model: {reason}"


class ProcessGroupError(OrtDynamoError, ValueError):
    """Options of an ORTTrainer and the processes that are there do not agree."""

    message = "ORTTrainer's options and torch.distributed do not agree: {reason}"


class SeveralProcessesError(OrtDynamoError, NotImplementedError):
    """Options of an ORTTrainer ask for a way to train in several processes that it does not have."""

    message = "ORTTrainer cannot train in several processes with these options: {reason}"


class TrainingGraphError(OrtDynamoError):
    """A model's training step cannot be one graph."""

    message = "The training step of this model cannot be one graph: {reason}"


class InputDtypeError(OrtDynamoError):
    """A trainer's step raised torch's error of a dtype that an input has."""

    message = "{error}\n{advice}"


class OnnxModelError(OrtDynamoError, ValueError):
    """A model in ONNX that cannot be trained: the file is not valid, or a node is not supported.

    Its facts are the `reason` and, for a node, `node`, `op_type`, `domain` and `opset`.
    """

    message = "This ONNX model cannot be trained: {reason}"


class OpsetError(OrtDynamoError):
    """A model cannot be written with another version of ONNX's operators."""

    message = "onnx cannot convert it to opset {version}: {reason}"


class RanksDisagreeError(OrtDynamoError):
    """Ranks of a process group compile the same graph, and disagree where a node runs or how it is compiled."""

    message = (
        "rank {rank} ({host}) and rank {other} ({other_host}) compile the same {role} graph differently:\n"
        "{differences}\n"
        "Give all ranks the same options, packages and environment variables. If they are to differ, compile with "
        "options={{'debug': {{'compare_ranks': False}}}}."
    )


class PassBrokeGraphError(OrtDynamoError):
    """A check between passes met an invalid graph: a defect of the pass that ran last."""

    message = (
        "{name} left an invalid {kind} graph: {error}\n"
        "If this pass is your own, correct it. Otherwise please report this message; "
        "options={{'debug': {{'verify': False}}}} compiles without the checks."
    )


class PassFailedError(OrtDynamoError):
    """A pass raised an error, which is this one's cause."""

    message = "The pass {name} failed: {error}\n{graph}"


class PassOrderError(OrtDynamoError):
    """A pass stands where a condition that it needs does not hold."""

    message = "The pass {name} is in the wrong place: it needs that {condition}, and {cause}."


class FakeValueError(OrtDynamoError):
    """A node gave another dtype or shape than its fake value promises."""

    message = (
        "{node} returned {real}, but its fake implementation promises {promised}.\n  {where}\n"
        "The fake implementation of this operator is wrong, or a pass has changed the graph wrongly. Compile with "
        "options={{'debug': {{'verify': True}}}} to check the graph after each pass."
    )


class SessionsDifferError(OrtDynamoError):
    """A session gave another result than the same model on the CPU without ONNX Runtime's optimizers."""

    message = (
        "Result {index} of the {graph} graph on {provider} differs from the result of the CPU without optimizers: "
        "{difference}. These nodes compute it:\n{nodes}\n"
        "Compile with options={{'graph_optimization': 'disable'}} to see whether an optimizer is the cause, and with "
        "options={{'save_onnx': FOLDER}} to get the model for a report."
    )


class ResultsDifferError(OrtDynamoError):
    """A step differs from eager mode, as `ort_dynamo.verify` or the option `verify` has found."""

    message = "{text}"


class SessionError(OrtDynamoError):
    """ONNX Runtime refused a model that was lowered without complaint."""

    message = (
        "ONNX Runtime ({package} {version}, {provider}) cannot open the {graph} graph: {error}\n"
        "If you set session_options or provider_options, try without them. Otherwise please report this message, with "
        "the model that options={{'save_onnx': FOLDER}} writes."
    )


class ExecutionError(OrtDynamoError):
    """ONNX Runtime stopped while it ran a graph.

    Its facts are `what` happened, `place` (the operator, the module and the user's line, one per line; empty if not
    known), and `error`, ONNX Runtime's message.
    """

    message = "{what}{place}\n  ONNX Runtime: {error}"


class SessionMemoryError(ExecutionError, MemoryError):
    """A session ran out of memory; the text begins with the words of torch's allocator, for which programs look."""

    message = "DefaultCPUAllocator: can't allocate memory: {what}{place}\n  ONNX Runtime: {error}"


class IndexOutOfBoundsError(ExecutionError, IndexError):
    """It stopped at an index that its tensor does not have; eager raises IndexError or RuntimeError, this is both."""


class IntegerDivisionByZeroError(ExecutionError, ZeroDivisionError):
    """It stopped at an integer divisor of zero; eager raises a RuntimeError "ZeroDivisionError", this is both."""


class InvalidValueError(ExecutionError):
    """It stopped at a value that eager's kernel refuses with a RuntimeError; the text begins with eager's words."""

    message = "{what}{place}"


class EmptyReductionError(ExecutionError, IndexError):
    """It stopped at a reduction over no elements; eager raises IndexError or RuntimeError, this is both."""

    message = "{what}{place}"
