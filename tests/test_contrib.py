# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of jaxmoe/contrib on syntax trees: who imports it, what it imports, its size.

A folder with a README.md is a vertical; a folder named as a package of jaxmoe holds methods, each
of which is one file.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PACKAGES, ROOT, check
from tests.test_architecture import ORDER

LINES = 200
CONTRIB = "jaxmoe.contrib"


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the full name of each import of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _is_vertical(folder: pathlib.Path) -> bool:
    """Whether a folder of contrib is a vertical, which a README says; else it holds methods."""
    return (folder / "README.md").exists()


def _layout(root: pathlib.Path, path: pathlib.Path) -> Iterator[str]:
    """Lines for a file of contrib that stands at the wrong place, or a method that is too long."""
    file = path.relative_to(root)
    parts = file.parts
    if _is_vertical(root / pathlib.Path(*parts[:3])):
        return
    if len(parts) != 4 or parts[2] not in ORDER:
        yield (
            f"{file}:1: is neither jaxmoe/contrib/<package of jaxmoe>/<name>.py nor in a vertical:"
            " a folder jaxmoe/contrib/<vertical> with a README.md"
        )
    elif (lines := len(path.read_text("utf-8").splitlines())) > LINES:
        yield f"{file}:{lines}: {lines} lines, at most {LINES}"


def _may_import(root: pathlib.Path, path: pathlib.Path, name: str) -> bool:
    """Whether a file of contrib imports a name of its own vertical, or as its README says."""
    target = name.split(".")[2]
    folder = root / pathlib.Path(*path.relative_to(root).parts[:3])
    if not _is_vertical(folder):
        return False
    return folder.name == target or f"`jaxmoe.contrib.{target}`" in (
        folder / "README.md"
    ).read_text("utf-8")


def violations(root: pathlib.Path) -> Iterator[str]:
    """Lines `file:line: what` for each broken rule in the packages below a folder."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        file = path.relative_to(root)
        is_contrib = file.parts[:2] == ("jaxmoe", "contrib")
        if is_contrib and path.name != "__init__.py":
            yield from _layout(root, path)
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            if not f"{name}.".startswith(f"{CONTRIB}."):
                continue
            if is_contrib and not _may_import(root, path, name):
                yield f"{file}:{line}: imports {name}: a method, or a vertical, stands alone"
            elif file.parts[0] == "experiments" and not _is_vertical(
                root / "jaxmoe" / "contrib" / name.split(".")[2]
            ):
                yield f"{file}:{line}: imports {name}: ask jaxmoe.catalog for it by name"
            elif not is_contrib and file.parts[0] != "experiments":
                yield f"{file}:{line}: imports {name}: ask jaxmoe.catalog for it by name"


def test_contrib_is_reached_by_the_catalogue_alone():
    check(violations(ROOT))


PLANTED = {
    "a file of the core": (
        {"jaxmoe/layers/block.py": "from jaxmoe.contrib.layers.fine import Fine\n"},
        "jaxmoe/layers/block.py:1: imports jaxmoe.contrib.layers.fine.Fine: ask jaxmoe.catalog",
    ),
    "a function of the core": (
        {"jaxmoe/models/late.py": "def f():\n    from jaxmoe.contrib.layers import fine\n"},
        "jaxmoe/models/late.py:2: imports jaxmoe.contrib.layers.fine: ask jaxmoe.catalog",
    ),
    "a command": (
        {"experiments/one.py": "import jaxmoe.contrib.layers.fine\n"},
        "experiments/one.py:1: imports jaxmoe.contrib.layers.fine: ask jaxmoe.catalog",
    ),
    "a neighbour": (
        {"jaxmoe/contrib/layers/other.py": "from jaxmoe.contrib.layers import fine\n"},
        "jaxmoe/contrib/layers/other.py:1: imports jaxmoe.contrib.layers.fine: a method",
    ),
    "a long file": (
        {"jaxmoe/contrib/layers/long.py": "x = 1\n" * (LINES + 1)},
        "jaxmoe/contrib/layers/long.py:201: 201 lines",
    ),
    "no package": (
        {"jaxmoe/contrib/nowhere/lost.py": "x = 1\n"},
        "jaxmoe/contrib/nowhere/lost.py:1: is neither jaxmoe/contrib/<package of jaxmoe>",
    ),
    "another vertical": (
        {
            "jaxmoe/contrib/far/README.md": "Imports `jaxmoe.contrib.near`.",
            "jaxmoe/contrib/far/one.py": "from jaxmoe.contrib.near import two\n",
            "jaxmoe/contrib/near/README.md": "Imports nothing.",
            "jaxmoe/contrib/near/two.py": "from jaxmoe.contrib.far import one\n",
        },
        "jaxmoe/contrib/near/two.py:1: imports jaxmoe.contrib.far.one: a method, or a vertical",
    ),
    "a vertical in the core": (
        {
            "jaxmoe/contrib/near/README.md": "Imports nothing.",
            "jaxmoe/contrib/near/two.py": "import jaxmoe.contrib.near\n",
            "experiments/command.py": "from jaxmoe.contrib.near import two\n",
            "jaxmoe/run/late.py": "from jaxmoe.contrib.near import two\n",
        },
        "jaxmoe/run/late.py:1: imports jaxmoe.contrib.near.two: ask jaxmoe.catalog",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name, tmp_path):
    files, wanted = PLANTED[name]
    fine = {"jaxmoe/contrib/layers/fine.py": "Fine = str\n"}
    for path, text in (fine | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    found = list(violations(tmp_path))
    assert len(found) == 1 and found[0].startswith(wanted), found
