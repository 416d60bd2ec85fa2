# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a command that has several, such as `jaxmoe checkpoint convert`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.cli.exit_codes import ExitCode
from experiments.cli.flags import fail
from experiments.cli.output import write
from jaxmoe.configs import closest

Part = Callable[[Sequence[str]], int]
"""Function of the words after the name of the part; returns the exit code."""


def part_at(address: str) -> Callable[..., Any]:
    """Return a function of a file that is of a vertical, which is imported when it is named.

    Args:
        address: `package.module:function`.
    """
    module, _, function = address.partition(":")
    return getattr(importlib.import_module(module), function)


def run_part(parts: Mapping[str, Part], argv: Sequence[str], text: str | None) -> int:
    """Run the part that the first word names, or list all, and return the exit code.

    Args:
        parts: Functions by the first word.
        argv: Arguments of the command line.
        text: Docstring of the command.
    """
    listing = "\n".join(f"  {name}  {_about(part)}" for name, part in parts.items())
    if not argv or argv[0].startswith("-"):
        write(f"{(text or '').strip()}\n\nCommands (add --help to one for its flags):\n{listing}")
        is_help = list(argv) in (["-h"], ["--help"])
        return int(ExitCode.DONE if is_help else ExitCode.BAD_CONFIGURATION)
    name, *remaining = argv
    if name not in parts:
        fail(f"unknown command {name!r}{closest(name, parts)}\ncommands:\n{listing}")
    return parts[name](remaining)


def _about(part: Part) -> str:
    """Return the first line of the docstring of a part's file."""
    return (sys.modules[part.__module__].__doc__ or "").partition("\n")[0]
