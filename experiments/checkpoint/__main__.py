# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What can be done to checkpoints.

    python -m experiments.checkpoint convert --run.directory runs/pretrain/tiny --quantise w4a8
    python -m experiments.checkpoint verify --run.directory runs/pretrain/tiny

To add one: a file experiments/checkpoint_<name>.py with `main`, and a line in COMMANDS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from experiments.checkpoint import convert as checkpoint_convert
from experiments.checkpoint import inspect as checkpoint_inspect
from experiments.checkpoint import resharding as checkpoint_reshard
from experiments.checkpoint import verify as checkpoint_verify
from experiments.cli import flags as cli
from experiments.cli.output import write
from jaxmoe.configs import closest

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "convert": checkpoint_convert.main,
    "inspect": checkpoint_inspect.main,
    "reshard": checkpoint_reshard.main,
    "verify": checkpoint_verify.main,
}
"""By its first word; each takes the others and returns the exit code."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    listing = "\n".join(f"  {name}  {_about(command)}" for name, command in COMMANDS.items())
    if not argv or argv[0].startswith("-"):
        write(f"{(__doc__ or '').strip()}\n\nCommands (--help behind one tells more):\n{listing}")
        is_help = list(argv) in (["-h"], ["--help"])
        return int(cli.ExitCode.DONE if is_help else cli.ExitCode.BAD_CONFIGURATION)
    name, *rest = argv
    if name not in COMMANDS:
        cli.fail(f"unknown command {name!r}{closest(name, COMMANDS)}\ncommands:\n{listing}")
    return COMMANDS[name](rest)


def _about(command: Callable[..., int]) -> str:
    """The first line of the docstring of the file that holds it."""
    return (sys.modules[command.__module__].__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
