# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prints on the standard streams, and survives output that cannot be written.

After `jaxmoe doctor | head -3`, on a full disk, or when the terminal is closed, a
command continues without output to its end, with the same files and exit code. All but a closed
pipe is one warning on standard error. Importing this file imports no JAX, for the list of commands.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator

from jaxmoe.tracking.console import is_gone, why_not_written

logger = logging.getLogger(__name__)


def say(text: str) -> None:
    """Print on the first process and flush.

    Args:
        text: One or more lines.
    """
    if importlib.import_module("jax").process_index() == 0:
        write(text)


def write(text: str) -> None:
    """Print on this process and flush, without asking JAX for its number.

    Args:
        text: One or more lines.
    """
    with dropped_output():
        print(text)


def announce(text: str) -> None:
    """Print what takes time on standard error, if that is a terminal: the output may be parsed.

    Args:
        text: One line.
    """
    with contextlib.suppress(OSError):
        if sys.stderr is not None and sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print on standard error and flush, unless it is closed.

    Args:
        text: One or more lines.
    """
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def dropped_output() -> Iterator[None]:
    """Print within, and flush; after an error all output of the process is dropped."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if not is_gone(error):
            logger.warning("%s: the command continues without it", why_not_written(error))
        # The rest of the buffer would raise again when the interpreter exits.
        with contextlib.suppress(OSError):  # a stream that is no file has no such rest
            silence = os.open(os.devnull, os.O_WRONLY)
            if sys.stdout is not None:
                os.dup2(silence, sys.stdout.fileno())
            os.close(silence)


def open_closed_streams() -> None:
    """Open the null device for standard streams that the process was started without.

    Otherwise the next file takes the number of the stream, and receives what is printed.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(opened)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w", encoding="utf-8")
            setattr(sys, name, stream)
