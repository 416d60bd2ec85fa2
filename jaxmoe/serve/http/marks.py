# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Special tokens that parsers look for, which decoding leaves out of a text otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.data.source import token_bytes
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.generation.text_stream import TextCodec


class MarkedCodec:
    """A codec whose texts have some special tokens too."""

    def __init__(self, codec: TextCodec, marks: Mapping[int, str]):
        """Show special tokens.

        Args:
            codec: Codec of the other tokens.
            marks: Texts of the special tokens by id.
        """
        self._codec = codec
        self._marks = dict(marks)
        self._ids = np.array(list(self._marks), np.int32)

    def encode(self, text: str) -> Any:
        """Return the token ids of a prompt; a mark in it is text."""
        return self._codec.encode(text)

    def decode(self, tokens: Any) -> str:
        """Return the text of token ids, with the marks."""
        ids = np.asarray(tokens, np.int32)
        parts = list[str]()
        start = 0
        for place in np.flatnonzero(np.isin(ids, self._ids)).tolist():
            parts += [self._plain(ids[start:place]), self._marks[int(ids[place])]]
            start = place + 1
        return "".join([*parts, self._plain(ids[start:])])

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text."""
        mark = self._marks.get(token)
        return token_bytes(self._codec, token, is_first=is_first) if mark is None else mark.encode()

    def _plain(self, ids: np.ndarray) -> str:
        return self._codec.decode(ids) if len(ids) else ""


def with_marks(codec: TextCodec, tokenizer: Tokenizer, marks: Sequence[str]) -> TextCodec:
    """Return a codec whose texts have some marks; itself where its texts have them already.

    Args:
        codec: Codec of a model.
        tokenizer: Its tokenizer.
        marks: Texts that may be special tokens.
    """
    hidden = dict[int, str]()
    for mark in marks:
        ids = np.asarray(tokenizer.encode_controls(mark)).tolist()
        if len(ids) == 1 and not token_bytes(codec, ids[0]):
            hidden[ids[0]] = mark
    return MarkedCodec(codec, hidden) if hidden else codec
