# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the public names of a package when they are first used.

The stub `__init__.pyi` beside an `__init__.py` lists the names, for editors, type checkers and
`load_when_used`: importing the package imports none of its files.

    # package/__init__.py
    load_when_used(__name__)

    # package/__init__.pyi
    from package.module import Name as Name
    OtherName = Name

A file of the package, as `package.module`, is loaded when it is first used, too. Where a name is
also that of a file, as in `jaxmoe.optim.muon`, the attribute of the package is the public name.

To make a name public: a line of the stub.

A checkout has four packages beside each other; an installed jaxmoe has them in one, and both know
both names of each, for the same modules:

    checkout                  installed
    sharding                  jaxmoe.sharding
    pallas_kernels            jaxmoe.kernels
    experiments               jaxmoe.experiments

Installed packages do not depend on which folder `sharding` Python finds first.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterable
from typing import Any

SECOND_NAMES = {
    "sharding": "jaxmoe.sharding",
    "pallas_kernels": "jaxmoe.kernels",
    "experiments": "jaxmoe.experiments",
}
"""Name that each package has in an installation, by its name in a checkout."""


def stub_names(text: str) -> dict[str, str]:
    """Return the address `module:name` of each public name of a stub.

    Args:
        text: Text of the stub: `from module import name as name`, `alias = name`, and annotations
            of what the package assigns itself, whose address is "".
    """
    addresses: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.asname is not None]
            addresses.update((name, f"{node.module}:{name}") for name in names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            addresses[node.target.id] = ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            addresses[ast.unparse(node.targets[0])] = addresses[node.value.id]
    return addresses


def load_when_used(package: str) -> None:
    """Let a package load the names of its stub when they are first used.

    Args:
        package: Name of the package, from its `__init__.py`.
    """
    module = sys.modules[package]
    stub = pathlib.Path(str(module.__file__)).with_suffix(".pyi")
    addresses = stub_names(stub.read_text(encoding="utf-8"))
    vars(module).update(__all__=list(addresses), _addresses=addresses)
    module.__class__ = _Package


class _Package(types.ModuleType):
    """A package whose names load when they are first used."""

    _addresses: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        module, _, attribute = self._addresses.get(name, "").partition(":")
        file = f"{self.__name__}.{name}"
        if module:
            value = getattr(importlib.import_module(module), attribute)
        elif not name.startswith("_") and importlib.util.find_spec(file) is not None:
            value = importlib.import_module(file)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a file makes it an attribute of its package; a public name has precedence.
        is_file = isinstance(value, types.ModuleType) and name in self._addresses
        if not is_file or value.__name__ != f"{self.__name__}.{name}":
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._addresses})


def name_packages_beside(library: str) -> None:
    """Give the packages beside a library their names within it; an installation has them within.

    Args:
        library: Name of the library, from its `__init__.py`.

    Raises:
        ImportError: Python finds another package of such a name before ours.
    """
    folder = pathlib.Path(str(sys.modules[library].__file__)).resolve().parent
    if (folder / "sharding").exists():
        return
    for package, second in SECOND_NAMES.items():
        spec = importlib.util.find_spec(package)
        path = folder.parent / package / "__init__.py"
        if spec is None or spec.origin is None or not path.samefile(spec.origin):
            other = None if spec is None else spec.origin or spec.submodule_search_locations
            raise ImportError(
                f"the checkout of jaxmoe at {folder.parent} needs its own package {package!r},"
                f" and Python finds {other} first: install jaxmoe (pip install {folder.parent}),"
                " which has all of it under one name, or start Python in another folder"
            )
        stand_for(second, package)


def stand_for(name: str, package: str) -> None:
    """Let a name, and the names below it, import the modules of a package.

    Args:
        name: Second name, `sharding` for example.
        package: Name under which the modules are loaded, `jaxmoe.sharding` for example.
    """
    finder = _SecondName(name, package)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class _SecondName(importlib.abc.MetaPathFinder):
    """Finds the modules of a package below another name."""

    def __init__(self, name: str, package: str):
        self.name = name
        self.package = package

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SecondName) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.name, self.package))

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        first = importlib.util.find_spec(self.package + fullname[len(self.name) :])
        if first is None:
            return None
        loader = _SameModule(first)
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=first.origin)
        spec.submodule_search_locations = first.submodule_search_locations
        spec.cached = first.cached
        return spec


class _SameModule(importlib.abc.InspectLoader):
    """Loads a module under its first name, and hands out that module."""

    def __init__(self, first: importlib.machinery.ModuleSpec):
        self.first = first

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return importlib.import_module(self.first.name)

    def exec_module(self, module: types.ModuleType) -> None:
        # It has run under its first name; the import system has just given it the second.
        module.__spec__ = self.first

    def is_package(self, fullname: str) -> bool:
        return self.first.submodule_search_locations is not None

    def get_source(self, fullname: str) -> str | None:
        return self._inspect("get_source")

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the code of a module, which `python -m` runs as `__main__`."""
        return self._inspect("get_code")

    def _inspect(self, method: str):
        return getattr(self.first.loader, method)(self.first.name)
