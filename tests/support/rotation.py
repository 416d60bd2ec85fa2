# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the long proofs that CI runs: of packages changed lately, and a third of the others.

    pytest --rotate -m slow        what is due at this commit
    pytest -m slow                 all of them

A file of tests belongs to the package that it mirrors; one that has changed itself is due, without
the others of its package. The third is chosen by the number of commits and a checksum of the path,
so that every file is due once in three commits.
"""

from __future__ import annotations

import pathlib
import subprocess
import zlib

RECENT_COMMITS = 10
PARTS = 3

# Folders of tests that mirror no package, and the packages whose changes they cover.
COVERS = {"faults": ("jaxmoe/checkpoint", "jaxmoe/resilience", "jaxmoe/run", "jaxmoe/training")}


def package_of(path: str) -> str:
    """Return the package of a source or test file: its first two folders."""
    parts = pathlib.PurePosixPath(path.removeprefix("tests/")).parent.parts
    return "/".join(parts[:2])


def is_due(path: str, changed: set[str], num_commits: int) -> bool:
    """Return whether the long proofs of a file run at this commit.

    Args:
        path: File of tests, relative to the root: `tests/jaxmoe/routing/test_gates.py`.
        changed: Packages and files of tests with recent changes.
        num_commits: Number of commits up to this one.
    """
    package = package_of(path)
    if changed & {path, package, *COVERS.get(package, ())}:
        return True
    return zlib.crc32(path.encode()) % PARTS == num_commits % PARTS


def _git(root: pathlib.Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout


def state_of(root: pathlib.Path) -> tuple[set[str], int]:
    """Return what the last RECENT_COMMITS commits changed, merges not counted, and the commit count.

    Of a source file it is the package, of a file of tests the file.

    Raises:
        subprocess.CalledProcessError: The root is not a git checkout.
    """
    count = int(_git(root, "rev-list", "--count", "HEAD"))
    log = ("log", f"-n{RECENT_COMMITS}", "--no-merges", "--format=", "--name-only")
    files = _git(root, *log).split()
    is_test = {file: file.startswith("tests/") for file in files if file.endswith(".py")}
    return {file if test else package_of(file) for file, test in is_test.items()}, count
