"""Saves the models of one island: as lowered, as our passes leave it, and as ONNX Runtime's optimizers do."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from torch.fx import GraphModule

from ort_dynamo.marks import WRITTEN_FOR
from ort_dynamo.options.groups import DumpOptions
from ort_dynamo.saving.files import write_model
from ort_dynamo.saving.readable import makers, readable

__all__ = ["IslandFiles", "NamesInFile", "names_in_file", "paths"]


def paths(name: str) -> dict[str, str]:
    """Stage -> where the model of island `name` is, below the folder of `save_onnx`."""
    return {"lowered": f"lowered/{name}.onnx", "rewritten": f"{name}.onnx", "optimized": f"optimized/{name}.onnx"}


class IslandFiles:
    """Writes an island's models, with readable names, if `options.save_onnx` asks for it.

    Args:
        options: where to.
        name: the island's, of which the files' names are made.
        island: the FX graph, with READABLE and SCOPE in its nodes' meta and WRITTEN_FOR in its own.
    """

    def __init__(self, options: DumpOptions, name: str, island: GraphModule) -> None:
        self.asked = options.save_onnx is not None
        self._folder = Path(options.save_onnx or "")
        self._paths = paths(name)
        self._island = island
        self._makers: dict[str, str] = {}

    def lowered(self, model: ir.Model) -> None:
        """Write the model before any pass; raises OSError."""
        if self.asked:
            self._write("lowered", ir.to_proto(model).SerializeToString(), model)

    def rewritten(self, model: ir.Model, serialised: bytes) -> None:
        """Write the model that passes have left; raises OSError."""
        if self.asked:
            self._write("rewritten", serialised, model)

    def optimized(self, serialised: bytes) -> None:
        """Write the model that ONNX Runtime's optimizers have left of the one before; raises OSError."""
        if self.asked:
            self._write("optimized", serialised)

    def _write(self, stage: str, serialised: bytes, model: ir.Model | None = None) -> None:
        self._makers |= makers(model) if model else {}
        named = readable(serialised, self._island, self._makers)
        named.metadata_props[WRITTEN_FOR] = str(self._island.meta.get(WRITTEN_FOR, ""))
        write_model(named, self._folder / self._paths[stage])


class NamesInFile:
    """What a saved model calls its inputs and outputs, in order, and what it was written for."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.inputs = [value.name for value in model.graph.input]
        self.outputs = [value.name for value in model.graph.output]
        self.written_for = next((prop.value for prop in model.metadata_props if prop.key == WRITTEN_FOR), "")


def names_in_file(folder: Path, name: str) -> NamesInFile | None:
    """Read the names out of the saved model of island `name`; None where it is gone."""
    path = folder / paths(name)["rewritten"]
    return NamesInFile(onnx.load(path, load_external_data=False)) if path.exists() else None
