# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks docstrings, comments and pages against the word list of the design (section 6)."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PACKAGES, ROOT, at, check, modules, tree

BANNED = re.compile(
    r"\b(nobody|somebody|whoever|it is said|in earnest|the books of|the house)\b", re.IGNORECASE
)

# `To add a router: jaxmoe/routing/routers/..., tests/...`: each path named in such a text exists.
ADDING = re.compile(r"To add\b.*?(?=\n\s*\n|\Z)", re.DOTALL)
FILE = re.compile(r"(?<![\w./])(?:[\w.-]+/)+[\w.-]*\w(?:\.(?:py|md|txt|json))?/?")


def pages() -> list[pathlib.Path]:
    """Every page that is rendered for users."""
    found = [*ROOT.glob("*.md"), *ROOT.glob(".docs/*.md"), *ROOT.glob(".docs/concepts/*.md")]
    return found + [page for package in PACKAGES for page in (ROOT / package).rglob("*.md")]


def docstrings(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Every string that stands alone as a statement: docstrings, and the texts below fields."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value


def comments(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Every comment of a file."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_no_docstring_begins_with_of():
    check(
        at(path, line, f"begins with Of: {text.split(chr(10))[0]}")
        for path in modules(*PACKAGES, "tests")
        for line, text in docstrings(path)
        if text.strip().startswith("Of ")
    )


@pytest.mark.parametrize("kind", ["docstrings", "comments"])
def test_no_banned_word(kind):
    read = {"docstrings": docstrings, "comments": comments}[kind]
    check(
        at(path, line, f"says {found[0]!r}")
        for path in modules(*PACKAGES, "tests")
        for line, text in read(path)
        if (found := BANNED.search(text))
    )


def test_no_banned_word_in_a_page():
    check(
        at(page, number, f"says {found[0]!r}")
        for page in pages()
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if (found := BANNED.search(line))
    )


def _exists(name: str, beside: pathlib.Path) -> bool:
    roots = (ROOT, beside.parent, *beside.parents)
    return any((root / name).exists() for root in roots if ROOT in (root, *root.parents))


def test_texts_on_how_to_add_name_paths_that_exist():
    def texts() -> Iterator[tuple[pathlib.Path, int, str]]:
        for path in modules(*PACKAGES):
            yield from ((path, line, text) for line, text in docstrings(path))
        for page in pages():
            yield page, 1, page.read_text(encoding="utf-8")

    def failures():
        seen = 0
        for path, line, text in texts():
            for adding in ADDING.findall(text):
                for name in FILE.findall(adding):
                    seen += 1
                    if not _exists(name, path):
                        yield at(path, line, f"names {name}, which does not exist")
        assert seen > 10, "no text on how to add was found"

    check(failures())


def test_readmes_stand_in_every_package():
    def packages() -> Iterator[pathlib.Path]:
        for package in PACKAGES:
            yield ROOT / package
        yield from sorted(path.parent for path in (ROOT / "jaxmoe").glob("*/__init__.py"))

    check(
        at(package, 0, "has no README.md")
        for package in packages()
        if not (package / "README.md").exists()
    )


def test_the_readme_is_short():
    size = len((ROOT / "README.md").read_bytes())
    assert size <= 9_000, f"README.md has {size} bytes, at most 9000"
