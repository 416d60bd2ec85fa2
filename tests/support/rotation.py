# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Says which changed files make the long proofs of a file of tests of the core due.

A file of tests belongs to the package or command that it mirrors. When these proofs run is decided
in support/due.py; what belongs to a vertical is in support/verticals.py.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

# Files that the rest of their package does not need.
APART = ("jaxmoe/run/serving.py",)

# What tests cover beside the package that their path names.
COVERS = {
    "faults": ("jaxmoe/checkpoint", "jaxmoe/resilience", "jaxmoe/run", "jaxmoe/training"),
    "jaxmoe/run": APART,
    "experiments/convert": ("experiments/checkpoint",),
    "experiments/gates": ("experiments/studies",),
    "experiments/precision": ("experiments/studies",),
    "experiments/routers": ("experiments/studies",),
    "experiments/transfer": ("experiments/studies",),
}


def package_of(path: str) -> str:
    """Return the package of a source or test file: its first two folders, or its command."""
    mirrored = pathlib.PurePosixPath(path.removeprefix("tests/"))
    if mirrored.parts[0] == "experiments" and len(mirrored.parts) > 1:
        name = mirrored.parts[1].removesuffix(".py").removeprefix("test_")
        return f"experiments/{name}"
    for package in APART:
        if mirrored.is_relative_to(package):
            return package
    return "/".join(mirrored.parent.parts[:2])


def package_changes(path: str, changes: Iterable[str]) -> bool:
    """Return whether sources of the package of a file of tests are among changed files."""
    package = package_of(path)
    return any(_is_of(package, package_of(change)) for change in _sources(changes))


def sockets_of(path: str, changes: Iterable[str]) -> bool:
    """Return whether sources that tests cover beside their package are among changed files."""
    package = package_of(path)
    covered = {one for name, names in COVERS.items() if _is_of(package, name) for one in names}
    return any(package_of(change) in covered for change in _sources(changes))


def _sources(changes: Iterable[str]) -> list[str]:
    return [change for change in changes if change.endswith(".py") and change[:6] != "tests/"]


def _is_of(package: str, name: str) -> bool:
    """Return whether tests are of a package or command: `serve` has test_serve_*.py too."""
    return package == name or package.startswith(f"{name}_")
