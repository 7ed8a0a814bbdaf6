"""Read ORTModule's environment variables: all of them, and only here.

Each variable has an effect, or gives one line in the log with the reason why it has none
(docs/how_to/migrating_from_ortmodule.md). As in ORTModule, a variable overrides the program's own setting, and is read
when an ORTModule is created.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.embedding import OPSET, nearest
from ort_dynamo.errors import InvalidVariableError
from ort_dynamo.training.ortmodule.fallback import DEFAULT_POLICY, _FallbackPolicy
from ort_dynamo.training.ortmodule.logger import LogLevel

__all__ = [
    "WITHOUT_EFFECT",
    "Settings",
    "_SkipCheck",
    "json_path",
    "log_level",
    "read_settings",
    "save_path",
    "save_path_advice",
]


class _SkipCheck(IntFlag):
    """The checks that ORTModule left out in later steps; Dynamo's guards take their place. The name is ORTModule's."""

    SKIP_CHECK_DISABLED = 1
    SKIP_CHECK_DEVICE = 2
    SKIP_CHECK_BUILD_GRADIENT = 4
    SKIP_CHECK_EXECUTION_AGENT = 8


@dataclass(frozen=True)
class Settings:
    """The settings by which an ORTModule is compiled and run.

    Attributes:
        onnx_opset_version: the opset of the files of DebugOptions.save_onnx; the models that run have another.
        conv_algo_search: the choice of cuDNN's algorithms, on CUDA.
        propagate_cast_ops_strategy, propagate_cast_ops_level, propagate_cast_ops_allow: as torch.compile's options.
        memory_optimization_level: 0 uses memory_optimizer_config, 1 and 2 recompute the insides of layers.
        memory_optimizer_config: a JSON file with a list of plans, or plans joined by commas.
        print_memory_stat_by_step: print memory and time at each phase of a step.
        fallback_policy: the conditions under which the model runs in PyTorch.
        fallback_retry: try ONNX Runtime again at each call, for a model that was sent back to PyTorch.
        skip_check: stored, without effect.
        cache_dir: a folder for compiled graphs; if empty, this project's own variables apply.
        enable_tuning, max_tuning_duration_ms: options of CUDA's provider.
    """

    onnx_opset_version: int = OPSET
    conv_algo_search: str = "HEURISTIC"
    propagate_cast_ops_strategy: PropagateCastOpsStrategy = PropagateCastOpsStrategy.FLOOD_FILL
    propagate_cast_ops_level: int = 1
    propagate_cast_ops_allow: tuple[str, ...] = ()
    memory_optimization_level: int = 0
    memory_optimizer_config: str = ""
    print_memory_stat_by_step: bool = False
    fallback_policy: _FallbackPolicy = DEFAULT_POLICY
    fallback_retry: bool = False
    skip_check: _SkipCheck = (
        _SkipCheck.SKIP_CHECK_DEVICE | _SkipCheck.SKIP_CHECK_BUILD_GRADIENT | _SkipCheck.SKIP_CHECK_EXECUTION_AGENT
    )
    cache_dir: str = ""
    enable_tuning: bool = False
    max_tuning_duration_ms: int = 0

    def options(self) -> dict[str, Any]:
        """Return the options of torch.compile(backend="ort_train") that these are, but for the provider's."""
        options: dict[str, Any] = {
            "fallback": "eager" if self.fallback_policy.takes_eager_nodes else "error",
            "propagate_cast_ops_strategy": self.propagate_cast_ops_strategy,
            "propagate_cast_ops_level": min(self.propagate_cast_ops_level, 2),  # as ONNX Runtime takes higher ones
            "propagate_cast_ops_allow": self.propagate_cast_ops_allow,
        }
        if self.memory_optimization_level > 0:
            options["transformer_layer_recompute"] = True
        elif self.memory_optimizer_config:
            options["recompute_plan"] = self.memory_optimizer_config
        if self.cache_dir:
            options |= {"disk_cache": True, "cache_dir": self.cache_dir}
        return options

    def provider_options(self) -> dict[str, str]:
        """Return the options of CUDA's provider that ORTModule set."""
        options = {
            "cudnn_conv_algo_search": self.conv_algo_search,
            "cudnn_conv_use_max_workspace": "1",
            "cudnn_conv1d_pad_to_nc1d": "1",
        }
        if self.enable_tuning:
            options |= {"tunable_op_enable": "1", "tunable_op_tuning_enable": "1"}
            if self.max_tuning_duration_ms > 0:
                options["tunable_op_max_tuning_duration_ms"] = str(self.max_tuning_duration_ms)
        return options


_COMPUTE = "the compute optimizer (moving Gathers up, leaving padding out) is not offered"
_TRITON = "no Triton kernels are made here; torch.compile(backend='inductor') makes them"
_ATTENTION = "torch chooses the attention kernel; torch.nn.attention.sdpa_kernel selects one"
_EXTENSIONS = "there are no C++ extensions to build or find"

WITHOUT_EFFECT: Mapping[str, str] = {
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": _COMPUTE,
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": _COMPUTE,
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": _COMPUTE,
    "ORTMODULE_PRINT_INPUT_DENSITY": _COMPUTE,
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "torch.utils.checkpoint is traced, and its region is recomputed",
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": "an autograd.Function is traced, always",
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": "no gradient waits in ONNX Runtime for the end of the backward",
    "ORTMODULE_ENABLE_ZERO_STAGE3": "DeepSpeed's stage 3 is not supported; torch's FSDP shards parameters",
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": "nothing runs to export a model, so nothing is copied for it",
    "ORTMODULE_USE_TRITON": _TRITON,
    "ORTMODULE_TRITON_CONFIG_FILE": _TRITON,
    "ORTMODULE_TRITON_DEBUG": _TRITON,
    "ORTMODULE_USE_FLASH_ATTENTION": _ATTENTION,
    "ORTMODULE_USE_EFFICIENT_ATTENTION": _ATTENTION,
    "ORTMODULE_ATEN_SDPA_FALLBACK": _ATTENTION,
    "ORTMODULE_TUNING_RESULTS_PATH": "results of tuning are not kept; a process tunes again",
    "ORTMODULE_SKIPCHECK_POLICY": "Dynamo's guards check what has changed, and cannot be left out",
    "ORTMODULE_EXTERNAL_TORCH_CPP_EXTENSION_DIR": _EXTENSIONS,
    "ORTMODULE_EXTERNAL_TORCH_CUDA_EXTENSION_DIR": _EXTENSIONS,
}
"""Variable -> why it has none here."""

_READ = frozenset(
    {
        "ORTMODULE_CACHE_DIR",
        "ORTMODULE_CONV_ALGO_SEARCH",
        "ORTMODULE_ENABLE_TUNING",
        "ORTMODULE_FALLBACK_POLICY",
        "ORTMODULE_FALLBACK_RETRY",
        "ORTMODULE_JSON_CONFIG_PATH",
        "ORTMODULE_LOG_LEVEL",
        "ORTMODULE_MAX_TUNING_DURATION_MS",
        "ORTMODULE_MEMORY_OPT_CONFIG",
        "ORTMODULE_MEMORY_OPT_LEVEL",
        "ORTMODULE_ONNX_OPSET_VERSION",
        "ORTMODULE_PRINT_MEMORY_STATS",
        "ORTMODULE_SAVE_ONNX_PATH",
    }
)
_NUMBERS_WITHOUT_EFFECT = frozenset(
    name
    for name in WITHOUT_EFFECT
    if name.startswith(("ORTMODULE_ENABLE", "ORTMODULE_PRINT", "ORTMODULE_ALLOW", "ORTMODULE_DEEPCOPY"))
)

_SAVE_PATH = "ORTMODULE_SAVE_ONNX_PATH"
_said: set[str] = set()
_Flag = TypeVar("_Flag", bound=IntFlag)


def read_settings(default: Settings, logger: logging.Logger) -> Settings:
    """Change `default` as the environment asks; a variable without effect is answered once in the log.

    Raises:
        InvalidVariableError: a value that its variable cannot take.
    """
    changed: dict[str, Any] = {}
    for field, name in (
        ("onnx_opset_version", "ORTMODULE_ONNX_OPSET_VERSION"),
        ("memory_optimization_level", "ORTMODULE_MEMORY_OPT_LEVEL"),
        ("max_tuning_duration_ms", "ORTMODULE_MAX_TUNING_DURATION_MS"),
    ):
        if name in os.environ:
            changed[field] = _integer(name)
    for field, name in (
        ("print_memory_stat_by_step", "ORTMODULE_PRINT_MEMORY_STATS"),
        ("enable_tuning", "ORTMODULE_ENABLE_TUNING"),
    ):
        if name in os.environ:
            changed[field] = _integer(name) == 1
    if changed.get("memory_optimization_level", 0) not in (0, 1, 2):
        raise _invalid("ORTMODULE_MEMORY_OPT_LEVEL", "0, 1 or 2")
    if "ORTMODULE_CACHE_DIR" in os.environ:
        changed["cache_dir"] = os.environ["ORTMODULE_CACHE_DIR"]
    if "ORTMODULE_MEMORY_OPT_CONFIG" in os.environ:
        changed["memory_optimizer_config"] = os.environ["ORTMODULE_MEMORY_OPT_CONFIG"]
    if "ORTMODULE_CONV_ALGO_SEARCH" in os.environ:
        changed["conv_algo_search"] = _conv_algo_search(logger)
    if "ORTMODULE_FALLBACK_POLICY" in os.environ:
        changed["fallback_policy"] = _flags("ORTMODULE_FALLBACK_POLICY", _FallbackPolicy)
    if "ORTMODULE_FALLBACK_RETRY" in os.environ:
        changed["fallback_retry"] = os.environ["ORTMODULE_FALLBACK_RETRY"].lower() in ("true", "1", "yes")
    if "ORTMODULE_SKIPCHECK_POLICY" in os.environ:
        changed["skip_check"] = _flags("ORTMODULE_SKIPCHECK_POLICY", _SkipCheck)
    _answer_others(logger)
    return dataclasses.replace(default, **changed)


def log_level(given: LogLevel) -> LogLevel:
    """Read ORTMODULE_LOG_LEVEL, or give `given` if it is not set; an invalid one raises InvalidVariableError."""
    name = os.environ.get("ORTMODULE_LOG_LEVEL")
    if name is None:
        return given
    if name not in LogLevel.__members__:
        raise _invalid("ORTMODULE_LOG_LEVEL", "one of " + ", ".join(LogLevel.__members__))
    return LogLevel[name]


def save_path(given: str) -> str:
    """ORTMODULE_SAVE_ONNX_PATH, or `given`, or the working directory."""
    return os.environ.get(_SAVE_PATH, given or os.getcwd())


def save_path_advice() -> str:
    """Name the argument or the variable to change for another `save_path`."""
    if _SAVE_PATH in os.environ:
        return f"Please set the {_SAVE_PATH} environment variable, which overrides save_path, to a writable path."
    return f"Please set save_path, or the {_SAVE_PATH} environment variable, to a writable path."


def json_path(given: str | None) -> str | None:
    """ORTMODULE_JSON_CONFIG_PATH, or `given`."""
    return os.environ.get("ORTMODULE_JSON_CONFIG_PATH", given)


def _flags(name: str, kind: type[_Flag]) -> _Flag:
    try:
        return reduce(or_, (kind[one.strip()] for one in os.environ[name].split("|")))
    except KeyError as error:
        expected = f"names joined by '|' of {', '.join(kind.__members__)}"
        raise _invalid(name, expected + nearest(str(error.args[0]), kind.__members__)) from None


def _integer(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise _invalid(name, "an integer") from None


def _invalid(name: str, expected: str) -> InvalidVariableError:
    return InvalidVariableError(name=name, value=os.environ[name], expected=expected)


def _conv_algo_search(logger: logging.Logger) -> str:
    given = os.environ["ORTMODULE_CONV_ALGO_SEARCH"]
    if given in ("HEURISTIC", "EXHAUSTIVE"):
        return given
    logger.warning("Invalid value of env CONV_ALGO_SEARCH. Must be HEURISTIC or EXHAUSTIVE.")
    return "HEURISTIC"


def _answer_others(logger: logging.Logger) -> None:
    """Log once, for each variable set without effect, the reason; for an unknown one, the variable that was meant."""
    for name in sorted(name for name in os.environ if name.startswith("ORTMODULE_")):
        if name in _NUMBERS_WITHOUT_EFFECT:
            _integer(name)
        if name not in _READ and name not in _said:
            _said.add(name)
            reason = WITHOUT_EFFECT.get(name)
            unknown = f"ORTModule has no such variable{nearest(name, {*_READ, *WITHOUT_EFFECT})}"
            logger.warning("%s has no effect: %s.", name, reason or unknown)
