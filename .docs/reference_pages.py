# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the API reference from the syntax trees: one page per package, no module is imported."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

from indexes import first_line, index_page

PACKAGES = ("jaxmoe", "sharding", "pallas_kernels", "experiments")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):\s*$")
_ITEM = re.compile(r"^(\**[\w.\[\], ]+):\s+(.*)$")


def write(root: pathlib.Path, target: pathlib.Path) -> None:
    """Write one page for each folder with modules, and an index of them.

    Args:
        root: Root of the repository.
        target: Folder of the generated pages; created when it does not exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    entries = {}
    for package in PACKAGES:
        folders = {path.parent for path in (root / package).rglob("*.py")}
        for folder in sorted(folders):
            name = ".".join(folder.relative_to(root).parts)
            entries[name] = first_line(folder / "__init__.py")
            text = "\n".join(_package(folder, root))
            (target / f"{name}.md").write_text(text, encoding="utf-8")
    (target / "index.md").write_text(index_page("API reference", entries), encoding="utf-8")


def _package(folder: pathlib.Path, root: pathlib.Path) -> Iterator[str]:
    """Yield the lines of the page of one folder."""
    yield f"# {'.'.join(folder.relative_to(root).parts)}"
    yield ""
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name == "__init__.py":
            yield from _prose(ast.get_docstring(tree))
            continue
        yield f"## {path.stem if path.stem != '__main__' else 'command'}"
        yield ""
        yield f"`{path.relative_to(root)}`"
        yield ""
        yield from _prose(ast.get_docstring(tree))
        yield from _members(tree, ".".join(path.relative_to(root).with_suffix("").parts))


def _members(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield the public functions and classes of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from _function(node, f"{module}.{node.name}")
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _class(node, f"{module}.{node.name}")


def _function(node: ast.FunctionDef, name: str, directive: str = "py:function") -> Iterator[str]:
    """Yield one function with its signature."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = re.sub(r"\s+", " ", ast.unparse(node.args))
    yield from _object(directive, f"{name}({arguments}){returns}", ast.get_docstring(node))


def _class(node: ast.ClassDef, name: str) -> Iterator[str]:
    """Yield one class, its fields with their texts, and its public methods."""
    yield from _object("py:class", name, ast.get_docstring(node))
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = None
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            default = f" = {ast.unparse(field.value)}" if field.value else ""
            annotation = f"{field.target.id}: {ast.unparse(field.annotation)}{default}"
            if not field.target.id.startswith("_"):
                words = f": {_one_line(_safe(text))}" if text else ""
                yield f"- `{_one_line(annotation)}`{words}"
    yield ""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            is_property = any(getattr(d, "id", "") == "property" for d in child.decorator_list)
            if is_property:
                yield from _object("py:property", f"{name}.{child.name}", ast.get_docstring(child))
            else:
                yield from _function(child, f"{name}.{child.name}", "py:method")


def _object(directive: str, signature: str, docstring: str | None) -> Iterator[str]:
    """Yield a directive of the Python domain around a docstring."""
    yield f"::::{{{directive}}} {_one_line(signature)}"
    yield from _prose(docstring)
    yield "::::"
    yield ""


def _prose(docstring: str | None) -> Iterator[str]:
    """Yield a docstring as Markdown: sections as lists, indented blocks as code."""
    lines = (docstring or "").splitlines()
    in_section = in_code = False
    for line in lines:
        if in_code and line.strip() and not line.startswith("    "):
            yield "```"
            in_code = False
        if in_code:
            yield line[4:]
            continue
        if match := _SECTION.match(line):
            yield ""
            yield f"**{match[1]}**"
            yield ""
            in_section = True
        elif in_section and line.startswith("    "):
            item = _ITEM.match(line[4:])
            if item and not line.startswith("     "):
                yield f"- `{item[1]}`: {_safe(item[2])}"
            else:
                indent = "  " if line.startswith("     ") else ""
                yield f"{indent}{_safe(line.strip())}"
        elif line.startswith("    "):
            yield "```text"
            yield line[4:]
            in_code = True
        else:
            in_section = in_section and not line.strip()
            yield _safe(line)
    if in_code:
        yield "```"
    yield ""


def _safe(text: str) -> str:
    """Escape what Markdown would read as markup, outside of code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\<>*_\[\]{}#|~])", r"\\\1", part)
        for part in parts
    )


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
