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


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the full name of each import of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


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
        for line, name in imported_names(tree):
            if f"{name}.".startswith(f"{CONTRIB}."):
                if is_contrib:
                    yield f"{own}:{line}: imports {name}: a file of contrib stands alone"
                else:
                    yield f"{own}:{line}: imports {name}: ask jaxmoe.catalog for it by name"


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
    fine = {"jaxmoe/contrib/layers/fine.py": "Fine = str\n"}
    for path, text in (fine | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    found = list(violations(tmp_path))
    assert len(found) == 1 and found[0].startswith(wanted), found
