# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What importing reads, what the core knows of verticals, and its names: ceilings that only fall.

A change that needs a higher number is at the wrong place: a member belongs in the catalogue, and a
place to act is a socket of several members. A change that lowers a number lowers it here, too.
"""

import re
import subprocess
import sys

import pytest

from experiments.cli.help import help_page
from experiments.recipes.tiny import tiny
from tests.support import shape
from tests.support.organs import REASONS
from tests.support.source_tree import PACKAGES, ROOT

CLOSURES = {"jaxmoe": 3, "jaxmoe.routing": 9, "jaxmoe.optim": 9, "experiments.pretrain": 287}
ARROWS = 0
REFUSALS = 18
VAGUE_BINDINGS = 0.0025
PARTICIPLES = 10
REPEATED_CLASSES = 4
FLAGS = 80
"""Flags of `experiments.pretrain` with its default recipe and no choice made."""


@pytest.mark.parametrize("module", CLOSURES)
def test_importing_a_module_reads_few_files(module):
    read = shape.closure(module)
    assert len(read) <= CLOSURES[module], sorted(read)


def test_the_core_imports_few_files_of_verticals():
    rows = shape.arrows()
    assert len(rows) <= ARROWS, "\n".join(rows)
    assert not [row for row in rows if "-> contrib" in row]


def test_few_defaults_of_a_base_class_are_for_one_subclass():
    rows = dict(row.split(" is for ") for row in shape.organs())
    assert not (new := [f"{name} is for {rows[name]}" for name in rows.keys() - REASONS]), new
    outdated = sorted(REASONS.keys() - rows.keys())
    assert not outdated, (
        f"delete from tests/support/organs.py, not for one subclass now: {outdated}"
    )
    assert all(REASONS.values())


def test_few_messages_outside_the_table_refuse_a_pair_of_choices():
    rows = shape.refusals()
    assert len(rows) <= REFUSALS, "\n".join(rows)


def test_names_are_nouns_and_each_class_has_its_own():
    vague, participles, repeated = shape.names()
    assert vague <= VAGUE_BINDINGS
    assert len(participles) <= PARTICIPLES, "\n".join(participles)
    assert len(repeated) <= REPEATED_CLASSES, "\n".join(repeated)


@pytest.mark.parametrize(("module", "most"), [("jaxmoe", 5), ("jaxmoe.routing", 60)])
def test_a_process_that_imports_a_package_reads_its_own_few_files_and_no_jax(module, most):
    program = (
        f"import sys, {module}; assert 'jax' not in sys.modules;"
        f" print(len([m for m in sys.modules if m.partition('.')[0] in {PACKAGES}]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(answer.stdout) <= most


def test_names_that_a_package_loads_later_count_where_they_are_taken():
    assert "jaxmoe.routing.methods" not in shape.closure("jaxmoe.routing")
    assert "jaxmoe.routing.methods" in shape.closure("experiments.routers")


def test_the_default_tree_of_the_training_command_has_few_flags():
    page = help_page(tiny(), "all", "prog", "A command.")
    flags = re.findall(r"^  --([\w.]+) ", page.partition("\nrun: ")[2], re.MULTILINE)
    assert len(flags) <= FLAGS, "\n".join(flags)
