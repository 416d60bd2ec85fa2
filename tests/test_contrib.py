# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of jaxmoe/contrib on syntax trees: who imports it, what it imports, its size."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PACKAGES, ROOT, check
from tests.test_architecture import ORDER

LINES = 200
CONTRIB = "jaxmoe.contrib"


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """The line, the full name and the local name of each import of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", alias.asname or alias.name


def union_members(tree: ast.Module) -> set[str]:
    """The names in unions `A | B` that a file assigns at its top."""
    return {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
        for name in ast.walk(node.value)
        if isinstance(name, ast.Name)
    }


def violations(root: pathlib.Path) -> Iterator[str]:
    """Lines `file:line: what` for each broken rule in the packages below a folder."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        own, text = path.relative_to(root), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        is_contrib = own.parts[:2] == ("jaxmoe", "contrib")
        if is_contrib and path.name != "__init__.py":
            if len(own.parts) != 4 or own.parts[2] not in ORDER:
                yield f"{own}:1: is not jaxmoe/contrib/<package of jaxmoe>/<name>.py"
            if (lines := len(text.splitlines())) > LINES:
                yield f"{own}:{lines}: {lines} lines, at most {LINES}"
        members = union_members(tree)
        for line, name, local in imported_names(tree):
            if f"{name}.".startswith(f"{CONTRIB}."):
                if is_contrib:
                    yield f"{own}:{line}: imports {name}: a file of contrib stands alone"
                elif own.parts[:2] != ("jaxmoe", name.split(".")[2]):
                    yield f"{own}:{line}: imports {name}, which belongs to another package"
                elif local not in members:
                    yield f"{own}:{line}: imports {name} and puts it into no union"


def test_contrib_stands_behind_its_unions():
    check(violations(ROOT))


UNION = "from jaxmoe.contrib.layers.fine import Fine\n\nMembers = int | Fine\n"
PLANTED = {
    "a user outside the union": (
        {"jaxmoe/layers/block.py": "from jaxmoe.contrib.layers.fine import Fine\n"},
        "jaxmoe/layers/block.py:1: imports jaxmoe.contrib.layers.fine.Fine and puts it into no",
    ),
    "a union of another package": (
        {"jaxmoe/models/union.py": UNION},
        "jaxmoe/models/union.py:1: imports jaxmoe.contrib.layers.fine.Fine, which belongs",
    ),
    "a command": (
        {"experiments/one.py": "import jaxmoe.contrib.layers.fine\n"},
        "experiments/one.py:1: imports jaxmoe.contrib.layers.fine, which belongs",
    ),
    "a neighbour": (
        {"jaxmoe/contrib/layers/other.py": "from jaxmoe.contrib.layers import fine\n"},
        "jaxmoe/contrib/layers/other.py:1: imports jaxmoe.contrib.layers.fine: a file of contrib",
    ),
    "a long file": (
        {"jaxmoe/contrib/layers/long.py": "x = 1\n" * (LINES + 1)},
        "jaxmoe/contrib/layers/long.py:201: 201 lines",
    ),
    "no package": (
        {"jaxmoe/contrib/nowhere/lost.py": "x = 1\n"},
        "jaxmoe/contrib/nowhere/lost.py:1: is not jaxmoe/contrib/<package of jaxmoe>",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name, tmp_path):
    files, wanted = PLANTED[name]
    fine = {"jaxmoe/contrib/layers/fine.py": "Fine = str\n", "jaxmoe/layers/members.py": UNION}
    for path, text in (fine | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    found = list(violations(tmp_path))
    assert len(found) == 1 and found[0].startswith(wanted), found
