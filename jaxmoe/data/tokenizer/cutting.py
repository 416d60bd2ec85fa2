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

_LOOKED_AT = 3
"""Most characters that one match of a pattern looks at."""
_PIECE = 2**16
"""Characters from which on a piece ends at the next place where it may."""
_ANYWHERE = re.compile(r"\S(?=[ \n])|[^\W_](?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")
"""Last character before a cut. Python's white space includes that of the pre-tokeniser."""
BEFORE_SPACES = re.compile(r"\S(?= [\s\S])")
"""Last character before a cut that is followed by a space, which does not end the text."""
USUAL = re.compile(r"\S(?= )|[^\W_](?=[\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")
"""Last character before a cut where most pre-tokenisers end a word."""


def pieces(parts: Iterable[str], places: re.Pattern[str] = _ANYWHERE) -> Iterator[str]:
    """Yield the pieces of a text, in order; one, if there is no place to cut.

    At most a piece and a part are in memory, and the pieces do not depend on where parts end.

    Args:
        parts: Text to cut, in parts of any size.
        places: Pattern of the last character of a piece.
    """
    text = ""
    searched = 0
    for part in parts:
        begin = 0
        text += part
        while place := places.search(text, max(begin + _PIECE, searched)):
            yield text[begin : place.end()]
            begin = place.end()
        # Only the characters that a pattern looks at behind the end were missing.
        searched = max(0, len(text) - begin - _LOOKED_AT)
        text = text[begin:]
    yield text


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
        for piece in pieces([text]):
            characters += len(piece)
            progress.at("tokenizer: {:.0f} million characters read", characters / 1e6)
            yield piece
    say(f"tokenizer: {characters / 1e6:.0f} million characters read, merging ...")
