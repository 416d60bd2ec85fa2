# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads conversations of files as masked token ids: a collection.

A template that writes earlier answers in another way than the last one (without their thoughts, as
those of reasoning models) gives a document for each answer, with the turns before it: what the
model reads when it writes that answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.chat.messages import (
    FIELDS,
    Conversation,
    ConversationError,
    as_json,
    is_conversation,
    read_conversation,
)
from jaxmoe.data.chat.render import (
    Masked,
    PrefixError,
    TrainOn,
    check_calls,
    mask_answers,
    mask_conversation,
)
from jaxmoe.data.chat.template import ChatTemplate
from jaxmoe.data.files import FileCollection
from jaxmoe.data.held_out import digest
from jaxmoe.data.reading.formats import CONVERSATIONS
from jaxmoe.data.reading.paths import find_files
from jaxmoe.data.reading.records import BadRecord, Record
from jaxmoe.data.reading.rows import has_rows, read_rows
from jaxmoe.data.tokenizer import Tokenizer

_LONGEST_RECORD = 2**24
"""Bytes of a record of JSON above which it is refused."""
_MOST_FILES = 16
"""Files whose first record tells whether all are conversations."""


def conversation_columns(path: epath.Path, names: Sequence[str]) -> Sequence[str]:
    """Return the columns of a table that make a conversation.

    Args:
        path: File, for messages.
        names: Names of all its columns.

    Raises:
        DataError: They make none.
    """
    if not is_conversation(names):
        rule = ", or ".join(" and ".join(map(repr, form)) for form in CONVERSATIONS)
        raise DataError(
            f"{path} has columns {', '.join(map(repr, names))}, not {rule}: rename them"
        )
    return [name for name in names if name in FIELDS]


def holds_conversations(paths: Sequence[str], field: str = "data.path") -> bool:
    """Return whether files hold conversations, by the first record of each of the first files.

    Args:
        paths: Files, globs or directories.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file, or a file cannot be read.
    """
    files = [epath.Path(entry.path) for entry in find_files(paths, field).files]
    return bool(files) and all(map(_begins_with_conversation, files[:_MOST_FILES]))


def _begins_with_conversation(path: epath.Path) -> bool:
    """Return whether the first record of a file has the fields of a conversation."""
    if not has_rows(path):
        return False
    try:
        first = next(read_rows(path, lambda names: names, longest=_LONGEST_RECORD), None)
    except DataError:  # reading the data says what is wrong
        return False
    if first is None or isinstance(first, BadRecord) or not isinstance(first.value, dict):
        return False
    return is_conversation(first.value.keys())


class Conversations(FileCollection):
    """Conversations of JSON, CSV or Parquet files.

    Args:
        paths: Files, globs or directories.
        template: How turns are written.
        train_on: Tokens to train on.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file.
    """

    has_weights = True

    def __init__(self, paths: Sequence[str], template: ChatTemplate, train_on: TrainOn, field: str):
        super().__init__(paths, field)
        self._template = template
        self._train_on: TrainOn = train_on
        self._endless: dict[str, int] = {}
        self._parted: list[str] = []

    def identity(self) -> Any:
        """Return what identifies the files, the template and the tokens to train on."""
        return {"files": self.stamps, **self._mask()}

    def content(self) -> dict[str, Any]:
        """Return sizes and sha256 of the files, the template and the tokens to train on."""
        return {**self.content_of_files, **self._mask()}

    def records(self, tokenizer: Tokenizer | None) -> Iterator[Record | BadRecord]:
        """Yield the conversations of all files; without a tokenizer, their text."""
        for path in self.files:
            warn = functools.partial(self.without_checksum, path)
            columns = functools.partial(conversation_columns, path)
            rows = read_rows(path, columns, longest=_LONGEST_RECORD, on_no_checksum=warn)
            for row in rows:
                if isinstance(row, BadRecord):
                    yield row
                    continue
                try:
                    yield from self._records_of(row.where, read_conversation(row.value), tokenizer)
                except ConversationError as error:
                    yield BadRecord(f"{row.where}: {error}")

    def warnings(self) -> list[str]:
        """Return what `records` found that does not stop it; answers without an end as well."""
        lines = self.warnings_of_files()
        if self._parted:
            lines.append(
                f"{self}: {len(self._parted):,} conversations are trained answer by answer,"
                f" {self._parted[0]} among them: the template writes earlier answers in another way"
                " than the last one, so that each answer is a document with the turns before it."
                " --data.train_on last trains the last answers alone"
            )
        if not self._endless:
            return lines
        end = self._template.end
        never = "the template names no end of an answer"
        if end is not None:
            written = "the separator between documents" if not end.text else repr(end.text)
            ids = "".join(f" or id {token}" for token in self._template.end_ids)
            never = (
                f"the template does not write {written}{ids} behind them, where generation stops"
            )
        return [
            *lines,
            f"{self}: {sum(self._endless.values()):,} answers are trained without an end,"
            f" {next(iter(self._endless))} among them: {never}. The model will not end its answers:"
            " choose data.template chatml or plain, or a template that ends each answer so",
        ]

    def _records_of(
        self, where: str, conversation: Conversation, tokenizer: Tokenizer | None
    ) -> Iterator[Record]:
        """Yield the documents of a conversation: one, or one for each of its answers."""
        messages, tools = conversation
        template = self._template if tools is None else self._template.with_tools(tools)
        key = digest((as_json(messages) + (tools or "")).encode())
        if tokenizer is None or any(message.calls for message in messages):
            pieces = list(template.pieces(messages, add_generation_prompt=False))
            check_calls(messages, pieces)
            if tokenizer is None:
                yield Record(where, "".join(piece.text for piece in pieces), digest=key)
                return
        try:
            parts = [mask_conversation(messages, template, tokenizer, self._train_on)]
        except PrefixError:
            parts = mask_answers(messages, template, tokenizer)
            self._parted.append(where)
        for part in parts:
            yield self._record(where, part, tokenizer, key)

    def _record(self, where: str, masked: Masked, tokenizer: Tokenizer, key: int) -> Record:
        if masked.endless:
            self._endless[where] = masked.endless
        tokens = masked.tokens
        tokens = tokens.astype(np.uint8) if tokenizer.vocab_size <= 256 else tokens
        return Record(where, tokens, weights=masked.weights, digest=key)

    def _mask(self) -> dict[str, Any]:
        return {**self._template.identity(), "train_on": self._train_on}
