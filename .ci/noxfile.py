"""The matrix of versions, by one command: `nox -f .ci/noxfile.py`. The page it writes is docs/reference/versions.md.

A cell is one set of versions with the tests that are run on it (cells.py). Cells with the same Python and torch share
an environment, in which the other packages are exchanged, because torch is most of an environment's size and time.

    pip install nox                                                    anywhere: cells have their own environments
    nox -f .ci/noxfile.py                                              every cell, then the page
    nox -f .ci/noxfile.py -s "cells(py3.11-torch2.13.0)"                the cells of one environment
    nox -f .ci/noxfile.py -s cells -- --only "onnxruntime 1.32.0"       the cells whose names hold these words
    nox -f .ci/noxfile.py -s cells -- --remove                          each environment is removed after its cells
    nox -f .ci/noxfile.py -s cells --install-only                       the environments alone
    nox -f .ci/noxfile.py -s report                                     the page, from the records there are
    nox -f .ci/noxfile.py -s fresh                                      the newest releases, without constraints
    nox -f .ci/noxfile.py -s typing                                     a user's file, by mypy and pyright
    nox -f .ci/noxfile.py -s sbom                                       sbom.json, a bill of materials in CycloneDX

`--envdir FOLDER` (absolute) keeps the environments elsewhere. Interpreters are those on the PATH; where one is missing,
the page says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox imports a noxfile without its folder
from cells import CELLS, ROOT, Cell

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "venv"
nox.options.envdir = str(ROOT / ".nox")
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.sessions = ["cells", "report"]

ENVIRONMENTS = dict.fromkeys((cell.python, cell.torch) for cell in CELLS)


@nox.session
@nox.parametrize("python,torch", list(ENVIRONMENTS), ids=[f"py{python}-torch{torch}" for python, torch in ENVIRONMENTS])
def cells(session: nox.Session, torch: str) -> None:
    """Run the cells of one Python and one torch; options after --: --only WORDS, --remove, --workers N."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--workers", default="2")
    options = parser.parse_args(session.posargs)
    session.chdir(ROOT)
    for cell in CELLS:
        if (cell.python, cell.torch) == (session.python, torch) and options.only in cell.name:
            session.log(f"cell: {cell.name}")
            install(session, cell)
            session.run("python", ".ci/run_cell.py", cell.name, "--workers", options.workers)
    if options.remove:
        shutil.rmtree(session.virtualenv.location)


def install(session: nox.Session, cell: Cell) -> None:
    """Bring the session's environment to the versions of a cell."""
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text("\n".join(cell.pins()))
    # Both distributions own the folder onnxruntime: one has to be gone before the other comes.
    other = "onnxruntime" if cell.extra == "training" else "onnxruntime-training"
    session.run_install("python", "-m", "pip", "uninstall", "--yes", "--quiet", other, silent=True)
    session.install("-c", str(constraints), f"torch=={cell.torch}", "setuptools>=77")
    session.install("-c", str(constraints), "--no-build-isolation", "-e", f".[{cell.extra},dev]")


@nox.session(python="3.11", reuse_venv=False)
def fresh(session: nox.Session) -> None:
    """Test the newest releases that pip installs; options after --: --against FILE, --sample, --workers N."""
    session.chdir(ROOT)
    session.install(".[cpu]")
    session.install(".[cpu,dev]")
    session.run("python", "-P", "-m", "ort_dynamo", "demo")
    session.run("python", ".ci/try_fresh.py", *session.posargs)


@nox.session
def typing(session: nox.Session) -> None:
    """Check the types that a user sees: a program that uses every public name, against the installed wheel.

    Last, pyright says how many symbols of all modules have a known type, the private ones included.
    """
    session.install("-c", str(ROOT / "constraints.txt"), f"{ROOT}[cpu]", "mypy", "pyright[nodejs]")
    outside = Path(session.create_tmp())  # where the sources are not found
    shutil.copy(ROOT / "tests" / "typing" / "user_program.py", outside)
    (outside / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    session.chdir(outside)
    session.run("mypy", "--strict", "user_program.py")
    session.run("pyright", "user_program.py")
    # pyright ends with 1 if types are missing. It knows none of torch.SymInt's.
    session.run("pyright", "--verifytypes", "ort_dynamo", "--ignoreexternal", success_codes=[0, 1])


@nox.session
def sbom(session: nox.Session) -> None:
    """Write sbom.json; options after --: --extra NAME, --constraints FILE, or --python INTERPRETER as it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--extra", default="cpu")
    parser.add_argument("--constraints", default="constraints.txt")
    parser.add_argument("--python", help="the interpreter of an environment that exists")
    options = parser.parse_args(session.posargs)
    session.chdir(ROOT)
    session.install("cyclonedx-bom>=7")
    described = options.python
    if described is None:  # an environment without the tools that describe it
        folder = Path(session.create_tmp(), "described")
        session.run("python", "-m", "venv", "--clear", str(folder))
        described = str(folder / "bin" / "python")
        install = [described, "-m", "pip", "install", "--quiet", "-c", options.constraints, f".[{options.extra}]"]
        session.run(*install, external=True)
    about = ["--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible"]
    session.run("cyclonedx-py", "environment", *about, "--output-file", "sbom.json", described)


@nox.session(python=False)
def report(session: nox.Session) -> None:
    """Write docs/reference/versions.md from the records of docs/reference/versions.jsonl."""
    session.run("python3", str(ROOT / ".ci" / "versions_page.py"), external=True)
