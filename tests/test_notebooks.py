# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the documentation: their cells run, and their outputs are in the files."""

import contextlib

import pytest

from tests.support.notebooks import FOLDER, execute, kinds, read

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_keeps_its_outputs_and_has_a_picture(name):
    cells = [cell for cell in read(FOLDER / f"{name}.ipynb")["cells"]]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [kind for cell in code for kind in kinds(cell["outputs"])]
    assert "image/png" in shown and "stdout" in shown
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_notebook_run_and_show_what_is_kept(name, tmp_path):
    notebook = read(FOLDER / f"{name}.ipynb")
    with contextlib.chdir(tmp_path):
        outputs = execute(notebook)
    kept = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [kinds(cell) for cell in outputs] == [kinds(cell) for cell in kept]


def test_an_execution_collects_text_values_and_figures():
    cells = ["x = 1\nprint('a')", "x + 1", "import matplotlib.pyplot as p\np.plot([1, 2]);"]
    notebook = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    assert [kinds(cell) for cell in execute(notebook)][:2] == [["stdout"], ["text/plain"]]
    assert kinds(execute(notebook)[2]) == ["image/png"], "the semicolon hides the value"
    with pytest.raises(RuntimeError, match="cell 1: division"):
        execute({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})
