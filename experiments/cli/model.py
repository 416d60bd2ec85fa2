# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the model of a command line: its first word, or a flag.

    jaxmoe generate runs/pretrain/tiny --prompt "def "
    jaxmoe generate allenai/OLMoE-1B-7B-0924 --prompt "Once"

A model is a run directory, a directory of a Hugging Face model, or its name on the hub. The word is
the value of a flag, which does the same: `--run.directory`, or `--checkpoint.initial.path` of
commands that train it. Without either a command takes the run of `make demo`, if it is there.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from experiments.cli.flags import exit_on_bad_configuration
from experiments.cli.output import warn
from jaxmoe.checkpoint.huggingface.hub import is_hub_name
from jaxmoe.configs import closest
from jaxmoe.disk import check_local
from jaxmoe.run.directory import RunDirectory

DEMO: Final = "runs/pretrain/tiny"
"""Run of `make demo`."""
RUN: Final = "--run.directory"
INITIAL: Final = "--checkpoint.initial.path"
"""Flags of a model: of one to use, and of one to train."""
_HELP = frozenset(("-h", "--help", "--help-all", "--help_all"))
_LISTED = 6
"""Runs that a message lists at most."""


def with_about(text: str | None, flag: str = RUN) -> str:
    """Return the text of a help page that says what MODEL is.

    Args:
        text: Docstring of the command.
        flag: Flag of the model.
    """
    sentence = (
        f"MODEL is a run directory, a Hugging Face directory, or a name on the hub ({flag}\n"
        f"MODEL says the same). Without it: {DEMO}, the run of `make demo`."
    )
    return f"{(text or '').strip()}\n\n{sentence}"


def with_model(
    argv: Sequence[str],
    flag: str = RUN,
    *,
    flag_of: Callable[[str], str] | None = None,
    has_default: bool = True,
) -> list[str]:
    """Return a command line whose first word, if it is a model, is the value of a flag.

    Says which run is taken where none is named, and `make demo` has made one.

    Args:
        argv: Words of the command line.
        flag: Flag of the model.
        flag_of: Returns the flag of a first word, where it depends on the model; `flag` when None.
        has_default: Whether the command needs a model.

    Returns:
        The words. Exits with 2 where the first is no model, or the flag is there as well.
    """
    arguments = list(argv)
    if arguments and _is_model(arguments[0]):
        word, *remaining = arguments
        with exit_on_bad_configuration():
            check_model(word)
            word_flag = flag if flag_of is None else flag_of(word)
            if (value := value_of(word_flag, remaining)) is not None:
                raise ValueError(
                    f"the model is named twice, as the first word, {word}, and by {word_flag}"
                    f" {value}: leave one of them out"
                )
        return [word_flag, os.path.expanduser(word), *remaining]
    is_named = value_of(flag, arguments) is not None
    if is_named or not has_default or _HELP & set(arguments) or (demo := default_model()) is None:
        return arguments
    return [flag, demo, *arguments]


def default_model() -> str | None:
    """Return the run of `make demo`, and say that it is taken; None where it is not there."""
    if not RunDirectory(DEMO).has_config():
        return None
    text = f"note: no model is named as the first word: {DEMO}, the run of `make demo`, is taken"
    warn(text)
    return DEMO


def _is_model(word: str) -> bool:
    """Return whether a word is neither a flag nor a choice, such as data:chat."""
    if word.startswith("-"):
        return False
    return ":" not in word or "://" in word or pathlib.Path(word).exists()


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the last value of a flag; None where it is not there, or has none.

    Args:
        flag: Flag with its hyphens.
        arguments: Words of a command line.
    """
    value = None
    for word, after in itertools.zip_longest(arguments, arguments[1:]):
        name, equals, text = word.partition("=")
        if name.replace("-", "_") == flag.replace("-", "_"):
            value = text if equals else after
    return value


def check_model(word: str) -> None:
    """Refuse a word that is neither a directory nor a name on the hub.

    Args:
        word: The word.

    Raises:
        ValueError: Says what was looked for, and which runs there are.
    """
    check_local("MODEL", word)
    path = pathlib.Path(os.path.expanduser(word))
    if path.is_dir() or is_hub_name(word):
        return
    if path.exists():
        raise ValueError(f"{word} is a file: name the directory of the run or the model")
    runs = sorted(_runs())
    near = next((run for run in runs if pathlib.Path(run).name == word), None)
    meant = f": did you mean {near}?" if near else closest(word, runs)
    listed = ", ".join(runs[:_LISTED]) + (", ..." if len(runs) > _LISTED else "")
    raise ValueError(
        f"there is no model {word!r}{meant}\nNo directory has this path, and a name on the Hugging"
        f" Face hub is OWNER/NAME, such as allenai/OLMoE-1B-7B-0924.\n"
        + (f"runs here: {listed}" if runs else f"There are no runs here: `make demo` makes {DEMO}.")
    )


def _runs() -> Iterator[str]:
    """Yield the run directories at the places where commands put them."""
    for file in pathlib.Path("runs").glob("*/*/config.json"):
        yield str(file.parent)
