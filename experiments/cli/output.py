# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prints on standard output, on the first process only, and survives a closed pipe.

After `python -m experiments.doctor | head -3`, or when the terminal is closed, a command continues
without output to its end, with the same files and exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

import jax

from jaxmoe.routing.composition import RoutingWarning
from jaxmoe.tracking.console import is_gone


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence routing advice on configs that are not final yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoutingWarning)
        yield


def say(text: str) -> None:
    """Print on the first process and flush.

    Args:
        text: One or more lines.
    """
    if jax.process_index() == 0:
        write(text)


def write(text: str) -> None:
    """Print on this process and flush, without asking JAX for its number.

    Args:
        text: One or more lines.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        if not is_gone(error):
            raise
        # The rest of the buffer would raise again when the interpreter exits.
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)
