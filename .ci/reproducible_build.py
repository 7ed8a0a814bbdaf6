"""The build backend of pyproject.toml: setuptools, with archives whose bytes depend on their contents alone.

setuptools writes the time, mode and owner of each file into its archives, so that two builds of the same sources
differ. Here a mode says only whether a file may be executed, owners are root, and with SOURCE_DATE_EPOCH all times are
that one:

    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) python -m build
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # the hooks of PEP 517 and 660 that need no change
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the source distribution."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    _rewrite_tar(Path(sdist_directory, name), _epoch())
    return name


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel, whose times setuptools itself takes from SOURCE_DATE_EPOCH."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    _rewrite_zip(Path(wheel_directory, name))
    return name


def _epoch() -> int | None:
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return None if given is None else int(given)


def _mode(before: int) -> int:
    return 0o755 if before & 0o100 else 0o644


def _rewrite_tar(path: Path, epoch: int | None) -> None:
    content = BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old, key=lambda one: one.name):
            member.mode = _mode(member.mode)
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mtime = int(member.mtime) if epoch is None else epoch
            member.pax_headers = {}  # setuptools' fractions of seconds
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(content.getvalue(), mtime=epoch or 0))


def _rewrite_zip(path: Path) -> None:
    content = BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            member.external_attr = (0o100000 | _mode(member.external_attr >> 16)) << 16
            new.writestr(member, data)
    path.write_bytes(content.getvalue())
