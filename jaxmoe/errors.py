# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base classes of the exceptions that the library raises itself.

What a user wrote wrongly is a plain `ValueError`. Everything else derives from `JaxmoeError`, and
also from the built-in exception that describes it (`CheckpointError` is a `ValueError` as well).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar


def printable(text: str, kept: str = "") -> str:
    """Return a message in which control characters are escaped, as names of files may have them.

    Args:
        text: Message.
        kept: Control characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


class JaxmoeError(Exception):
    """Base class of the library's exceptions."""


class EndRunError(JaxmoeError):
    """Ends a training run in order: raised by a hook or a step, and turned into a status.

    `jaxmoe.training.loop.Loop` catches it, logs the message and ends with `status`.
    """

    status: ClassVar[str]
    """Status of the run, as in `Loop.status` and `summary.json`."""


class ConfigurationError(JaxmoeError, ValueError):
    """A `ValueError` that was raised while a run was prepared: the user can correct the input."""


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """Turn every `ValueError` inside into a `ConfigurationError` with the same message."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
