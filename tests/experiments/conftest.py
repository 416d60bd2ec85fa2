# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One finished run of the command, which several files read."""

import contextlib
import pathlib

import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from tests.support.runs import finished_flags


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> pathlib.Path:
    """A run of 6 steps, evaluated every 3, with forward multipliers; not to be changed. Its output
    is in printed.txt beside it."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with (directory.parent / "printed.txt").open("w") as printed:
        with contextlib.redirect_stdout(printed):
            assert pretrain.main(finished_flags(directory)) == ExitCode.DONE
    return directory
