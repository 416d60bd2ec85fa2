# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One finished run of the command, which several files read.

What it needs is imported when it runs: pytest reads this file before tests/conftest.py has
installed the checks of annotations, if a file beside it is named on the command line.
"""

import contextlib
import importlib
import pathlib

import pytest


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> pathlib.Path:
    """A run of 6 steps, evaluated every 3, with forward multipliers; not to be changed. Its output
    is in printed.txt beside it."""
    pretrain = importlib.import_module("experiments.pretrain")
    flags = importlib.import_module("tests.support.runs").finished_flags
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with (directory.parent / "printed.txt").open("w") as printed:
        with contextlib.redirect_stdout(printed):
            assert pretrain.main(flags(directory)) == 0
    return directory
