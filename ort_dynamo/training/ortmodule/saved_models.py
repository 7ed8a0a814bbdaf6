"""The ONNX files that DebugOptions.save_onnx asks for, under ORTModule's names.

ORTModule had one graph for forward and backward, with a YieldOp where the loss was computed. Here forward and backward
are models of their own, and a file joins those that belong together:

| name | holds |
|---|---|
| torch_exported | the forward, as lowered |
| post_processed | the forward, after our passes |
| optimized_pre_grad | the forward, after ONNX Runtime's optimizers |
| optimized | forward and backward, after our passes: the models that sessions open |
| execution_model | forward and backward, after ONNX Runtime's optimizers: the models that run |

Of inference all hold the forward.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from pathlib import Path

import onnx_ir as ir

from ort_dynamo.embedding import OPSET, CompileRecord, at_opset, join_models, write_model
from ort_dynamo.errors import OpsetError
from ort_dynamo.training.ortmodule.debug_options import SaveOnnxOptions

__all__ = ["FILES", "SavedModels"]

FILES = {
    "torch_exported": ("lowered", False),
    "post_processed": ("rewritten", False),
    "optimized_pre_grad": ("optimized", False),
    "optimized": ("rewritten", True),
    "execution_model": ("optimized", True),
}
"""Name -> (stage, whether the backward is joined)."""


class SavedModels:
    """Writes the files of one mode of an ORTModule.

    A model with graph breaks has several graphs; the names of later ones have their index before the mode. A graph that
    is recompiled for other shapes replaces the saved one.

    Args:
        options: the folder, and the prefix of names.
        mode: "training" or "inference".
        opset: the ONNX opset of the files.
        logger: the logger for files that cannot have that opset.
    """

    def __init__(self, options: SaveOnnxOptions, mode: str, opset: int, logger: logging.Logger) -> None:
        self._options = options
        self._mode = mode
        self._opset = opset
        self._logger = logger
        self._numbers: dict[str, int] = {}
        self._parts = tempfile.mkdtemp(prefix="ort_dynamo-")
        weakref.finalize(self, shutil.rmtree, self._parts, ignore_errors=True)

    @property
    def folder(self) -> str:
        """The folder in which the backend saves the parts."""
        return self._parts

    def write(self, record: CompileRecord) -> None:
        """Write the files of one compile; raises OSError."""
        if record.saved is None or not any(graph.islands for graph in record.graphs):
            return
        function = (record.compile_id or "").partition("/")[0]
        number = self._numbers.setdefault(function, len(self._numbers))
        mode = f"{number}_{self._mode}" if number else self._mode
        for name, (stage, backward) in FILES.items():
            model = join_models(record.saved, stage, backward=backward and self._mode == "training")
            path = Path(self._options.path, f"{self._options.name_prefix}_{name}_{mode}.onnx")
            write_model(self._at_opset(model, path), path)

    def _at_opset(self, model: ir.Model, path: Path) -> ir.Model:
        try:
            return at_opset(model, self._opset)
        except OpsetError as error:
            message = "%s has opset %d, as onnx cannot convert it to ORTMODULE_ONNX_OPSET_VERSION=%d: %s"
            self._logger.warning(message, path.name, OPSET, self._opset, error.facts["reason"])
            return model
