# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares what docstrings and pages name with the sources: arguments, files and dotted names."""

from __future__ import annotations

import ast
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator

import pytest

from pallas_kernels.public_names import SECOND_NAMES
from tests.support import source_tree
from tests.support.source_tree import PACKAGES, ROOT, at, check, modules, tree

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ARGS = re.compile(r"^( *)Args:\n((?:\1 +.*\n|\s*\n)+)", re.MULTILINE)
DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")
EXAMPLE = "jaxmoe/routing/routers/token_choice/prototype.py"
"""File that a page asks its reader to write."""
FILE = re.compile(rf"(?<![\w/.])((?:{'|'.join(PACKAGES)}|tests)(?:/\w+)+\.(?:pyi?|md))\b")


def documented(docstring: str) -> list[str]:
    """Return the names of the entries of the section `Args` of a docstring."""
    found = ARGS.search(docstring + "\n")
    if found is None:
        return []
    lines = found[2].splitlines()
    first = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    entry = re.compile(rf" {{{first}}}([\w*]+(?:, [\w*]+)*):(?: |$)")
    entries = (entry.match(line) for line in lines)
    return [name.strip("*") for found in entries if found for name in found[1].split(", ")]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of the parameters of a function."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {a.arg for a in (*every, arguments.vararg, arguments.kwarg) if a is not None}


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Return the classes of all packages by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for _, node in source_tree.nodes():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    return found


def lineage(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield a class and the classes of the packages that it extends."""
    yield node
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        for found in classes().get(name, []):
            if found is not node:
                yield from lineage(found)


def accepted(node: ast.ClassDef) -> set[str]:
    """Return the names that a class can be made with: fields, and parameters of `__init__`."""
    names: set[str] = set()
    for part in itertools.chain.from_iterable(one.body for one in lineage(node)):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
        if isinstance(part, FUNCTIONS) and part.name in ("__init__", "__new__"):
            names |= parameters(part)
    return names


def required(node: ast.AST) -> set[str]:
    """Return the parameters that a section `Args` must have: of a class, those of `__init__`."""
    inits = [part for part in getattr(node, "body", ()) if getattr(part, "name", "") == "__init__"]
    function = inits[0] if isinstance(node, ast.ClassDef) and inits else node
    return parameters(function) - {"self", "cls"} if isinstance(function, FUNCTIONS) else set()


def faults_of_arguments(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of arguments documented that do not exist, and of those left out."""
    for node in ast.walk(module):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        names = documented(ast.get_docstring(node) or "")
        if not names:
            continue
        known = accepted(node) if isinstance(node, ast.ClassDef) else parameters(node)
        yield from ((node.lineno, f"{node.name}: {name}") for name in names if name not in known)
        missing = sorted(required(node) - {*names})
        yield from ((node.lineno, f"{node.name}: without {name}") for name in missing)


def test_documented_arguments_are_those_that_there_are():
    files = modules(*PACKAGES)
    check(at(path, *fault) for path in files for fault in faults_of_arguments(tree(path)))


SOURCE = '''
class One:
    """One.

    Args:
        width: Width.
        {attribute}: Height.
    """

    width: int

    def __init__(self, height{more}):
        """Make it."""


class Two(One):
    """Two.

    Args:
        width: Width, of the base class.
    """


def make(width, *sizes, **options):
    """Make it.

    Args:
        width: Width, in a text of two lines that names
            {argument}: not an entry.
        *sizes: Sizes.
        **{argument}: Options.

    Returns:
        value: Another section.
    """
'''


@pytest.mark.parametrize(
    ("attribute", "argument", "more", "faults"),
    [
        ("height", "options", "", []),
        ("depth", "options", "", ["One: depth", "One: without height"]),
        ("height", "given", "", ["make: given", "make: without options"]),
        ("height", "options", ", base=None", ["One: without base"]),
    ],
)
def test_wrong_arguments_are_found(attribute, argument, more, faults, monkeypatch):
    module = ast.parse(SOURCE.format(attribute=attribute, argument=argument, more=more))
    found = {node.name: [node] for node in module.body if isinstance(node, ast.ClassDef)}
    monkeypatch.setattr("tests.test_docstrings.classes", lambda: found)
    assert [name for _, name in faults_of_arguments(module)] == faults


def texts() -> Iterator[tuple[pathlib.Path, int, str]]:
    """Yield file, first line and text of every docstring, text of a field, and page."""
    for path, node in source_tree.nodes():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield path, node.lineno, node.value.value
    pages = [ROOT / "README.md", *(ROOT / ".docs").rglob("*.md")]
    pages += [path for package in PACKAGES for path in (ROOT / package).rglob("README.md")]
    for page in pages:
        if "generated" not in page.parts and "_build" not in page.parts:
            yield page, 1, page.read_text(encoding="utf-8")


@functools.cache
def names_of(path: pathlib.Path) -> dict[str, ast.AST]:
    """Return what a module defines or imports at its top level, and what its stub promises."""
    found: dict[str, ast.AST] = {}
    for file in (path, path.with_suffix(".pyi")):
        if not file.exists():
            continue
        for node in source_tree.outside_functions(tree(file)):
            found |= dict.fromkeys(source_tree.bound_names(node), node)
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name): node for alias in node.names}
        for node in tree(file).body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                found[node.name] = node
    return found


def members(node: ast.ClassDef) -> set[str]:
    """Return the names in the body of a class and of those that it extends."""
    names: set[str] = set()
    for part in ast.walk(ast.Module([*lineage(node)], [])):
        names |= {part.name} if isinstance(part, FUNCTIONS) else {*source_tree.bound_names(part)}
    return names


def exists(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a name of one, or a member of such a class.

    A package of the checkout has its name in the wheel, too.
    """
    for package, second in SECOND_NAMES.items():
        if f"{dotted}.".startswith(f"{second}."):
            dotted = package + dotted[len(second) :]
    *parts, last = dotted.split(".")
    if not parts:
        return (ROOT / last).is_dir()
    if (ROOT.joinpath(*parts, last)).is_dir() or ROOT.joinpath(*parts, f"{last}.py").exists():
        return True
    for number in range(len(parts), 0, -1):
        folder, rest = ROOT.joinpath(*parts[:number]), [*parts[number:], last]
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not module.exists():
            continue
        defined = names_of(module).get(rest[0])
        if defined is None or len(rest) == 1:
            return defined is not None
        named = [defined] if isinstance(defined, ast.ClassDef) else classes().get(rest[0], [])
        return not named or any(rest[1] in members(node) for node in named)
    return False


def mentions(pattern):
    """Return path, line and name of what a pattern finds in docstrings and pages."""
    found = [
        (path, line + text.count("\n", 0, name.start()), name[1])
        for path, line, text in texts()
        for name in pattern.finditer(text)
    ]
    assert len(found) > 100
    return found


def test_dotted_names_of_docstrings_and_pages_exist():
    found = mentions(DOTTED)
    check(at(path, line, name) for path, line, name in found if not exists(name))


def test_files_of_docstrings_and_pages_exist():
    found = mentions(FILE)
    check(
        at(path, line, name)
        for path, line, name in found
        if not (ROOT / name).exists() and name != EXAMPLE
    )


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("jaxmoe.run.plan", True),
        ("jaxmoe.run.plan.RunPlan", True),
        ("jaxmoe.run.plan.Plan", False),
        ("jaxmoe.generate", True),
        ("jaxmoe.training.step.Step.jit_step", True),
        ("jaxmoe.training.step.Step.jitted", False),
        ("jaxmoe.nothing.Name", False),
        ("jaxmoe.sharding", True),
        ("jaxmoe.sharding.mesh.make_mesh", True),
        ("jaxmoe.kernels.nothing", False),
    ],
)
def test_dotted_names_of_nothing_are_found(name, is_there):
    assert exists(name) is is_there
