"""Saves the models of one island: as lowered, as our passes leave it, and as ONNX Runtime's optimizers do."""

from __future__ import annotations

from pathlib import Path

import onnx
from torch.fx import GraphModule

from ort_dynamo.graph.build import BuildStage
from ort_dynamo.graph.marks import WRITTEN_FOR
from ort_dynamo.graph.model_files import write_model
from ort_dynamo.saving.readable_names import makers, readable

__all__ = ["IslandFiles", "NamesInFile", "names_in_file", "paths"]


def paths(name: str) -> dict[str, str]:
    """Stage -> where the model of island `name` is, below the folder of `save_onnx`."""
    return {"lowered": f"lowered/{name}.onnx", "rewritten": f"{name}.onnx", "optimized": f"optimized/{name}.onnx"}


class IslandFiles:
    """Writes an island's models, with readable names.

    Args:
        folder: the folder of the files.
        name: the name of the island, for the names of the files.
        island: the FX graph, with READABLE and SCOPE in its nodes' meta and WRITTEN_FOR in its own.
    """

    def __init__(self, folder: Path, name: str, island: GraphModule) -> None:
        self._folder = folder
        self._paths = paths(name)
        self._island = island
        self._makers: dict[str, str] = {}

    def write(self, stage: BuildStage) -> None:
        """Write the model of one stage; raises OSError."""
        self._makers |= makers(stage.model) if stage.model else {}
        named = readable(stage.serialised(), self._island, self._makers)
        named.metadata_props[WRITTEN_FOR] = str(self._island.meta.get(WRITTEN_FOR, ""))
        write_model(named, self._folder / self._paths[stage.stage])


class NamesInFile:
    """The names of a saved model's inputs and outputs, in order, and the program, role and island of the model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.inputs: list[str] = [value.name for value in model.graph.input]
        self.outputs: list[str] = [value.name for value in model.graph.output]
        self.written_for: str = next((prop.value for prop in model.metadata_props if prop.key == WRITTEN_FOR), "")


def names_in_file(folder: Path, name: str) -> NamesInFile | None:
    """Read the names in the saved model of island `name`; None if the file is missing."""
    path = folder / paths(name)["rewritten"]
    return NamesInFile(onnx.load(path, load_external_data=False)) if path.exists() else None
