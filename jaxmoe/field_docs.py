# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the texts below the fields of config classes, for `help()`, `--help` and the pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import TypeVar

Config = TypeVar("Config", bound=type)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the text below each field of a config class, its bases included, as one line.

    Args:
        cls: Dataclass whose source is available; fields without a text are left out.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, after in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(field.target, ast.Name):
                    found[field.target.id] = " ".join(str(after.value.value).split())
    return found


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
