# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the shape of the code on syntax trees: closures of imports, arrows, organs, names."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
import re
from collections.abc import Iterator

from pallas_kernels.public_names import stub_names
from tests.support.source_tree import PACKAGES, ROOT, module_name, modules, tree
from tests.support.verticals import VERTICALS, matches


@functools.cache
def files() -> dict[str, pathlib.Path]:
    """Return the file of each module of the four packages."""
    return {module_name(path): path for path in modules(*PACKAGES)}


@functools.cache
def _stub(package: str) -> dict[str, str]:
    """Return the addresses of the names that a package loads when they are used."""
    path = files()[package].with_suffix(".pyi")
    return stub_names(path.read_text(encoding="utf-8")) if path.exists() else {}


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file without those under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run_nodes(child)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return the modules that a file imports, at any depth of it.

    A name that its package loads when it is used counts as an import of the file of the name.
    """
    targets: set[str] = set()
    for node in _run_nodes(tree(files()[module])):
        if isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in files():
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                lazy = _stub(node.module).get(alias.name, "").partition(":")[0]
                targets.add(lazy or (full if full in files() else node.module))
    return frozenset(targets & set(files()))


def closure(module: str) -> set[str]:
    """Return the modules that importing a module reads, the packages above each included."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in files():
            seen.add(name)
            parts = name.split(".")
            waiting += [".".join(parts[:length]) for length in range(1, len(parts))]
            waiting += imports(name)
    return seen


@functools.cache
def vertical_of(module: str) -> str | None:
    """Return the vertical that a file belongs to, None for the core."""
    path = str(files()[module].relative_to(ROOT))
    if path.startswith("jaxmoe/contrib/"):
        return "contrib"
    if path.endswith("/__init__.py"):
        return None
    return next((name for name, row in VERTICALS.items() if matches(path, row.sources)), None)


def arrows() -> list[str]:
    """Return the imports from files of the core into verticals; commands may import any file."""
    return [
        f"{module} -> {vertical}: {target}"
        for module in files()
        if vertical_of(module) is None and not module.startswith("experiments")
        for target in sorted(imports(module))
        if (vertical := vertical_of(target)) is not None
    ]


def _members(node: ast.ClassDef) -> dict[str, bool]:
    """Return the members of a class, and whether each has a default."""
    members: dict[str, bool] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            members[item.name] = not any("abstract" in ast.unparse(d) for d in item.decorator_list)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            members[item.target.id] = item.value is not None
        elif isinstance(item, ast.Assign):
            members.update((t.id, True) for t in item.targets if isinstance(t, ast.Name))
    return members


def organs() -> list[str]:
    """Return the defaults of a class with several subclasses that exactly one of them replaces."""
    classes: dict[str, ast.ClassDef] = {}
    for path in modules(*PACKAGES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
    children = collections.defaultdict(set)
    for name, node in classes.items():
        for base in node.bases:
            children[ast.unparse(base).split("[")[0].split(".")[-1]].add(name)

    def below(name: str) -> set[str]:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            fresh = children[waiting.pop()] - found
            found |= fresh
            waiting += fresh
        return found

    return [
        f"{name}.{member} is for {owners[0]}"
        for name, node in sorted(classes.items())
        if len(subclasses := below(name)) > 1
        for member, has_default in _members(node).items()
        if has_default and not member.startswith("__")
        if len(owners := [s for s in subclasses if member in _members(classes[s])]) == 1
    ]


_CHOICE = re.compile(
    r"\b(execution|model|training|data|optimizer|replicas|checkpoint|engine|adapter|watch|rl"
    r"|precision|schedule|mesh|parameterization|evaluation|batching|scaling|dispatch|objective)"
    r"[.:]([a-z_]+(?:\.[a-z_]+)*)"
)
_BOUND = re.compile(r"divis|multiple of|must be at least|at most")


def refusals() -> list[str]:
    """Return messages outside the table that name two choices, and neither divisor nor bound."""
    return [
        f"{module}:{node.lineno}: {' x '.join(sorted(choices))}"
        for module, path in files().items()
        if not module.endswith(".combinations")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if not _BOUND.search(message := " ".join(map(_literal, node.exc.args)))
        if len(choices := set(map(_path, _CHOICE.findall(message)))) > 1
    ]


def _path(words: tuple[str, str]) -> str:
    """Return the path of a choice; `mesh.stage` is `execution.mesh.stage`."""
    return ".".join(words).removeprefix("execution.")


def _literal(node: ast.AST) -> str:
    """Return the text of a literal, with `{}` for what it formats."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return "{}" if isinstance(node, ast.FormattedValue) else ""


_VAGUE = frozenset(
    "given own one other others found held both about words known asked whole usual kept left there"
    " here wanted some further rest used named begun ended taken".split()
)
_PARTICIPLE = re.compile(r"[a-z]+(ed|un|wn)")


def names() -> tuple[float, list[str], list[str]]:
    """Return the share of vague bindings, functions named by a participle, class names used twice.

    A binding is a parameter or a variable; it is vague where its name is a pronoun or an adjective.
    """
    bindings: collections.Counter[str] = collections.Counter()
    participles: set[str] = set()
    homes: dict[str, set[str]] = collections.defaultdict(set)
    for module, path in files().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                bindings.update(argument.arg for argument in arguments)
                if _PARTICIPLE.fullmatch(node.name.lstrip("_")):
                    participles.add(node.name.lstrip("_"))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bindings[node.id] += 1
            elif isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].add(module)
    vague = sum(bindings[word] for word in _VAGUE) / bindings.total()
    repeated = [
        f"{name}: {', '.join(sorted(modules))}"
        for name, modules in homes.items()
        if len(modules) > 1
    ]
    return vague, sorted(participles), sorted(repeated)
