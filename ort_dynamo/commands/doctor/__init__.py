"""python -m ort_dynamo doctor: the installed packages, the devices that can run, and each fault with its fix."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from ort_dynamo.errors import MissingDependencyError

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Check the installation: print versions and devices, and a fix for each problem."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Look, and print.

    Returns:
        0, or 1 if something is wrong.

    Raises:
        MissingDependencyError: a package without which it cannot look is not installed.
    """
    for package in ("torch", "numpy", "onnx", "onnx-ir", "platformdirs"):
        if find_spec(package.replace("-", "_")) is None:
            raise MissingDependencyError(what="The doctor", package=package)
    from ort_dynamo.commands.doctor.findings import findings
    from ort_dynamo.commands.doctor.gather import gather
    from ort_dynamo.commands.doctor.text import as_json, as_text

    facts = gather()
    found = findings(facts)
    print((as_json if arguments.json else as_text)(facts, found))
    return int(any(one.is_fault for one in found))
