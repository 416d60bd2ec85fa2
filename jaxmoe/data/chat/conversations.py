# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads conversations of files as masked token ids: a collection."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmoe.data.chat.messages import (
    COLUMNS,
    ConversationError,
    Message,
    as_json,
    read_conversation,
)
from jaxmoe.data.chat.render import TrainOn, mask_conversation
from jaxmoe.data.chat.template import ChatTemplate
from jaxmoe.data.files import FileCollection
from jaxmoe.data.held_out import digest
from jaxmoe.data.reading.records import BadRecord, Record
from jaxmoe.data.reading.rows import read_rows
from jaxmoe.data.tokenizer import Tokenizer


class Conversations(FileCollection):
    """Conversations of JSON lines or Parquet files.

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
            for row in read_rows(path, COLUMNS, on_no_checksum=warn):
                if isinstance(row, BadRecord):
                    yield row
                    continue
                try:
                    messages = read_conversation(row.value)
                    yield self._record(row.where, messages, tokenizer)
                except ConversationError as error:
                    yield BadRecord(f"{row.where}: {error}")

    def warnings(self) -> list[str]:
        """Return what `records` found that does not stop it; answers without an end as well."""
        if not self._endless:
            return self.warnings_of_files()
        end = self._template.end
        never = "the template names no end of an answer"
        if end is not None:
            written = "the separator between documents" if not end.text else repr(end.text)
            ids = "".join(f" or id {token}" for token in self._template.end_ids)
            never = (
                f"the template does not write {written}{ids} behind them, where generation stops"
            )
        return [
            *self.warnings_of_files(),
            f"{self}: {sum(self._endless.values()):,} answers are trained without an end,"
            f" {next(iter(self._endless))} among them: {never}. The model will not end its answers:"
            " choose data.template chatml or plain, or a template that ends each answer so",
        ]

    def _record(
        self, where: str, messages: Sequence[Message], tokenizer: Tokenizer | None
    ) -> Record:
        key = digest(as_json(messages).encode())
        if tokenizer is None:
            pieces = self._template.pieces(messages, add_generation_prompt=False)
            return Record(where, "".join(piece.text for piece in pieces), digest=key)
        tokens, weights, endless = mask_conversation(
            messages, self._template, tokenizer, self._train_on
        )
        if endless:
            self._endless[where] = endless
        tokens = tokens.astype(np.uint8) if tokenizer.vocab_size <= 256 else tokens
        return Record(where, tokens, weights=weights, digest=key)

    def _mask(self) -> dict[str, Any]:
        return {**self._template.identity(), "train_on": self._train_on}
