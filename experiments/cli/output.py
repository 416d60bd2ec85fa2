# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Standard output of the commands: the first process speaks, and nobody need listen.

`python -m experiments.doctor | head -3` closes the pipe early, and a terminal may be closed. The
command then goes on in silence to its end, so that its files and its exit code are what they would
have been.
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
    """No routing advice on configs that are only on their way to the one that is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoutingWarning)
        yield


def say(text: str) -> None:
    """Prints on the first process, at once.

    Args:
        text: whole lines.
    """
    if jax.process_index() == 0:
        write(text)


def write(text: str) -> None:
    """Prints on this process, without asking JAX which one it is.

    Args:
        text: whole lines.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        if not is_gone(error):
            raise
        # What is still in the buffer would fail again when the interpreter exits.
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)
