"""The demo from start to end: tasks, progress bar, printed report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ort_dynamo.commands.demo.data import check_packages, digit_batches, load_digits, read_library_text, text_batches
from ort_dynamo.commands.demo.models import ByteGPT, DigitsNet
from ort_dynamo.commands.demo.training import Outcome, Task, Trace, train_side_by_side
from ort_dynamo.commands.demo.verdict import describe, judge
from ort_dynamo.runtime.installed.capabilities import installed_runtime

__all__ = ["TASKS", "run_demo"]


def _digits(seed: int) -> Task:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    digits = load_digits(generator)
    return Task(
        "digits: a residual network on scikit-learn's digits",
        DigitsNet(),
        digit_batches(digits, 64, generator),
        learning_rate=1e-3,
        test=(digits.test_images, digits.test_labels),
    )


def _gpt(seed: int) -> Task:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ByteGPT()
    batches = text_batches(read_library_text(2_000_000), 8, model.context, generator)
    return Task("gpt: a transformer on the bytes of Python's standard library", model, batches, learning_rate=1e-3)


TASKS: Mapping[str, Callable[[int], Task]] = {"digits": _digits, "gpt": _gpt}
"""Model name -> its task from a seed."""


def run_demo(models: Sequence[str], steps: int, seed: int, save_onnx: Path | None) -> int:
    """Train `models` (keys of TASKS) side by side and print the results.

    Returns:
        0, or 1 if a requirement is not met.

    Raises:
        MissingPackageError, RuntimeNotInstalledError, SeveralRuntimesError: before anything is trained.
    """
    check_packages({"tqdm": "tqdm"} | ({"sklearn": "scikit-learn"} if "digits" in models else {}))
    runtime = installed_runtime()
    began = time.perf_counter()
    print(
        f"{runtime.package} {runtime.version}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} thread(s)",
        flush=True,
    )
    if _is_busy():
        print("this machine is busy: step times are not reliable (--threads 1 is affected less)", flush=True)
    verdicts = []
    for name in models:
        task = TASKS[name](seed)
        folder = None if save_onnx is None else save_onnx / name
        before = _onnx_files(folder)
        outcome = _train(name, task, steps, seed, folder)
        verdicts += judge(outcome)
        print(f"\n{task.name}")
        for line in describe(outcome):
            print(f"  {line}")
        if folder is not None:
            _print_files(folder, before)
        for verdict in judge(outcome):
            print(f"  {verdict}", flush=True)
    failed = sum(verdict.state == "NOT OK" for verdict in verdicts)
    unchecked = sum(verdict.state == "not checked" for verdict in verdicts)
    print(
        f"\n{len(verdicts) - failed - unchecked} requirement(s) met, {failed} not met, {unchecked} not checked, "
        f"in {time.perf_counter() - began:.0f} s"
    )
    return 1 if failed else 0


def _train(name: str, task: Task, steps: int, seed: int, folder: Path | None) -> Outcome:
    from tqdm import tqdm

    options = {} if folder is None else {"save_onnx": str(folder), "placement": "onnxruntime"}
    with tqdm(total=steps, desc=name, unit=" step", disable=None) as bar:  # None: no bar when stderr is a file

        def progress(eager: Trace, ort: Trace) -> None:
            bar.set_postfix_str(f"loss: eager {eager.losses[-1]:.4f}, ort_train {ort.losses[-1]:.4f}", refresh=False)
            bar.update()

        return train_side_by_side(task, steps, seed, options, progress)


def _is_busy() -> bool:
    # Threads that wait for one another multiply the time that other processes take from them.
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)


def _onnx_files(folder: Path | None) -> dict[Path, int]:
    return {} if folder is None else {path: path.stat().st_mtime_ns for path in folder.glob("*.onnx")}


def _print_files(folder: Path, before: dict[Path, int]) -> None:
    written = [path for path, changed in _onnx_files(folder).items() if before.get(path) != changed]
    print(f"  ONNX files written to {folder}: {len(written)}")
    for path in sorted(written):
        print(f"    {path.name} ({path.stat().st_size / 1024:.0f} KiB)")
