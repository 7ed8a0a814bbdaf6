"""Saves one compile: names the nodes of its graphs before they are cut, and writes the file that joins their models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.runtime.capabilities import installed_runtime
from ort_dynamo.saving.files import write_json
from ort_dynamo.saving.program import name_nodes, read_program

__all__ = ["SavedCompile"]

_Partition = Callable[..., tuple[GraphModule, GraphModule]]


class SavedCompile:
    """One compile whose models are saved; made while Dynamo traces, which knows what the program calls things.

    Args:
        folder: where to.
        gm: Dynamo's graph.
        example_inputs: its inputs.
    """

    def __init__(self, folder: str, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self._folder = Path(folder)
        self._program = read_program(gm, example_inputs)

    def name(self, gm: GraphModule) -> None:
        """Name the nodes of an inference graph."""
        name_nodes(gm, self._program)

    def naming(self, partition: _Partition) -> _Partition:
        """Make a partition function that names the nodes of both halves, a saved tensor alike in both."""

        def named(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            forward, backward = partition(*args, **kwargs)
            name_nodes(backward, self._program, saved=name_nodes(forward, self._program))
            return forward, backward

        return named

    def write(self, graphs: Sequence[Mapping[str, Any]]) -> Path:
        """Write how the models of the graphs join, as JSON, and give the file; raises OSError.

        The file's name ends in a hash of what it says of the graphs: a compile for other shapes is another file, and
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
            "graphs": list(graphs),
        }
        digest = hashlib.sha256(json.dumps(content["graphs"], sort_keys=True).encode()).hexdigest()[:12]
        called = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in self._program.name)
        path = self._folder / f"{called}-{digest}.json"
        write_json(content, path)
        return path
