# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The job that a cluster runs, and what clusters have in common."""

from __future__ import annotations

import dataclasses
import re
import shlex
import unicodedata
from collections.abc import Mapping

_CONTROL = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of control characters, lone surrogates, and separators of lines."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Command to start on every host of a cluster."""

    name: str
    """Name of the job: lower-case letters, digits and hyphens."""
    command: str
    """Command line of every process."""

    @property
    def words(self) -> list[str]:
        """Command line split into arguments."""
        return shlex.split(self.command)

    @property
    def shell_line(self) -> str:
        """Command line with every word quoted for a shell."""
        return shlex.join(self.words)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFiles:
    """Files that start a job."""

    files: Mapping[str, str]
    """Text by file name."""
    start: str
    """Command line that starts the job; `{directory}` stands for the directory of the files."""

    def start_in(self, directory: str) -> str:
        """Return the command line that starts the job, with the directory quoted for a shell.

        Args:
            directory: Directory of the files.
        """
        place = f"./{directory}" if directory.startswith("-") else directory
        return self.start.format(directory=shlex.quote(place))


def check_at_least(path: str, value: int, lowest: int) -> None:
    """Refuse a value below the lowest.

    Args:
        path: Dotted name of the field.
        value: Value of the field.
        lowest: Smallest value allowed.

    Raises:
        ValueError: The value is smaller.
    """
    if value < lowest:
        raise ValueError(f"{path}={value} must be at least {lowest}")


def check_text(path: str, value: str | None, *, is_shell: bool = False) -> None:
    """Refuse control characters, which would become lines of the written files.

    Args:
        path: Dotted name of the field.
        value: Value of the field.
        is_shell: Whether the value is shell text, in which newlines and tabs are allowed.

    Raises:
        ValueError: The value has a control character.
    """
    allowed = "\n\t" if is_shell else ""
    if any(unicodedata.category(c) in _CONTROL and c not in allowed for c in value or ""):
        raise ValueError(f"{path}={value!r} has a control character: remove it")


def check_word(path: str, value: str | None, service: str) -> None:
    """Refuse a value that is not one name.

    Args:
        path: Dotted name of the field.
        value: Value of the field; None and empty are accepted.
        service: Name of the service that takes the value, for the message.

    Raises:
        ValueError: The value has other characters than names have.
    """
    if value and not _WORD.fullmatch(value):
        raise ValueError(
            f"{path}={value!r} is not a name that {service} accepts: it has letters, digits and"
            " . _ : / @ -, and begins with a letter or digit"
        )


def check_directory(job: Job, root: str, where: str) -> None:
    """Refuse a run directory that only one host would see.

    Args:
        job: Job with `--run.directory` in its command.
        root: Directory that all hosts share.
        where: Clause about `root`, for the message.

    Raises:
        ValueError: The run directory is missing or outside of `root`.
    """
    text = " ".join(word.replace("=", " ", 1) for word in job.words)
    match = re.search(r"--run\.directory (\S+)", text)
    if match is None or not match[1].startswith(root):
        raise ValueError(
            f"command has {'no --run.directory' if match is None else match[0]}, which would"
            f" lie on each host's own disk: give one beneath {root}, {where}"
        )
