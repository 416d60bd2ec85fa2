# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the syntax trees of the four packages for the tests of architecture and prose."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Imports flow from right to left only.
PACKAGES = ("pallas_kernels", "sharding", "jaxmoe", "experiments")


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def modules(*roots: str) -> list[pathlib.Path]:
    return [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]


def nodes() -> Iterator[tuple[pathlib.Path, ast.AST]]:
    for path in modules(*PACKAGES):
        for node in ast.walk(tree(path)):
            yield path, node


def at(path: pathlib.Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def package(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0]


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def check(failures: Iterable[str]) -> None:
    __tracebackhide__ = True
    failures = list(failures)
    assert not failures, "\n" + "\n".join(failures)


def imported(node: ast.AST) -> list[str]:
    """The top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [(node.module or "").partition(".")[0]]
    return []


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the full name of each import of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from outside_functions(child)


def bound_names(node: ast.AST) -> list[str]:
    """The variables, arguments and fields that a node introduces."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    return []


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions directly inside a node, not inside one another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from functions(child)


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    nested = sum(inner.end_lineno - inner.lineno + 1 for inner in functions(function))
    return function.end_lineno - function.lineno + 1 - nested
