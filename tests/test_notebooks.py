# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the documentation: their cells run, and their outputs are in the files."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.notebooks import FOLDER, execute, kinds, read
from tests.support.source_tree import ROOT

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
    notebook = FOLDER / f"{name}.ipynb"
    program = (
        "import json, pathlib, sys; from tests.support.notebooks import execute, kinds, read;"
        "print(json.dumps([kinds(cell) for cell in execute(read(pathlib.Path(sys.argv[1])))]))"
    )
    # The reader has one device, and the tests eight.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", program, str(notebook)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    cells = [cell["outputs"] for cell in read(notebook)["cells"] if cell["cell_type"] == "code"]
    assert json.loads(run.stdout.splitlines()[-1]) == [kinds(cell) for cell in cells]


def test_an_execution_collects_text_values_and_figures():
    cells = ["x = 1\nprint('a')", "x + 1", "import matplotlib.pyplot as p\np.plot([1, 2]);"]
    notebook = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    assert [kinds(cell) for cell in execute(notebook)][:2] == [["stdout"], ["text/plain"]]
    assert kinds(execute(notebook)[2]) == ["image/png"], "the semicolon hides the value"
    with pytest.raises(RuntimeError, match="cell 1: division"):
        execute({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})
