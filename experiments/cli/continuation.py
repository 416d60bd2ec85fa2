# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses command lines that begin with `resume RUN` or `branch RUN`.

    resume RUN [flags]    the run in RUN; flags extend it: more steps, another schedule, ...
    branch RUN --run.name NAME [flags]    a new run that continues the state of RUN

The configuration is that of RUN, with the flags.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.cli import flags
from jaxmoe.run.config import EXTENSION_FIELDS, InitialConfig, LockConfig, PretrainConfig
from jaxmoe.run.directory import RunDirectory

WORDS = ("resume", "branch")
"""First words of such command lines."""


def parse_continuation(argv: Sequence[str], prog: str, description: str) -> PretrainConfig:
    """Return the configuration of a run that is resumed or branched.

    Args:
        argv: Arguments, of which the first is one of `WORDS`.
        prog: How the program is called.
        description: First paragraph of `--help`.

    Returns:
        The configuration. Exits with 2 if RUN holds no run.
    """
    word, *remaining = argv
    if not remaining or remaining[0].startswith("-"):
        flags.fail(
            f"{word} needs a run directory: {prog} {word} runs/pretrain/tiny"
            + (" --run.name NAME" if word == "branch" else "")
        )
    path, *arguments = remaining
    with flags.exit_on_bad_configuration():
        config = RunDirectory(path).load_config(PretrainConfig)
        changed = _branch(config, path) if word == "branch" else _resume(config, path)
    text = f"{description}\n\nMay change: {', '.join(EXTENSION_FIELDS)}."
    extended = flags.parse_flags(changed, arguments, prog, text)
    with flags.exit_on_bad_configuration():
        if word == "branch":
            _check_branch(extended, path, prog)
        elif extended.run.directory != path:
            raise ValueError(
                f"resume {path} continues the run there, and run.directory={extended.run.directory}"
                f" is another: leave it out, or start a branch with {prog} branch {path}"
            )
    return extended


def named_fields(arguments: Sequence[str]) -> frozenset[str]:
    """Return the dotted paths of the fields that a command line names.

    Args:
        arguments: Flags and choices, such as `--training.steps 900 schedule:wsd`.
    """
    flags = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
    choices = {word.partition(":")[0] for word in arguments if not word.startswith("-")}
    return frozenset(name.replace("-", "_") for name in flags | choices)


def _resume(config: PretrainConfig, path: str) -> PretrainConfig:
    run = dataclasses.replace(config.run, directory=path, lock=_without_force(config.run.lock))
    return dataclasses.replace(config, run=run)


def _without_force(lock: LockConfig | None) -> LockConfig | None:
    """Return a lease that takes the directory from no process: a run was told to once."""
    return None if lock is None else dataclasses.replace(lock, steal=False)


def _branch(config: PretrainConfig, path: str) -> PretrainConfig:
    run = dataclasses.replace(
        config.run, directory=None, name=None, lock=_without_force(config.run.lock)
    )
    initial = InitialConfig(path=path, state="all")
    checkpoint = dataclasses.replace(config.checkpoint, initial=initial)
    return dataclasses.replace(config, run=run, checkpoint=checkpoint)


def _check_branch(config: PretrainConfig, path: str, prog: str) -> None:
    """Refuse a branch that has no directory of its own."""
    name = config.run.name
    directory = config.run.directory
    if name is None and directory is None:
        raise ValueError(
            f"a branch is a new run: give it a name, {prog} branch {path} --run.name NAME, or a"
            " directory with --run.directory"
        )
    place = pathlib.Path(directory or f"runs/pretrain/{name}")
    if place.resolve() == pathlib.Path(path).resolve():
        raise ValueError(
            f"run.directory={place} holds the run that is branched: choose another, or extend that"
            f" run with {prog} resume {path}"
        )
