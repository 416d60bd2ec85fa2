# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of jaxmoe/contrib on syntax trees: where a file is, who imports it, and whom.

A folder with a README.md is a vertical, and all files of contrib are in one.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PACKAGES, ROOT, check, imported_names

CONTRIB = "jaxmoe.contrib"


def _may_import(root: pathlib.Path, path: pathlib.Path, name: str) -> bool:
    """Whether a file of contrib imports a name of its own vertical, or as its README says."""
    target = name.split(".")[2]
    folder = root / pathlib.Path(*path.relative_to(root).parts[:3])
    readme = folder / "README.md"
    return folder.name == target or (
        readme.exists() and f"`jaxmoe.contrib.{target}`" in readme.read_text("utf-8")
    )


def violations(root: pathlib.Path) -> Iterator[str]:
    """Lines `file:line: what` for each broken rule in the packages below a folder."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        file = path.relative_to(root)
        is_contrib = file.parts[:2] == ("jaxmoe", "contrib")
        if is_contrib and len(file.parts) > 3:
            if not (root / pathlib.Path(*file.parts[:3]) / "README.md").exists():
                yield f"{file}:1: is in no vertical: a folder of jaxmoe/contrib with a README.md"
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            if not f"{name}.".startswith(f"{CONTRIB}."):
                continue
            if is_contrib and not _may_import(root, path, name):
                yield f"{file}:{line}: imports {name}: its README names no such vertical"
            elif not is_contrib and file.parts[0] != "experiments":
                yield f"{file}:{line}: imports {name}: ask jaxmoe.catalog for it by name"


def test_contrib_is_reached_by_the_catalogue_alone():
    check(violations(ROOT))


NEAR = {
    "jaxmoe/contrib/near/README.md": "Imports no other vertical.",
    "jaxmoe/contrib/near/two.py": "import jaxmoe.contrib.near\n",
    "experiments/command.py": "from jaxmoe.contrib.near import two\n",
}
"""What is allowed: a vertical and its command."""
PLANTED = {
    "a file of the core": (
        {"jaxmoe/layers/block.py": "from jaxmoe.contrib.near.two import Fine\n"},
        "jaxmoe/layers/block.py:1: imports jaxmoe.contrib.near.two.Fine: ask jaxmoe.catalog",
    ),
    "a function of the core": (
        {"jaxmoe/models/late.py": "def f():\n    from jaxmoe.contrib.near import two\n"},
        "jaxmoe/models/late.py:2: imports jaxmoe.contrib.near.two: ask jaxmoe.catalog",
    ),
    "a kernel": (
        {"pallas_kernels/fast.py": "import jaxmoe.contrib.near.two\n"},
        "pallas_kernels/fast.py:1: imports jaxmoe.contrib.near.two: ask jaxmoe.catalog",
    ),
    "no vertical": (
        {"jaxmoe/contrib/nowhere/lost.py": "x = 1\n"},
        "jaxmoe/contrib/nowhere/lost.py:1: is in no vertical",
    ),
    "a file beside the verticals": (
        {"jaxmoe/contrib/lost/below/deep.py": "x = 1\n"},
        "jaxmoe/contrib/lost/below/deep.py:1: is in no vertical",
    ),
    "another vertical": (
        {
            "jaxmoe/contrib/far/README.md": "Imports `jaxmoe.contrib.near`.",
            "jaxmoe/contrib/far/one.py": "from jaxmoe.contrib.near import two\n",
            "jaxmoe/contrib/near/sub/three.py": "from jaxmoe.contrib.far import one\n",
        },
        "jaxmoe/contrib/near/sub/three.py:1: imports jaxmoe.contrib.far.one: its README names no",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name, tmp_path):
    files, wanted = PLANTED[name]
    for path, text in (NEAR | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    found = list(violations(tmp_path))
    assert len(found) == 1 and found[0].startswith(wanted), found
