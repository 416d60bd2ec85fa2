# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A command whose disk is full from its first save on, as a process of its own."""

from __future__ import annotations

from tests.support.runs import start_run, written_by

_SCRIPT = """
import importlib, resource, sys
from experiments.cli.exit import run_command
from jaxmoe.checkpoint import CheckpointManager

save = CheckpointManager.save

def full(*given, **named):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # of each file: root heeds it, too
    return save(*given, **named)

CheckpointManager.save = full
name = sys.argv.pop(1)
run_command(importlib.import_module(name).main)
"""


def end_on_a_full_disk(module: str, arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command, and what it wrote.

    Args:
        module: Module of the command, with `main`.
        arguments: Words of its command line.
    """
    process = start_run([module, *arguments], _SCRIPT)
    (output,) = written_by(process)
    return process.returncode, output
