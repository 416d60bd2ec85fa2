# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the texts below the fields of config classes, for `help()`, `--help` and the pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from typing import TypeVar

Config = TypeVar("Config", bound=type)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the text below each field of a config class, its bases included, as one line.

    Args:
        cls: Dataclass whose source is available; fields without a text are left out.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = _classes(base.__module__).get(base.__qualname__, [])
        for field, after in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(field.target, ast.Name):
                    docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module by qualified name; none without a source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    bodies: dict[str, list[ast.stmt]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                bodies[prefix + node.name] = node.body
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                visit(node.body, f"{prefix}{node.name}.<locals>.")

    visit(tree.body, "")
    return bodies


def with_field_docs(cls: Config) -> Config:
    """Add the fields of a dataclass to its docstring, for `help()`: a class decorator.

    The source is read when the docstring is.
    """
    cls.__doc__ = _LazyDoc(cls.__doc__ or "")  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    if dataclasses.is_dataclass(field.default):
        return f" = {type(field.default).__name__}()"
    return f" = {field.default!r}"


class _LazyDoc:
    """A docstring that lists the fields of its class."""

    def __init__(self, text: str):
        self.text = text

    def __get__(self, instance: object, owner: type) -> str:
        docs = field_docs(owner)
        lines = [inspect.cleandoc(self.text), "", "Fields:"]
        for field in dataclasses.fields(owner):
            lines.append(f"    {field.name}: {field.type}{_default(field)}")
            lines += textwrap.wrap(
                docs.get(field.name, ""), 92, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
        return "\n".join(lines)
