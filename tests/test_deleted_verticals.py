# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The core without a vertical: its folder and its rows of the catalogue are deleted from a copy."""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.source_tree import PACKAGES, ROOT, imported_names, module_name, modules, tree
from tests.support.verticals import vertical_of_source

VERTICALS = sorted(path.parent.name for path in (ROOT / "jaxmoe" / "contrib").glob("*/README.md"))
CORE = sorted(
    module_name(path)
    for path in modules("pallas_kernels", "sharding", "jaxmoe")
    if not module_name(path).startswith("jaxmoe.contrib.")
)
PROGRAM = """
import importlib, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
from experiments import pretrain
sys.exit(pretrain.main(sys.argv[2:]))
"""
RUN = ("markov", "--training.steps", "2", "--evaluation.batches", "1", "--tracking.console", "none")


def _needed_verticals() -> dict[str, set[str]]:
    """The verticals that the code and the commands of each vertical import."""
    needed: dict[str, set[str]] = {name: set() for name in VERTICALS}
    for path in modules("jaxmoe", "experiments"):
        owner = vertical_of_source(str(path.relative_to(ROOT)))
        if owner is not None:
            names = (name.split(".") for _, name in imported_names(tree(path)))
            needed[owner] |= {name[2] for name in names if name[:2] == ["jaxmoe", "contrib"]}
    return needed


def _commands_without(vertical: str) -> list[str]:
    """The modules of commands but those of a vertical and of verticals that need it."""
    needed = _needed_verticals()
    gone = {vertical}
    while more := {name for name in needed if needed[name] & gone} - gone:
        gone |= more
    return [
        module_name(path)
        for path in modules("experiments")
        if vertical_of_source(str(path.relative_to(ROOT))) not in gone
    ]


class _Rows(ast.NodeTransformer):
    """Removes the rows of a file of the catalogue that give addresses in a vertical."""

    def __init__(self, vertical: str, tree: ast.Module):
        self.prefix = f"jaxmoe.contrib.{vertical}."
        self.names = {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and self._is_address(node.value)
        }

    def _is_address(self, node: ast.AST | None) -> bool:
        text = getattr(node, "value", None)
        return isinstance(text, str) and text.startswith(self.prefix)

    def _is_row(self, node: ast.AST) -> bool:
        fields = node.elts if isinstance(node, ast.Tuple) else [node]
        return any(
            self._is_address(field) or (isinstance(field, ast.Name) and field.id in self.names)
            for field in fields
        )

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        pairs = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not self._is_row(value)
        ]
        node.keys = [key for key, _ in pairs]
        node.values = [value for _, value in pairs]
        self.generic_visit(node)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        node.elts = [element for element in node.elts if not self._is_row(element)]
        self.generic_visit(node)
        return node


def _copy_without(vertical: str, target: pathlib.Path) -> None:
    """Copy the packages, without a vertical and its rows."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.rmtree(target / "jaxmoe" / "contrib" / vertical)
    for path in (target / "jaxmoe" / "catalog").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        path.write_text(ast.unparse(_Rows(vertical, tree).visit(tree)), encoding="utf-8")


def _run(target: pathlib.Path, commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Import the core of a copy and some commands, and train two steps."""
    names = " ".join(CORE + commands)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, names, *RUN, "--run.directory", target / "run"],
        cwd=target,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_rows_of_one_vertical_are_removed_and_those_of_others_stay():
    text = (ROOT / "jaxmoe" / "catalog" / "run_parts.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    rest = ast.unparse(_Rows("telemetry", tree).visit(tree))
    assert "jaxmoe.contrib.telemetry." in text
    assert "jaxmoe.contrib.telemetry." not in rest
    assert rest.count("jaxmoe.contrib.elastic.") == text.count("jaxmoe.contrib.elastic.") > 0


def test_the_commands_of_a_vertical_are_few_beside_those_of_the_core():
    commands = set(_commands_without("fleet"))
    assert {"experiments.serve", "experiments.generate", "experiments.launch"} <= commands
    assert "experiments.serving.simulate" not in commands  # the simulator runs a fleet
    assert "experiments.replay" in commands
    assert "experiments.replay" not in _commands_without("survival")


def test_commands_of_the_core_import_no_vertical():
    """They reach its members by their names, so that they run where its folder is deleted."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("experiments")
        if vertical_of_source(str(path.relative_to(ROOT))) is None
        for _, name in imported_names(tree(path))
        if name.startswith("jaxmoe.contrib.")
    }
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("vertical", VERTICALS)
def test_the_core_trains_without_a_vertical(vertical, tmp_path):
    """All commands but its own are there too."""
    _copy_without(vertical, tmp_path)
    answer = _run(tmp_path, _commands_without(vertical))
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert (tmp_path / "run" / "summary.json").exists()
