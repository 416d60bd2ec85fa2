# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the long proofs that CI runs: of packages changed lately, and a third of the others.

    pytest --rotate -m slow        what is due at this commit
    pytest -m slow                 all of them

A file of tests belongs to the package or command that it mirrors; one that has changed itself is
due, without the others of its package. The third is chosen by the number of commits and a checksum
of the path, so that every file is due once in three commits.
"""

from __future__ import annotations

import pathlib
import subprocess
import zlib

RECENT_COMMITS = 10
PARTS = 3

# Sub-packages that the rest of theirs does not need.
APART = ("jaxmoe/run/serving",)

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
    given = pathlib.PurePosixPath(path.removeprefix("tests/"))
    if given.parts[0] == "experiments":
        name = given.parts[1].removesuffix(".py").removeprefix("test_")
        return f"experiments/{name}"
    for package in APART:
        if given.is_relative_to(package):
            return package
    return "/".join(given.parent.parts[:2])


def is_due(path: str, changed: set[str], num_commits: int) -> bool:
    """Return whether the long proofs of a file run at this commit.

    Args:
        path: File of tests, relative to the root: `tests/jaxmoe/routing/test_gates.py`.
        changed: Packages and files of tests with recent changes.
        num_commits: Number of commits up to this one.
    """
    package = package_of(path)
    covered = [one for name, names in COVERS.items() if _is_of(package, name) for one in names]
    if path in changed or changed & {*covered} or any(_is_of(package, one) for one in changed):
        return True
    return zlib.crc32(path.encode()) % PARTS == num_commits % PARTS


def _is_of(package: str, name: str) -> bool:
    """Return whether tests are of a package or command: `serve` has test_serve_*.py too."""
    return package == name or package.startswith(f"{name}_")


def _git(root: pathlib.Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout


def state_of(root: pathlib.Path) -> tuple[set[str], int]:
    """Return what the last RECENT_COMMITS commits changed, and the commit count.

    Merges are not counted. Of a source file it is the package, of a file of tests the file.

    Raises:
        subprocess.CalledProcessError: The root is not a git checkout.
    """
    count = int(_git(root, "rev-list", "--count", "HEAD"))
    log = ("log", f"-n{RECENT_COMMITS}", "--no-merges", "--format=", "--name-only")
    files = _git(root, *log).split()
    is_test = {file: file.startswith("tests/") for file in files if file.endswith(".py")}
    return {file if test else package_of(file) for file, test in is_test.items()}, count
