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
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pathlib
import sys
import types
from typing import Any


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
