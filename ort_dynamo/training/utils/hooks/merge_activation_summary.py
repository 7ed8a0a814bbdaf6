"""Puts the activations of two runs side by side: `python -m ort_dynamo.training.utils.hooks.merge_activation_summary`.

It reads the files of a StatisticsSubscriber in a run of PyTorch and in one of ORTModule, and writes one file for
each step and run, in the order of the first run's first step: to be compared by any tool that shows differences.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "merge"]

_log = logging.getLogger(__name__)


def merge(pt_dir: str, ort_dir: str, output_dir: str, *, overwrite: bool = False) -> None:
    """Merge the summaries of two runs.

    Args:
        pt_dir: the output_dir of PyTorch's run.
        ort_dir: that of ORTModule's.
        output_dir: gets the folders merge_pt and merge_ort, with a file step_<n>_.txt for each step.
        overwrite: remove an output_dir that is there.

    Raises:
        FileExistsError: output_dir exists.
        FileNotFoundError: pt_dir has no step 0.
        ValueError: pt_dir lists a file outside of its folders.
    """
    output = Path(output_dir)
    if output.exists():
        if not overwrite:
            raise FileExistsError(
                f"Output directory {output_dir} already exists. Enable --overwrite to allow overwriting it."
            )
        _log.warning("Output directory %s already exists, overwriting it.", output_dir)
        shutil.rmtree(output)
    order = Path(pt_dir, "step_0", "order.txt").read_text(encoding="utf-8").splitlines()
    if outside := [name for name in order if Path(name).name != name]:
        raise ValueError(f"{pt_dir} lists files outside of its folders: {outside[0]!r}")
    for source, name in ((pt_dir, "merge_pt"), (ort_dir, "merge_ort")):
        _merge_run(Path(source), output / name, order)


def _merge_run(source: Path, target: Path, order: Sequence[str]) -> None:
    target.mkdir(parents=True)
    for step in sorted(path for path in source.iterdir() if path.is_dir()):
        with (target / f"{step.name}_.txt").open("w", encoding="utf-8") as merged:
            for name in order:
                if (step / name).exists():
                    merged.write((step / name).read_text(encoding="utf-8") + "\n")
                else:  # such as an unread result, which is not computed
                    _log.warning("tensor %s not exist", step / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Puts the activations of two runs side by side.")
    parser.add_argument("--pt_dir", required=True, help="output_dir of the run of PyTorch")
    parser.add_argument("--ort_dir", required=True, help="output_dir of the run of ORTModule")
    parser.add_argument("--output_dir", required=True, help="folder for the merged files")
    parser.add_argument("--overwrite", action="store_true", help="remove a folder that is there")
    given = parser.parse_args(arguments)
    merge(given.pt_dir, given.ort_dir, given.output_dir, overwrite=given.overwrite)


if __name__ == "__main__":
    main()
