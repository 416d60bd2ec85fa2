# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a command of `experiments` by its name, or lists them all.

`jaxmoe pretrain tiny` is `python -m experiments.pretrain tiny` in a checkout.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pathlib
import runpy
import sys
from collections.abc import Sequence

from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import open_closed_streams, warn, write

_USAGE = "usage: jaxmoe COMMAND [argument ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: Name and arguments of the command; those of this process when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    files = _files()
    open_closed_streams()
    if arguments in (["--version"], ["-V"]):
        write(f"jaxmoe {importlib.import_module('jaxmoe').__version__}")
        return int(ExitCode.DONE)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, files))
        lines = (f"  {name:<{width}}  {_about(path)}" for name, path in files.items())
        write("\n".join([_USAGE, "", *lines, "", "COMMAND --help lists the flags of one."]))
        return int(ExitCode.DONE)
    name, *remaining = arguments
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        meant = f": did you mean {near[0]!r}?" if near else ""
        warn(f"error: there is no command {name!r}{meant}\ncommands: {', '.join(files)}")
        return int(ExitCode.BAD_CONFIGURATION)
    sys.argv[1:] = remaining
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    return int(ExitCode.DONE)


def _files() -> dict[str, pathlib.Path]:
    """Return the file of every command by its name."""
    folder = pathlib.Path(__file__).parent
    files = [path for path in folder.glob("*.py") if not path.stem.startswith("__")]
    by_name = {path.stem: path for path in files}
    by_name |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    return dict(sorted(by_name.items()))


def _about(path: pathlib.Path) -> str:
    """Return the first sentence of a module's docstring, without importing it."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition("; see")[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
