# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The page of families says what is so: every cell is measured again."""

import ast
import pathlib

import pytest

from tests.support import family_table
from tests.support.huggingface_models import CONFIGS

ROUNDING = 4.0
"""Ratio by which differences of logits vary from one processor to another."""


def test_the_page_has_a_row_for_every_family():
    assert list(family_table.written_rows()) == list(CONFIGS)


def test_logits_of_the_page_are_equal_up_to_rounding():
    rows = family_table.written_rows()
    assert all(float(cells["logits"]) < family_table.CLOSE for cells in rows.values())


def test_a_family_of_over_120_lines_says_what_its_layers_lack():
    files = list(
        (pathlib.Path(family_table.PAGE).parents[2] / "jaxmoe").glob("**/families/**/*.py")
    )
    assert len(files) > len(CONFIGS)
    for file in files:
        text = file.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        is_long = text.count("\n") > 120
        assert is_long == ("Longer than 120 lines" in docstring), file


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_cells_of_a_family_are_those_of_the_page(name):
    written = family_table.written_rows()[name]
    measured = family_table.row(name)
    difference = float(measured.pop("logits"))
    assert difference <= ROUNDING * float(written.pop("logits"))
    assert measured == written
