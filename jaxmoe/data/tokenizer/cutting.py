# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts long texts into pieces that byte-level BPE encodes as it encodes the whole.

`tokenizers` needs about 100 bytes of memory for each byte of a text. Its byte-level pre-tokeniser
(the regular expression of GPT-2) ends a token wherever white space follows another character, or
punctuation a letter or digit, and no token depends on what precedes it, so that texts may be cut
there. Chinese and Japanese texts are cut at their punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxmoe.messages import Progress, say

_PIECE = 2**16
"""Characters from which on a piece ends at the next place where it may."""
_ANYWHERE = re.compile(r"\S(?=[ \n])|[^\W_](?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")
"""Last character before a cut. Python's white space includes that of the pre-tokeniser."""
BEFORE_SPACES = re.compile(r"\S(?= [\s\S])")
"""Last character before a cut that is followed by a space, which does not end the text."""
USUAL = re.compile(r"\S(?= )|[^\W_](?=[\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")
"""Last character before a cut where most pre-tokenisers end a word."""


def pieces(text: str, places: re.Pattern[str] = _ANYWHERE) -> Iterator[str]:
    """Yield the pieces of a text, in order; one, if there is no place to cut.

    Args:
        text: Text to cut.
        places: Pattern of the last character of a piece.
    """
    begin = 0
    while len(text) - begin > _PIECE and (place := places.search(text, begin + _PIECE)):
        yield text[begin : place.end()]
        begin = place.end()
    yield text[begin:]


def cuts_at_spaces(data: dict[str, Any]) -> bool:
    """Return whether a tokenizer encodes pieces as it encodes the whole text.

    Args:
        data: Content of its tokenizer.json.
    """
    splitter = data.get("pre_tokenizer") or {}
    model = data["model"]
    added = data.get("added_tokens") or []
    return (
        data.get("normalizer") is None
        and splitter.get("type") == "ByteLevel"
        and not splitter.get("add_prefix_space", True)
        and splitter.get("use_regex", True)
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(token.get("special") for token in added)  # others are found in text first
    )


def announced_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of the texts, and log how many characters were read."""
    progress = Progress()
    characters = 0
    for text in texts:
        for piece in pieces(text):
            characters += len(piece)
            progress.at("tokenizer: {:.0f} million characters read", characters / 1e6)
            yield piece
    say(f"tokenizer: {characters / 1e6:.0f} million characters read, merging ...")
