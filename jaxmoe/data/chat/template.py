# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of chat templates, which write messages as text and control tokens.

To add a template: a class with the interface `ChatTemplate`; `jaxmoe/data/chat/built_in.py` or a
file of its own; `jaxmoe/data/chat/__init__.py` (its name).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxmoe.data.chat.messages import Message
from jaxmoe.data.tokenizer import Tokenizer


class ChatPiece(NamedTuple):
    """A part of a rendered conversation, encoded by itself."""

    kind: Literal["text", "control", "begin", "separator"]
    """text: encoded as it is. control: special tokens that it spells are those tokens. begin: the
    id that begins a document. separator: the id between documents."""
    text: str = ""


@runtime_checkable
class ChatTemplate(Protocol):
    """A template; hashable."""

    @property
    def end(self) -> ChatPiece | None:
        """What ends an answer, and stops generation; None if it is unknown."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Further ids that end an answer, as the model of the tokenizer declares them."""
        ...

    def pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Iterator[ChatPiece]:
        """Yield the pieces of a conversation.

        Args:
            messages: Turns, in order.
            add_generation_prompt: Whether to write what comes before an answer at the end.

        Raises:
            ConversationError: The template cannot write these messages.
        """
        ...

    def with_variables(self, values: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with values of its variables; itself where it has none.

        Args:
            values: JSON values by name.

        Raises:
            ConversationError: A name is that of a value which the template is given anyway.
        """
        ...

    def with_tools(self, tools: str) -> ChatTemplate:
        """Return the template with functions that an answer may call.

        Args:
            tools: JSON list of the functions, as requests of OpenAI's API describe them.

        Raises:
            ConversationError: The template writes none.
        """
        ...

    def reserved_texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return texts that a message must not spell, because they would be read as control."""
        ...

    def jinja(self, separator: str, begin: str | None = None) -> str:
        """Return the template as chat_template.jinja of a tokenizer holds it.

        Args:
            separator: Text of the id between documents.
            begin: Text of the id that begins a document; the separator when None.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Return what determines the text, as JSON values."""
        ...
