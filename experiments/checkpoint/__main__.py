# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one of the commands on checkpoints: convert, inspect, reshard, verify.

    jaxmoe checkpoint convert runs/pretrain/tiny --quantise w4a8
    jaxmoe checkpoint verify runs/pretrain/tiny

To add a command: `experiments/checkpoint/__main__.py` (a line in `COMMANDS`), and a file with
`main` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.checkpoint import convert as checkpoint_convert
from experiments.checkpoint import inspect as checkpoint_inspect
from experiments.checkpoint import resharding as checkpoint_reshard
from experiments.checkpoint import verify as checkpoint_verify
from experiments.cli.exit import run_command
from experiments.cli.parts import Part, run_part

COMMANDS: dict[str, Part] = {
    "convert": checkpoint_convert.main,
    "inspect": checkpoint_inspect.main,
    "reshard": checkpoint_reshard.main,
    "verify": checkpoint_verify.main,
}
"""Functions by the first word; each takes the other words and returns the exit code."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    return run_part(COMMANDS, argv, __doc__)


if __name__ == "__main__":
    run_command(main)
