"""python -m ort_dynamo demo: two small models, each trained in eager and in ort_train from the same seed."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Train a small ResNet and a small GPT, in eager mode and with ort_train, and compare."

_MODELS = ("digits", "gpt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's arguments."""
    parser.add_argument(
        "--model", choices=(*_MODELS, "both"), default="both", help="which model to train (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=200,
        metavar="N",
        help="training steps of each model (default: %(default)s; with fewer, some checks are skipped)",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="the random seed (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="the number of threads of torch and of ONNX Runtime (default: torch's choice)",
    )
    parser.add_argument(
        "--save-onnx", type=_folder, metavar="DIR", help="write each compiled graph as an ONNX file under DIR/<model>"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, compare and print.

    Returns:
        0, or 1 if a requirement is not met.

    Raises:
        MissingPackageError: scikit-learn or tqdm is not installed.
        RuntimeNotInstalledError, SeveralRuntimesError: no usable ONNX Runtime.
    """
    import torch

    from ort_dynamo.commands.demo.program import run_demo

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    models = _MODELS if arguments.model == "both" else (arguments.model,)
    return run_demo(models, arguments.steps, arguments.seed, arguments.save_onnx)


def _positive(text: str) -> int:
    value = int(text)  # argparse words a ValueError's message itself
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: give 1 or more")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not a seed: give a number from 0 to 2**31 - 1")
    return value


_positive.__name__ = _seed.__name__ = "whole number"  # "invalid whole number value: 'ten'"


def _folder(text: str) -> Path:
    folder = Path(text)
    try:
        # Now, and not after minutes of training.
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {text}: {error.strerror}") from error
    return folder
