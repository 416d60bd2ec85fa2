# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares policies of serving on simulated instances, and puts load on a server.

    python -m experiments.serving simulate [--preset qwen3_30b_a3b --chip h100] [--rates 4 8 12]
    python -m experiments.serving load --url http://127.0.0.1:8000 [--workload.rate 4]

To add a command: `experiments/serving/__main__.py` (a line in `COMMANDS`), and a file with `main`
beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import write
from experiments.serving import load as serving_load
from experiments.serving import simulate as serving_simulate
from jaxmoe.configs import closest

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "load": serving_load.main,
    "simulate": serving_simulate.main,
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
