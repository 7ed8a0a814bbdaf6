"""DebugOptions: how much ORTModule logs, and which ONNX models it saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ort_dynamo.training.ortmodule import environment
from ort_dynamo.training.ortmodule.logger import LogLevel

__all__ = ["DebugOptions", "LoggingOptions", "SaveOnnxOptions"]


class SaveOnnxOptions:
    """The ONNX models to save.

    Attributes:
        save: whether they are saved.
        name_prefix: the prefix of their names.
        path: the folder.
    """

    def __init__(self, save: bool, name_prefix: str, path: str) -> None:
        self.save = save
        self.name_prefix = name_prefix
        self.path: str = environment.save_path(path)
        if not save:
            return
        if not (os.path.isdir(self.path) and os.access(self.path, os.W_OK)):
            is_missing = "" if os.path.isdir(self.path) else " It is not an existing folder."
            raise OSError(f"Directory {self.path} is not writable.{is_missing} {environment.save_path_advice()}")
        if not isinstance(name_prefix, str):
            raise TypeError(f"Expected name prefix of type str, got {type(name_prefix)}.")
        if not name_prefix:
            raise ValueError("onnx_prefix must be provided when save_onnx is set.")
        if Path(name_prefix).name != name_prefix or "\0" in name_prefix:
            raise ValueError(f"onnx_prefix begins the names of files, and cannot be {name_prefix!r}")


class LoggingOptions:
    """The level of the log.

    Attributes:
        log_level: the level; the environment's goes before the program's.
    """

    def __init__(self, log_level: LogLevel) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(log_level)}.")
        self.log_level: LogLevel = environment.log_level(log_level)


class DebugOptions:
    """Options to debug an ORTModule.

    Args:
        log_level: the log level; ORTMODULE_LOG_LEVEL overrides it.
        save_onnx: save the ONNX models of every compile (`python -m ort_dynamo help migrating_from_ortmodule`).
        onnx_prefix: the prefix of the names of saved files.
        save_path: the folder of the saved files, by default the working directory; ORTMODULE_SAVE_ONNX_PATH overrides
            it.
        config: accepted for compatibility, without effect.

    Raises:
        OSError: the folder cannot be written, with save_onnx.
        TypeError: log_level is no LogLevel; or, with save_onnx, onnx_prefix is no text.
        ValueError: onnx_prefix is empty or has a folder, with save_onnx.
        InvalidVariableError: ORTMODULE_LOG_LEVEL is no level.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
    ) -> None:
        self.log_level = log_level
        self.save_onnx = save_onnx
        self.onnx_prefix = onnx_prefix
        self.config = config
        self._save_onnx_models = SaveOnnxOptions(save_onnx, onnx_prefix, save_path)
        self._logging = LoggingOptions(log_level)

    @property
    def save_onnx_models(self) -> SaveOnnxOptions:
        """The ONNX models to save."""
        return self._save_onnx_models

    @property
    def logging(self) -> LoggingOptions:
        """The level of the log."""
        return self._logging
