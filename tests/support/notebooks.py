# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks of the documentation, without Jupyter, and writes their outputs.

    python -m tests.support.notebooks [NAME ...]

runs the cells of `.docs/notebooks/NAME.ipynb` one after the other in an empty folder, and keeps
what they print, the value of a last expression, and matplotlib's figures, as Jupyter would.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from tests.support.source_tree import ROOT

FOLDER = ROOT / ".docs" / "notebooks"


def read(path: pathlib.Path) -> dict[str, Any]:
    """Return a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))


def execute(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the outputs of the code cells of a notebook.

    Args:
        notebook: Its cells share one namespace.

    Raises:
        RuntimeError: A cell raised; names its number.
    """
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        try:
            outputs.append(_execute("".join(cell["source"]), namespace, number))
        except Exception as error:
            raise RuntimeError(f"cell {number}: {error}") from error
    return outputs


def _execute(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the outputs of one cell."""
    import matplotlib.pyplot as plt

    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": [repr(value)]}
        outputs.append(
            {"output_type": "execute_result", "execution_count": number}
            | {"metadata": {}, "data": data}
        )
    for figure in map(plt.figure, plt.get_fignums()):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(picture.getvalue()).decode() + "\n"}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return outputs


def kinds(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the kind of each output of a cell: `stdout`, `text/plain`, `image/png`."""
    return [output.get("name") or next(iter(output["data"])) for output in outputs]


def main(names: list[str]) -> None:
    """Write the outputs of notebooks."""
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = read(path)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = execute(notebook)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, output) in enumerate(zip(cells, outputs, strict=True), 1):
            cell |= {"execution_count": number, "outputs": output}
        path.write_text(json.dumps(notebook, indent=1) + os.linesep, encoding="utf-8")
        print(f"{path}: {len(cells)} cells")


if __name__ == "__main__":
    main(sys.argv[1:])
