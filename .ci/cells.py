"""The cells of the matrix of versions: sets of package versions, and the tests that run on each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
RUNTIMES = (
    "onnxruntime-training==1.19.2",
    "onnxruntime==1.28.0",
    "onnxruntime==1.30.0",
    "onnxruntime==1.31.1",
    "onnxruntime==1.32.0",
)
# Bound to one version of torch, by torch's own metadata.
BOUND_TO_TORCH = re.compile(r"torch|triton|setuptools|nvidia-.*|cuda-.*")

# Every stage and every place where another package is met, in about a minute on two cores.
SAMPLE = (
    "tests/graph/test_graph_key.py",
    "tests/cache/test_memory.py",
    "tests/capture/test_input_writes.py",
    "tests/capture/test_random_numbers.py",
    "tests/commands/test_passes.py",
    "tests/lowering/ops/layers/test_attention.py::test_attention_of_other_dtypes_equals_eager",
    "tests/lowering/ops/elementwise/test_cast.py",
    "tests/lowering/ops/layers/test_loss.py::test_binary_cross_entropy_equals_eager",
    "tests/lowering/test_register_lowering.py",
    "tests/passes/fx/analysis/test_memory.py",
    "tests/passes/fx/test_batch_norm.py",
    "tests/passes/fx/test_hoist_random.py",
    "tests/passes/fx/test_keep_statistics_wide.py",
    "tests/passes/fx/test_copy_small_results.py",
    "tests/passes/fx/recompute/test_recompute_casts.py",
    "tests/passes/fx/recompute/test_recompute_plan.py",
    "tests/passes/fx/test_remove_no_ops.py",
    *(
        f"tests/passes/onnx/cast_propagation/test_propagate_casts{part}.py"
        for part in ("", "_moves", "_subgraphs", "_types")
    ),
    "tests/passes/onnx/test_fold_casts.py",
    "tests/passes/onnx/test_fuse_row_sum.py",
    "tests/passes/onnx/test_remove_round_trips.py",
    "tests/passes/onnx/test_restore_order.py",
    "tests/passes/onnx/test_separate_outputs.py",
    *(f"tests/runtime/test_{name}.py" for name in ("binding", "session")),
    *(f"tests/runtime/installed/test_{name}.py" for name in ("capabilities", "defects", "importing")),
    "tests/segment",
    "tests/test_backend.py",
    *(f"tests/models/test_models.py::test_a_training_step_equals_eager[{name}]" for name in ("bert", "gpt2", "resnet")),
    "tests/models/test_models.py::test_symbolic_batches_compile_once[gpt2]",
)


@dataclass(frozen=True)
class Cell:
    """One set of versions and the tests that are run with it."""

    python: str
    torch: str
    runtime: str  # a requirement: distribution==version
    suite: str = "sample"  # or "whole"
    constraints: str = "constraints-newest.txt"  # the rest of the versions
    lane: str = ""  # the name of a constraints file taken whole; empty where torch and the runtime are exchanged
    exchanged: tuple[str, ...] = ()  # requirements that take the place of those in the constraints

    @property
    def name(self) -> str:
        """Give the name by which the cell is chosen and its record replaced."""
        swaps = "".join(f", {pin}" for pin in self.exchanged)
        return self.lane or f"Python {self.python}, torch {self.torch}, {self.runtime.replace('==', ' ')}{swaps}"

    @property
    def extra(self) -> str:
        """Give the extra of this project that brings the cell's runtime."""
        return "training" if self.runtime.startswith("onnxruntime-training") else "cpu"

    def pins(self) -> list[str]:
        """Give every requirement that the cell's environment is held to."""
        pins = read_pins(ROOT / self.constraints)
        if not self.lane:
            pins = {name: pin for name, pin in pins.items() if not BOUND_TO_TORCH.fullmatch(name)}
            pins |= {"torch": f"torch=={self.torch}"}
        for pin in (self.runtime, *self.exchanged):
            pins[package_of(pin)] = pin
        return sorted(pins.values())


def read_pins(file: Path) -> dict[str, str]:
    """Read a constraints file as requirements by the names of their packages."""
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return {package_of(line): line for line in lines if line}


def package_of(pin: str) -> str:
    """Give the name that a requirement begins with, as package indexes spell it: ml_dtypes and ml-dtypes are one."""
    return re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()


def oldest(*names: str) -> tuple[str, ...]:
    """Give the requirements of the oldest lane for some packages."""
    pins = read_pins(ROOT / "constraints-oldest.txt")
    return tuple(pins[name] for name in names)


CELLS = (
    *(Cell("3.11", torch, runtime) for torch in TORCHES for runtime in RUNTIMES),
    # One package at its oldest, all others at their newest.
    *(Cell("3.11", "2.13.0", RUNTIMES[-2], exchanged=oldest(name)) for name in ("onnx", "onnx-ir", "onnxscript")),
    Cell(
        "3.11",
        "2.13.0",
        RUNTIMES[-2],
        exchanged=(*oldest("numpy", "scikit-learn"), "scipy==1.15.3", "ml-dtypes==0.5.4"),
    ),
    *(
        Cell(python, "2.15.0", runtime)
        for python in PYTHONS[1:]
        for runtime in ("onnxruntime==1.28.0", "onnxruntime==1.32.0")
    ),
    # The whole suite, where CI does not run it.
    Cell("3.11", "2.11.0", "onnxruntime==1.28.0", "whole", "constraints-oldest.txt", "oldest"),
    Cell("3.11", "2.13.0", "onnxruntime==1.32.0", "whole", "constraints.txt", "stock on onnxruntime 1.32.0"),
)
