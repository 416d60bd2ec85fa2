# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packages whose names load when they are used: the stubs are complete, no file hides a name."""

import ast
import importlib
import pathlib

import pytest

from pallas_kernels.public_names import stub_names
from tests.support.source_tree import PACKAGES, ROOT

STUBS = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("__init__.pyi"))]


def _name(stub: pathlib.Path) -> str:
    return ".".join(stub.parent.relative_to(ROOT).parts)


@pytest.mark.parametrize("stub", STUBS, ids=_name)
def test_every_name_of_a_stub_loads_though_a_file_has_it_too(stub):
    package = importlib.import_module(_name(stub))
    names = stub_names(stub.read_text(encoding="utf-8"))
    assert list(names) == package.__all__
    for name, address in names.items():
        value = getattr(package, name)
        module, _, attribute = address.partition(":")
        assert not module or value is getattr(importlib.import_module(module), attribute)
        if (stub.parent / f"{name}.py").exists():
            importlib.import_module(f"{_name(stub)}.{name}")
            assert getattr(package, name) is value


@pytest.mark.parametrize("stub", STUBS, ids=_name)
def test_a_package_with_a_stub_assigns_what_the_stub_annotates_and_little_else(stub):
    tree = ast.parse(stub.with_suffix(".py").read_text(encoding="utf-8"))
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = stub_names(stub.read_text(encoding="utf-8"))
    assert assigned == {name for name, address in names.items() if not address}


def test_a_file_loads_when_it_is_used_and_other_names_are_refused():
    package = importlib.import_module("jaxmoe.routing")
    assert package.capacity is importlib.import_module("jaxmoe.routing.capacity")
    assert {"ROUTERS", "SoftmaxTopKConfig"} <= set(dir(package))
    with pytest.raises(AttributeError, match="module 'jaxmoe.routing' has no attribute 'nothing'"):
        _ = package.nothing
