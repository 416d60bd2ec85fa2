# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Messages of a run to its user, through the logger "jaxmoe.messages" at level INFO.

The commands print them on standard output (`experiments/cli/process.py`). In a notebook,
`logging.getLogger("jaxmoe.messages").setLevel("INFO")` with a handler shows them.
"""

from __future__ import annotations

import logging

import jax

logger = logging.getLogger(__name__)


def say(text: str) -> None:
    """Log whole lines on the first process only."""
    if jax.process_index() == 0:
        write(text)


def write(text: str) -> None:
    """Log whole lines on this process, without asking JAX which one it is."""
    logger.info("%s", text)
