# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of functions, the parts in which a message grows, and how calls are spelled."""

from __future__ import annotations

import dataclasses
import secrets
import string
from collections.abc import Iterator

_CHARACTERS = string.ascii_letters + string.digits


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function."""

    name: str
    """Name of the function."""
    arguments: str
    """JSON object of the arguments, as the model spelled it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MessagePart:
    """What a part of an answer adds to its message: one of content, reasoning and a call."""

    content: str = ""
    """Text of the content."""
    reasoning: str = ""
    """Text of the reasoning."""
    call: int | None = None
    """Number of the call that grows."""
    id: str = ""
    """Id of the call, with its first part alone."""
    name: str = ""
    """Name of the function, with the first part of a call alone."""
    arguments: str = ""
    """Text of the arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallSpelling:
    """How a family of models spells calls, where a grammar makes it do so."""

    begin: str = ""
    """Text before the first call."""
    before: str
    """Text before the arguments; NAME stands for the name of the function."""
    after: str
    """Text behind the arguments."""
    between: str
    """Text between two calls."""
    end: str = ""
    """Text behind the last call."""

    def before_arguments(self, name: str) -> str:
        """Return the text before the arguments of a function.

        Args:
            name: Name of the function, which JSON spells as it is.
        """
        return self.before.replace("NAME", name)


def new_id() -> str:
    """Return an id of a call: nine letters and digits, as the chat templates of Mistral ask."""
    return "".join(secrets.choice(_CHARACTERS) for _ in range(9))


def call_parts(call: FunctionCall, number: int, identifier: str) -> Iterator[MessagePart]:
    """Yield the parts of a whole call: its name, and its arguments.

    Args:
        call: The call.
        number: Its place among the calls of the message.
        identifier: Its id.
    """
    yield MessagePart(call=number, id=identifier, name=call.name)
    yield MessagePart(call=number, arguments=call.arguments)
