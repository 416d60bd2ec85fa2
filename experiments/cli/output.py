# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prints on standard output, on the first process only, and silences advice.

What cannot be written is dropped, as `experiments/cli/streams.py` has it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import jax

from experiments.cli.streams import announce as announce
from experiments.cli.streams import dropped_output as dropped_output
from experiments.cli.streams import open_closed_streams as open_closed_streams
from experiments.cli.streams import warn as warn
from experiments.cli.streams import write as write
from jaxmoe.routing.composition import RoutingWarning


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
