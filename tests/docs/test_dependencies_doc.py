"""docs/reference/dependencies.md lists the packages that are installed with this one, with their licences."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ROWS = dict(
    re.findall(r"^\| `([\w-]+)` \| ([\w.-]+) \|", (ROOT / "docs/reference/dependencies.md").read_text(), re.MULTILINE)
)
RUNTIMES = ("training", "cpu", "cuda")

NAMES = {
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "apache software license": "Apache-2.0",
    "apache license v2.0": "Apache-2.0",  # of onnx 1.18
    "bsd license": "BSD-3-Clause",
}
"""Licences as classifiers name them -> their identifiers."""

COPYLEFT = re.compile(r"\b[AL]?GPL|General Public")
EXCEPTION = "GCC-exception"
"""A program that is linked with the libraries of a compiler may have any licence."""

NVIDIA = ("nvidia-", "cuda-")
"""Packages under NVIDIA's own licences, as the page says."""


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def licences(package: Distribution) -> set[str]:
    """List the identifiers in a package's metadata: its expression, or else the field of old, or its classifiers."""
    about = package.metadata
    stated = about.get("License-Expression") or about.get("License") or ""
    classified = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier", []) if one.startswith("License")]
    texts = [*re.split(r" AND | OR ", stated.splitlines()[0] if stated else ""), *classified]
    return {NAMES.get(text.lower(), text) for text in texts if text}


def test_the_page_lists_the_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *(one for extra in RUNTIMES for one in extras[extra])]
    assert sorted(ROWS) == sorted(Requirement(one).name for one in required)


@pytest.mark.parametrize("name", ROWS)
def test_the_page_has_the_licence_that_a_package_states(name: str) -> None:
    package = installed(name)
    if package is None:
        assert name.startswith("onnxruntime"), "everything else is always installed"
        pytest.skip("another build of ONNX Runtime is installed")
    assert ROWS[name] in licences(package)


def test_no_package_that_is_required_is_under_a_copyleft_licence() -> None:
    seen: set[str] = set()
    waiting = [name for name in ROWS if installed(name)]
    while waiting:
        name = canonicalize_name(waiting.pop())
        package = installed(name)
        if name in seen or package is None or name.startswith(NVIDIA):  # None is a requirement of another platform
            continue
        seen.add(name)
        found = licences(package)
        assert found, f"{name} states no licence"
        assert not [one for one in found if COPYLEFT.search(one) and EXCEPTION not in one], f"{name}: {found}"
        needed = [Requirement(one) for one in package.requires or []]
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert "protobuf" in seen, "requirements of requirements are looked at"
