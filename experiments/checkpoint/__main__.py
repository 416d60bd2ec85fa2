# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one of the commands on checkpoints: convert, inspect, reshard, verify.

    python -m experiments.checkpoint convert --run.directory runs/pretrain/tiny --quantise w4a8
    python -m experiments.checkpoint verify --run.directory runs/pretrain/tiny

To add a command: `experiments/checkpoint/__main__.py` (a line in `COMMANDS`), and a file with
`main` beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from experiments.checkpoint import convert as checkpoint_convert
from experiments.checkpoint import inspect as checkpoint_inspect
from experiments.checkpoint import resharding as checkpoint_reshard
from experiments.checkpoint import verify as checkpoint_verify
from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import write
from jaxmoe.configs import closest

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "convert": checkpoint_convert.main,
    "inspect": checkpoint_inspect.main,
    "reshard": checkpoint_reshard.main,
    "verify": checkpoint_verify.main,
}
"""Functions by the first word; each takes the other words and returns the exit code."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    listing = "\n".join(f"  {name}  {_about(command)}" for name, command in COMMANDS.items())
    if not argv or argv[0].startswith("-"):
        write(
            f"{(__doc__ or '').strip()}\n\nCommands (add --help to one for its flags):\n{listing}"
        )
        is_help = list(argv) in (["-h"], ["--help"])
        return int(cli.ExitCode.DONE if is_help else cli.ExitCode.BAD_CONFIGURATION)
    name, *rest = argv
    if name not in COMMANDS:
        cli.fail(f"unknown command {name!r}{closest(name, COMMANDS)}\ncommands:\n{listing}")
    return COMMANDS[name](rest)


def _about(command: Callable[..., int]) -> str:
    """Return the first line of the docstring of a command's file."""
    return (sys.modules[command.__module__].__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    run_command(main)
