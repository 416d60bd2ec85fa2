# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Messages of the library to its user, through the logger "jaxmoe.messages" at level INFO.

Commands print them on standard output (`experiments/cli/process.py`), and so does `Run` in a
program that has not configured logging. To send them elsewhere, set the level of the logger to INFO
and give it, or the root logger, a handler.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Final

import jax

logger = logging.getLogger(__name__)

TEXT_FILES: Final = "--data.path 'docs/**/*.md'"
"""Flag that names files of text, an example in messages."""


def say(text: str) -> None:
    """Log a message of one or more lines, on the first process only."""
    if jax.process_index() == 0:
        write(text)


def write(text: str) -> None:
    """Log a message of one or more lines, without asking JAX for the number of the process."""
    logger.info("%s", text)


def command_line(*words: object) -> str:
    """Return a command as its reader types it, with words quoted for a shell.

    Args:
        *words: Name of the command and its arguments: "pretrain", "resume" and a path.
    """
    return shlex.join(["jaxmoe", *map(str, words)])


class Progress:
    """Messages about long work: none for the first seconds, then one every few seconds.

    Args:
        first: Seconds before the first message.
        every: Seconds between messages.
    """

    def __init__(self, first: float = 1.5, every: float = 10.0):
        self._due = time.monotonic() + first
        self._every = every

    def at(self, text: str, *numbers: float) -> None:
        """Log a message if one is due.

        Args:
            text: Message, with a field of `str.format` for each number.
            *numbers: Amounts done so far.
        """
        if (now := time.monotonic()) >= self._due:
            self._due = now + self._every
            say(text.format(*numbers))


class PrintHandler(logging.Handler):
    """Prints messages on standard output without level or time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message to the current `sys.stdout`, which a notebook replaces."""
        if sys.stdout is None:  # a process without standard output
            return
        with contextlib.suppress(OSError):  # a reader that is gone, or a full disk
            sys.stdout.write(record.getMessage() + "\n")
            sys.stdout.flush()


@contextlib.contextmanager
def show_messages() -> Iterator[None]:
    """Print messages within, unless the program has configured the logger or its level."""
    if logger.handlers or logger.isEnabledFor(logging.INFO):
        yield
        return
    handler = PrintHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    propagated = logger.propagate
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = propagated


@contextlib.contextmanager
def mute(name: str, text: str) -> Iterator[None]:
    """Drop the records of another library's logger that contain a text.

    Args:
        name: Name of the logger.
        text: Part of the message.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    noisy = logging.getLogger(name)
    noisy.addFilter(is_kept)
    try:
        yield
    finally:
        noisy.removeFilter(is_kept)
