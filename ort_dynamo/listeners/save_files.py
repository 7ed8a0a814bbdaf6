"""Saves one compile: names the nodes of its graphs before they are cut, and writes the file that joins their models."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.errors import UnwritableFolderError
from ort_dynamo.graph.build import BuildStage
from ort_dynamo.graph.marks import WRITTEN_FOR
from ort_dynamo.graph.model_files import write_json
from ort_dynamo.options.groups import DumpOptions
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.saving.describe_graph import describe_graph
from ort_dynamo.saving.island import IslandFiles
from ort_dynamo.saving.program import name_nodes, output_names, read_program

__all__ = ["SaveFiles"]


_LONGEST = 100
"""Characters of the program's name in the name of a file."""


class SaveFiles(Listener):
    """Saves a compile. It is created while Dynamo traces, when the program's names are known.

    Args:
        options: the options with the folder, which is not None.
        gm: Dynamo's graph.
        inputs: its inputs.

    Raises:
        UnwritableFolderError: of this and of the methods: the folder cannot be written.
    """

    def __init__(self, options: DumpOptions, gm: GraphModule, inputs: Sequence[Any]) -> None:
        assert options.save_onnx is not None
        self._folder = Path(options.save_onnx)
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
        self._program = read_program(gm, inputs)
        self._files: IslandFiles
        self._graphs: list[Mapping[str, Any]] = []

    def cut(self, graphs: Mapping[str, GraphModule], partition: PartitionRecord | None) -> None:
        """Name the nodes of graphs; a tensor that a forward saves has one name in forward and backward."""
        first, *others = graphs.values()
        saved = name_nodes(first, self._program)
        for gm in others:
            name_nodes(gm, self._program, saved=saved)

    def segmented(self, graph: GraphCompilation) -> None:
        """Mark each island with the program, role and island name of its model."""
        for name, island in graph.segmented.islands.items():
            island.meta[WRITTEN_FOR] = f"{graph.gm.meta.get(WRITTEN_FOR, '')} {graph.role} {name}".strip()

    def built(self, stage: BuildStage) -> None:
        """Write the model of one stage."""
        if stage.stage == "lowered":  # the first; islands without a key share a name
            self._files = IslandFiles(self._folder, stage.name, stage.island)
        with self._writing():
            self._files.write(stage)

    def opened(self, graph: GraphCompilation) -> None:
        """Describe the outer graph, while nothing has rewritten it to run."""
        names = output_names(graph.gm, self._program)
        with self._writing():
            self._graphs.append(describe_graph(graph.segmented, graph.role, self._folder, graph.seen, names))

    def close(self) -> Path:
        """Write how the models of the graphs join, as JSON, and give the file.

        The file's name ends in a hash of its description of the graphs: a compile for other shapes is another file, and
        the same program gives the same files.
        """
        runtime = installed_runtime()
        content = {
            "program": self._program.name,
            "compile": self._program.compile_id,
            "versions": {
                "ort_dynamo": version("ort-dynamo"),
                "torch": str(torch.__version__),
                runtime.package: runtime.version,
            },
            "aliases": {name: list(others) for name, others in self._program.aliases.items()},
            "graphs": self._graphs,
        }
        digest = hashlib.sha256(json.dumps(content["graphs"], sort_keys=True).encode()).hexdigest()[:12]
        called = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in self._program.name)
        path = self._folder / f"{called[:_LONGEST]}-{digest}.json"
        with self._writing():
            write_json(content, path)
        return path

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnwritableFolderError(name="save_onnx", value=str(self._folder), error=error) from error
