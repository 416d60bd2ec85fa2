# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains on the answers of conversations.

    jaxmoe pretrain tiny data:chat --data.path chats.jsonl

A record is a conversation in the form of OpenAI, TRL, ShareGPT or Alpaca (`messages.py`). A
template writes it as tokens, and the loss has the tokens of its answers alone (`render.py`).

To add a template: `jaxmoe/data/chat/template.py` (the interface to implement),
`jaxmoe/data/chat/__init__.py` (its name).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from typing import ClassVar

from jaxmoe import combinations
from jaxmoe.data.batch import DataError
from jaxmoe.data.chat.built_in import ChatML, Plain, read_built_in
from jaxmoe.data.chat.conversations import Conversations, holds_conversations
from jaxmoe.data.chat.messages import ROLES, ConversationError, Message, read_messages
from jaxmoe.data.chat.render import (
    Masked,
    TrainOn,
    first_control,
    mask_conversation,
    render,
    stop_ids,
    stop_sequences,
)
from jaxmoe.data.chat.template import ChatTemplate
from jaxmoe.data.chat.tokenizer_template import MORE_TEMPLATES, read_template
from jaxmoe.data.packed import PackedSource, build_sources
from jaxmoe.data.packing import CONCATENATED_WEIGHTS
from jaxmoe.data.pieces import Long
from jaxmoe.data.reading.config import ReadingConfig
from jaxmoe.data.source import SourceKind, SourceTraits, TemplateName
from jaxmoe.data.tokenizer import Tokenizer, TokenizerConfig
from jaxmoe.optional import MissingPackageError

masked = mask_conversation
"""`mask_conversation` by the name that programs of version 0.1 import."""

_TRAINED_DAY = datetime.date(2026, 1, 1)
"""Day of conversations to train on, for templates that write one."""


def template_of(
    name: TemplateName, tokenizer: TokenizerConfig, *, day: datetime.date | None = None
) -> ChatTemplate:
    """Return a template.

    Args:
        name: Name of the template.
        tokenizer: Tokenizer, beside which the template `tokenizer` is read.
        day: Day that the template writes, if it writes any; today when None.

    Raises:
        DataError: The tokenizer has no template, or it cannot be read.
    """
    if name != "tokenizer":
        return ChatML() if name == "chatml" else Plain()
    if (file := tokenizer.file) is None:
        raise DataError(
            "template=tokenizer reads the chat_template beside a tokenizer.json, and these tokens"
            " have none: choose chatml or plain"
        )
    template = read_template(file.parent, day=day)
    return read_built_in(template.source, dict(template.special).get("eos_token")) or template


def answer_end_ids(data: SourceKind, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end an answer of conversations.

    There are none of data that writes none, and where the template cannot be evaluated.

    Args:
        data: Data config.
        tokenizer: Its tokenizer; None where it has none.
    """
    if data.traits.template is None or data.tokenizer is None or tokenizer is None:
        return ()
    with contextlib.suppress(DataError, MissingPackageError):
        return stop_ids(template_of(data.traits.template, data.tokenizer), tokenizer)
    return ()


__all__ = [
    "MORE_TEMPLATES",
    "ROLES",
    "ChatConfig",
    "ChatTemplate",
    "ConversationError",
    "Masked",
    "Message",
    "TemplateName",
    "answer_end_ids",
    "first_control",
    "holds_conversations",
    "mask_conversation",
    "masked",
    "read_built_in",
    "read_messages",
    "render",
    "stop_ids",
    "stop_sequences",
    "template_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig(ReadingConfig):
    """Conversations from files of your own; trains on the answers."""

    name: ClassVar[str] = "chat"
    is_implied: ClassVar[bool] = False

    path: tuple[str, ...] = ()
    """JSON, CSV or Parquet files, globs or directories, separated by spaces; local, gs:// or
    s3://."""
    validation_path: tuple[str, ...] = ()
    """Files to hold out; a fraction of the conversations of `path` when empty."""
    template: TemplateName = "chatml"
    """chatml: marks around each turn. plain: the role in words before it. tokenizer: the
    chat_template beside data.tokenizer.path."""
    train_on: TrainOn = "assistant"
    """assistant: every answer. last: the last answer of a conversation. all: every token."""
    long_conversations: Long = "cut"
    """Conversations longer than a row. cut: all pieces with an answer. truncate: the first piece.
    leave_out: none."""

    def __post_init__(self):
        # Not super(): a dataclass with slots is created twice, and the first is not an ancestor.
        ReadingConfig.__post_init__(self)
        if self.packing == "concatenate":
            raise ValueError(CONCATENATED_WEIGHTS)
        if not self.tokenizer.is_text:
            raise ValueError(
                "data.tokenizer:ids has no text, and conversations are text: choose"
                " data.tokenizer:bytes, :file or :trained"
            )
        combinations.check(data=self)

    def for_evaluation(self) -> ChatConfig:
        """Return the config that holds out all files, unless it names held-out files."""
        return dataclasses.replace(self, validation_path=self.validation_path or self.path)

    @property
    def traits(self) -> SourceTraits:
        """Properties that the rest of the library depends on."""
        return dataclasses.replace(
            super(ChatConfig, self).traits,
            has_loss_weights=self.train_on != "all",
            template=self.template,
        )

    def build_template(self) -> ChatTemplate:
        """Return the template of prompts and conversations.

        Raises:
            DataError: The tokenizer has none, or it cannot be read.
        """
        return template_of(self.template, self.tokenizer, day=_TRAINED_DAY)

    def build(self, seed: int = 0) -> PackedSource:
        """Read, render and plan the conversations, or read them from the cache.

        Raises:
            DataError: A path, a file or a record cannot be used.
        """
        if not self.path:
            raise DataError("data.path is empty: give files, globs or directories after it")
        template = self.build_template()

        def conversations(paths: tuple[str, ...], field: str) -> Conversations:
            return Conversations(paths, template, self.train_on, field)

        held_out = None
        if self.validation_path:
            held_out = conversations(self.validation_path, "data.validation_path")
        train = conversations(self.path, "data.path")
        sources = build_sources(
            self,
            self.name,
            {"": train},
            held_out=held_out,
            unit="conversations",
            long=self.long_conversations,
            seed=seed,
        )
        return sources[""]
